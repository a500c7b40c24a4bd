"""The training loop: steps, counters, checkpoints at their interval, and resuming from one.

One optimizer step is `accumulation_steps` micro-batches. After it, in this order: the step is
counted, the scheduler moves, the coordinator is told, callbacks are called, and a checkpoint is
written if one is due. The loop never waits for the device, unless a loss scaler does.
"""

from __future__ import annotations

import logging
import math
import operator
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trainer_core import resume as resuming
from trainer_core.batches import call_model, count, endless, has_length, loss_of, to_device
from trainer_core.callbacks import Callbacks
from trainer_core.checkpoint import CheckpointManager
from trainer_core.coordinator import SyncCoordinator
from trainer_core.precision import PrecisionPlan, resolve_precision
from trainer_core.progress import Progress, progress_of
from trainer_core.redaction import redact
from trainer_core.resume import ResumeWarning
from trainer_core.rng import capture_rng_state, restore_rng_state
from trainer_core.state import build_checkpoint, check_checkpoint

__all__ = ["ResumeWarning", "TrainResult", "Trainer"]

_MOST_SKIPS = 100
_END = object()


@dataclass(frozen=True)
class TrainResult:
    """What a `fit` came to.

    `steps`, `samples` and `tokens` are absolute, with what was resumed. `final_loss` is that of the
    last step (the mean over its micro-batches), None if this fit made no step. `elapsed_s` is this
    fit's time in seconds. `metrics` are its records: `step`, `loss`, `lr`, `samples`, `tokens` and
    `elapsed_s`, one a step, evenly thinned out above 1,024.
    """

    steps: int
    samples: int
    tokens: int
    final_loss: float | None
    elapsed_s: float
    metrics: list[dict[str, Any]] = field(default_factory=list)


class _Accumulated(NamedTuple):
    loss: torch.Tensor
    samples: int
    tokens: int


class Trainer:
    """Trains `model` on the batches of `dataloader`, which is gone through again when it ends.

    `device`: where the model is moved to, and each batch. `precision`: a PrecisionPlan, or what
    `resolve_precision` takes; None is "auto". `config`: a mapping, dataclass or None, stored in
    checkpoints with its secrets redacted, and compared on resume. `checkpoint_manager`: writes a
    checkpoint wherever its `should_save` says so, and with `save_final` also after the last step.
    `coordinator`: see SyncCoordinator. `logger`: for plain progress lines and warnings.

    A batch goes to the model as `model(**batch)` if it is a mapping, `model(*batch)` if it is a
    list or tuple, else `model(batch)`; see `count` in trainer_core.batches for what counts as
    samples and tokens. The model returns a loss, a mapping with `loss`, or a tuple that begins with
    one; `loss_fn(model, batch)` replaces call and loss. `accumulation_steps`: micro-batches for
    each optimizer step, each loss divided by their number. `grad_clip`: the greatest norm of all
    the optimizer's gradients together. `callbacks`: see Callback. A loss that is not finite is told
    once in the log, when it is read for display; training goes on.

    Raises ValueError for a number out of range, TypeError for a part of the wrong kind.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataloader: Iterable[Any],
        *,
        device: torch.device | str | int,
        config: Any = None,
        scheduler: Any | None = None,
        precision: PrecisionPlan | str | None = None,
        logger: logging.Logger | None = None,
        checkpoint_manager: CheckpointManager | None = None,
        coordinator: SyncCoordinator | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        loss_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
        accumulation_steps: int = 1,
        grad_clip: float | None = None,
        callbacks: Iterable[Any] = (),
        save_final: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.dataloader = dataloader
        self.scheduler = _checked_scheduler(scheduler)
        self.precision = _plan(precision, self.device)
        self.config = config
        redact(config)  # what it can't take is better known now than at the first checkpoint
        self.logger = logger if logger is not None else logging.getLogger(__name__)
        self.checkpoint_manager = checkpoint_manager
        self.coordinator = _checked_coordinator(coordinator)
        self.max_steps = None if max_steps is None else _at_least(1, "max_steps", max_steps)
        self.loss_fn = loss_fn
        self.accumulation_steps = _at_least(1, "accumulation_steps", accumulation_steps)
        self.grad_clip = _checked_clip(grad_clip)
        self.save_final = save_final
        self.step = _at_least(0, "start_step", start_step)
        self.samples = 0
        self.tokens = 0
        self._callbacks = Callbacks(callbacks)
        self._scaler: torch.amp.GradScaler | None = None
        # Resumed, but not yet given to whom they belong: they only exist inside a fit.
        self._scaler_state: Mapping[str, Any] | None = None
        self._coordinator_state: Mapping[str, Any] | None = None
        self._resumed_at: int | None = None
        self._saved_at: int | None = None

    def fit(self, max_steps: int | None = None) -> TrainResult:
        """Trains until `max_steps` optimizer steps are done in all, those before a resume included.

        Without it, the `max_steps` of the constructor. If that many are done already, nothing is
        started, changed or written. A loader that is itself an iterator may end before: the fit
        then ends too, with a warning in the log. Raises ValueError for a missing `max_steps` and
        for a loader that gives nothing, RuntimeError when a loss scaler skips 100 steps in a row,
        and whatever model, coordinator, callbacks and checkpoint manager raise.
        """
        target = self._target(max_steps)
        began = time.perf_counter()
        if self.step >= target:
            self.logger.info("step %d of %d is done already: nothing to do", self.step, target)
            return TrainResult(self.step, self.samples, self.tokens, None, 0.0)
        with progress_of(self.logger, self.step, target) as progress:
            with self._coordinated():
                self._prepare()
                self._callbacks.call("on_fit_start", self)
                self._train(target, progress)
                self._save_last()
            loss = progress.finish()
        elapsed = time.perf_counter() - began
        totals = self.step, self.samples, self.tokens
        result = TrainResult(*totals, loss, elapsed, progress.records)
        self._callbacks.call("on_fit_end", self, result)
        return result

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint (`CheckpointManager.load_latest` gives one).

        Model, optimizer, scheduler, counters and random numbers are restored at once; the states of
        scaler and coordinator when `fit` has made the one and started the other. Checked first,
        changed after: on any error nothing is changed. Says in one ResumeWarning what is different
        here; what torch then refuses raises torch's own error. Raises CheckpointError for what is
        not a training checkpoint, and for what this model or optimizer could not go on with. The
        position in the data is not part of a checkpoint.
        """
        check_checkpoint(state)
        differences = resuming.differences(
            state,
            model=self.model,
            optimizer=self.optimizer,
            precision=self.precision,
            config=self.config,
            has_scheduler=self.scheduler is not None,
            has_coordinator=self.coordinator is not None,
        )
        if differences:
            self._warn(f"the checkpoint of step {state['step']} and this run differ", differences)
        resuming.apply(state, self.model, self.optimizer, self.scheduler)
        self._restore_counters(state)
        failed = restore_rng_state(state.get("rng"))
        if failed:
            parts = [f"{part}: {reason}" for part, reason in failed.items()]
            self._warn("random numbers go on differently than before", parts)

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint of this moment, as it would be saved. Tensors are shared, not copied."""
        return build_checkpoint(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scaler=self._scaler_section(),
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            config=self.config,
            coordinator=self._coordinator_section(),
            precision=self.precision,
        )

    # Resuming

    def _restore_counters(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.samples = state.get("samples", 0)
        self.tokens = state.get("tokens", 0)
        self._scaler = None
        self._scaler_state = state.get("scaler") or None
        self._coordinator_state = state.get("coordinator")
        self._resumed_at = self.step
        self._saved_at = None

    def _scaler_section(self) -> Mapping[str, Any] | None:
        """Also what was resumed and is not in use: another plan may want it back later."""
        if self._scaler is not None and self._scaler_state is None:
            scaler: dict[str, Any] = self._scaler.state_dict()
            return scaler
        return self._scaler_state

    def _coordinator_section(self) -> Mapping[str, Any] | None:
        """What waits for `fit`, unless no coordinator is there and steps without it outdated it."""
        if self.coordinator is None:
            return self._coordinator_state if self.step == self._resumed_at else None
        if self._coordinator_state is not None:
            return self._coordinator_state
        return self.coordinator.state_dict()

    @staticmethod
    def _warn(title: str, lines: list[str]) -> None:
        warnings.warn("\n  - ".join([f"{title}:", *lines]), ResumeWarning, stacklevel=3)

    # Before and after the steps

    def _target(self, max_steps: int | None) -> int:
        if max_steps is not None:
            return _at_least(1, "max_steps", max_steps)
        if self.max_steps is None:
            raise ValueError("max_steps is needed, in Trainer or in fit: the step to train to")
        return self.max_steps

    @contextmanager
    def _coordinated(self) -> Iterator[None]:
        """The coordinator's life. Its `stop` never hides the error that ended the fit."""
        coordinator = self.coordinator
        if coordinator is None:
            yield
            return
        try:
            coordinator.start()
            if self._coordinator_state is not None:
                coordinator.load_state_dict(self._coordinator_state)
                self._coordinator_state = None
            yield
        except BaseException:
            try:
                coordinator.stop()
            except Exception:
                self.logger.exception("the coordinator could not be stopped")
            raise
        coordinator.stop()

    def _prepare(self) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self._autocast = self._autocast_context()
        self._clipped = self._parameters_to_clip()
        if not self.precision.use_scaler:
            return
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(self.device.type)
        if self._scaler_state is not None:
            self._scaler.load_state_dict(dict(self._scaler_state))
            self._scaler_state = None

    def _autocast_context(self) -> AbstractContextManager[Any]:
        if not self.precision.autocast_enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.dtype)

    def _parameters_to_clip(self) -> list[torch.nn.Parameter]:
        """The optimizer's, in the model's order: the last bit of a norm depends on the order."""
        mine = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        ordered = [mine.pop(id(p)) for p in self.model.parameters() if id(p) in mine]
        return [*ordered, *mine.values()]

    def _first_iterator(self) -> Iterator[Any]:
        """Making an iterator may draw random numbers (a DataLoader's does, for its workers).

        A run that was never interrupted drew them when it began, so a resumed one gives them back.
        Not where the loader has a length: there a checkpoint in mid-pass cannot be gone on from
        exactly, and at the end of a pass the other run too would now make a new iterator.
        """
        if self._resumed_at != self.step or has_length(self.dataloader):
            return iter(self.dataloader)
        before = capture_rng_state()
        first = iter(self.dataloader)
        restore_rng_state(before)
        return first

    def _save_last(self) -> None:
        manager = self.checkpoint_manager
        wanted = self.save_final and self._saved_at != self.step
        if wanted and manager is not None and manager.enabled:
            self._save(manager)

    def _save(self, manager: CheckpointManager) -> None:
        path = manager.save(self.step, self.state_dict())
        self._saved_at = self.step
        self._callbacks.call("on_save", self, self.step, path)

    # Steps

    def _train(self, target: int, progress: Progress) -> None:
        skips = 0
        with closing(endless(self.dataloader, self._first_iterator())) as batches:
            while self.step < target:
                done = self._accumulate(batches)
                if done is None:
                    self._say_ended(target, progress)
                    return
                lr = _as_it_is_now(self.optimizer.param_groups[0]["lr"])
                if self._update():
                    skips = 0
                    self._after_step(done, lr, progress)
                else:
                    skips = self._count_skip(skips)

    def _accumulate(self, batches: Generator[Any, None, None]) -> _Accumulated | None:
        """Gradients of one optimizer step; None if the loader ended before they were whole."""
        total: torch.Tensor | None = None
        samples = tokens = 0
        for _ in range(self.accumulation_steps):
            batch = next(batches, _END)
            if batch is _END:
                self.optimizer.zero_grad(set_to_none=True)
                return None
            more_samples, more_tokens = count(batch)
            samples += more_samples
            tokens += more_tokens
            loss = self._backward(to_device(batch, self.device))
            # A copy: the model may reuse the memory (CUDA graphs), or it is part of a big tensor.
            total = loss.clone() if total is None else total + loss
        assert total is not None
        if self.accumulation_steps > 1:
            total = total / self.accumulation_steps
        return _Accumulated(total, samples, tokens)

    def _backward(self, batch: Any) -> torch.Tensor:
        with self._autocast:
            if self.loss_fn is not None:
                loss = loss_of(self.loss_fn(self.model, batch))
            else:
                loss = loss_of(call_model(self.model, batch))
        part = loss / self.accumulation_steps if self.accumulation_steps > 1 else loss
        (part if self._scaler is None else self._scaler.scale(part)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self) -> bool:
        """One optimizer step; False if the scaler skipped it because a gradient was not finite."""
        if self._scaler is None:
            self._clip()
            self.optimizer.step()
            taken = True
        else:
            taken = self._scaled_update(self._scaler)
        self.optimizer.zero_grad(set_to_none=True)
        return taken

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> bool:
        if self.grad_clip is not None:
            scaler.unscale_(self.optimizer)
            self._clip()
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        # The scale falls if and only if the step was skipped; at 0 it can fall no further.
        after: float = scaler.get_scale()
        return after >= before and after > 0

    def _clip(self) -> None:
        if self.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self._clipped, self.grad_clip)

    def _count_skip(self, skips: int) -> int:
        if skips + 1 >= _MOST_SKIPS:
            raise RuntimeError(
                f"{_MOST_SKIPS} optimizer steps in a row were skipped after step {self.step}: "
                "the gradients are not finite, however small the loss is scaled"
            )
        return skips + 1

    def _after_step(self, done: _Accumulated, lr: Any, progress: Progress) -> None:
        self.step += 1
        self.samples += done.samples
        self.tokens += done.tokens
        if self.scheduler is not None:
            self.scheduler.step()
        coordinator = self.coordinator
        if coordinator is not None and coordinator.after_optimizer_step(self.model, self.step):
            self.optimizer.state.clear()
        progress.note(self.step, done.loss, lr, self.samples, self.tokens)
        if self._callbacks.wants("on_step_end"):
            metrics = {"step": self.step, "loss": done.loss, "lr": lr}
            metrics |= {"samples": self.samples, "tokens": self.tokens}
            self._callbacks.call("on_step_end", self, self.step, metrics)
        manager = self.checkpoint_manager
        if manager is not None and manager.should_save(self.step):
            self._save(manager)

    def _say_ended(self, target: int, progress: Progress) -> None:
        progress.say(
            f"the dataloader ended after step {self.step}, before step {target}; it cannot be "
            "gone through again",
            logging.WARNING,
        )


def _as_it_is_now(lr: Any) -> Any:
    """A learning rate may be a tensor, which schedulers change in place."""
    return lr.clone() if isinstance(lr, torch.Tensor) else lr


def _plan(precision: PrecisionPlan | str | None, device: torch.device) -> PrecisionPlan:
    if isinstance(precision, PrecisionPlan):
        return precision
    return resolve_precision("auto" if precision is None else precision, device)


def _at_least(least: int, name: str, value: int) -> int:
    if isinstance(value, bool) or operator.index(value) < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return operator.index(value)


def _checked_clip(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"grad_clip must be a positive number or None, not {value!r}")
    return value


def _checked_scheduler(scheduler: Any) -> Any:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau needs a metric at each step, which a trainer does not have: "
            "step it in a callback"
        )
    return scheduler


def _checked_coordinator(coordinator: SyncCoordinator | None) -> SyncCoordinator | None:
    if coordinator is not None and not isinstance(coordinator, SyncCoordinator):
        raise TypeError(f"{type(coordinator).__name__} has not all methods of a SyncCoordinator")
    return coordinator
