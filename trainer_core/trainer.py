"""The training loop: steps, counters, checkpoints at their interval, and resuming from one.

One optimizer step is `accumulation_steps` micro-batches. After it, in this order: the step is
counted, the scheduler moves, the coordinator is told, the averaged weights follow, callbacks are
called, and a checkpoint is written if one is due. The loop never waits for the device, unless a
loss scaler does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from trainer_core.callbacks import Callbacks
from trainer_core.checkpoint import CheckpointManager
from trainer_core.coordinator import SyncCoordinator
from trainer_core.loop.arguments import (
    at_least,
    checked_clip,
    checked_coordinator,
    checked_optimizer,
    checked_scheduler,
    plan,
)
from trainer_core.loop.averaging import checked_ema
from trainer_core.loop.preemption import StopFlag, StopSignals, told_to_all
from trainer_core.loop.progress import Progress, progress_of
from trainer_core.loop.result import TrainResult
from trainer_core.loop.schedules import check_horizon
from trainer_core.loop.stepping import Accumulated, LossFunction, Stepper
from trainer_core.precision import PrecisionPlan
from trainer_core.redaction import redact
from trainer_core.resuming.modes import set_modes
from trainer_core.resuming.resumable import Resumable
from trainer_core.resuming.resume import ResumeWarning
from trainer_core.rng import capture_rng_state
from trainer_core.site.failing import Guard, ends_together
from trainer_core.site.gradients import gradient_sync
from trainer_core.site.ranks import Site, site_of

__all__ = ["ResumeWarning", "TrainResult", "Trainer"]

_MOST_SKIPS = 100


class Trainer(Resumable):
    """Trains `model` on the batches of `dataloader`, which is gone through again when it ends.

    `device`: where the model is moved to, and each batch. `precision`: a PrecisionPlan, or what
    `resolve_precision` takes; None is "auto". `config`: a mapping, dataclass or None, stored in
    checkpoints with its secrets redacted, and compared on resume. `checkpoint_manager`: writes a
    checkpoint wherever its `should_save` says so, and with `save_final` also after the last step.
    `coordinator`: see SyncCoordinator. `logger`: for plain progress lines and warnings.

    A batch goes to the model as `model(**batch)` if it is a mapping, `model(*batch)` if it is a
    list or tuple, else `model(batch)`; see `count` in trainer_core.loop.batches for what counts as
    samples and tokens. The model returns a loss, a mapping with `loss`, or a tuple that begins with
    one; `loss_fn(model, batch)` replaces call and loss. `accumulation_steps`: micro-batches for
    each optimizer step, each loss divided by their number. `grad_clip`: the greatest norm of all
    the optimizer's gradients together. `callbacks`: see Callback. `ema`: averaged weights, such as
    `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))`, updated
    after each step and kept in checkpoints; see `averaged_weights`. A loss that is not finite is
    told once in the log, when it is read for display; training goes on.

    Under torchrun every rank has a trainer, with a model in DistributedDataParallel or sharded by
    `fully_shard`, and a `dataloader` of its own: a DistributedSampler is told the number of each
    pass (`set_epoch`). `samples` and `tokens` are the totals of all ranks, losses each rank's own.
    Gradients are exchanged once for a step, in its last micro-batch, and clipped by the norm over
    all ranks. All end at the same step: where one is signalled, all save that step and have the
    same exit code; where one is refused a save, all raise. Only rank 0 shows progress, and
    `on_save` is called on it alone. `state_dict` is each rank's own, `resume` is for all ranks
    together. With the same number of ranks going on is exact; with another one model and optimizer
    are, and `trainer_core.site.per_rank` has the rule for the rest. A coordinator has to know of
    the ranks itself (see `trainer_core.diloco.sited`). `save_on_exception` does nothing but say so:
    a save needs all ranks, and where one has failed the others are somewhere else.

    Any other exception on one rank (from the loader, the model, a callback) is raised there
    within a second or two, and the others raise RankError with its words. A rank that waits in
    torch's own exchange of gradients can't always be brought to raise: it says the words in the log
    at once, and its process ends after half a minute. A loader that is an iterator and ends
    earlier on one rank than on others ends the fit on all, after the same step.

    An exception, or a second Ctrl-C, leaves the checkpoints as they are: whether what is in memory
    can be gone on from, nobody knows. `save_on_exception` saves the last whole step before an
    exception (no interrupt) is raised on, unless it came out of the optimizer, the scheduler or the
    coordinator. The random numbers and the place in the data are those of that step; only what the
    model's forward has changed since (batch statistics, attributes) is not. It costs a copy of
    these at each step.

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
        loss_fn: LossFunction | None = None,
        accumulation_steps: int = 1,
        grad_clip: float | None = None,
        callbacks: Iterable[Any] = (),
        save_final: bool = False,
        ema: Any | None = None,
        save_on_exception: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = checked_optimizer(optimizer)
        self.dataloader = dataloader
        self.scheduler = checked_scheduler(scheduler)
        self.precision = plan(precision, self.device)
        self.config = config
        redact(config)  # what it can't take is better known now than at the first checkpoint
        self.logger = logger if logger is not None else logging.getLogger(__name__)
        self.checkpoint_manager = checkpoint_manager
        self.coordinator = checked_coordinator(coordinator)
        self.max_steps = None if max_steps is None else at_least(1, "max_steps", max_steps)
        self.loss_fn = loss_fn
        self.accumulation_steps = at_least(1, "accumulation_steps", accumulation_steps)
        self.grad_clip = checked_clip(grad_clip)
        self.save_final = save_final
        self.save_on_exception = save_on_exception
        # Random numbers and place in the data after the last whole step; None within one.
        self._whole: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.step = at_least(0, "start_step", start_step)
        self.samples = 0
        self.tokens = 0
        self.ema = checked_ema(ema, self.model)
        self._stop = StopFlag()
        self._site = _site_for(self.model, checkpoint_manager)
        self._begin_keeping(Callbacks(callbacks))

    def fit(
        self,
        max_steps: int | None = None,
        *,
        resume: str = "never",
        allow_partial: Collection[str] = (),
    ) -> TrainResult:
        """Trains until `max_steps` optimizer steps are done in all, those before a resume included.

        Without it, the `max_steps` of the constructor. If that many are done already, nothing is
        started, changed or written. A loader that is itself an iterator may end before: the fit
        then ends too, with a warning in the log. Raises ValueError for a missing `max_steps` and
        for a loader that gives nothing, RuntimeError when a loss scaler skips 100 steps in a row,
        and whatever model, coordinator, callbacks and checkpoint manager raise.

        `resume="auto"` first resumes from the newest valid checkpoint of the manager's directory,
        and begins anew where there was never one; a log line says which. Checkpoints of which none
        is valid are a CheckpointError, and with "must" so is their absence. A trainer that has
        trained or resumed already goes on from where it is. `allow_partial`: see `resume`.

        With an enabled checkpoint manager the directory is claimed for the whole fit (see
        `CheckpointManager.claim`), the fit ends when the last save is safe on disk, and SIGTERM,
        SIGINT and SIGUSR1 work like `stop` (see `trainer_core.loop.preemption`). Raises
        RuntimeError within another fit of this trainer (until its on_fit_end).
        """
        self._refuse_within_fit("fit")
        target = self._target(max_steps)
        began = time.perf_counter()
        self._resume_as_asked(resume, allow_partial)
        if self.step >= target:
            if not self._follows:
                self.logger.info("step %d of %d is done already: nothing to do", self.step, target)
            return TrainResult(self.step, self.samples, self.tokens, None, 0.0)
        check_horizon(self.scheduler, target - self.step)
        self._attributes.note(self.dataloader)
        self._has_begun = True
        shown = progress_of(self.logger, self.step, target, quiet=self._follows)
        with self._fitting(), shown as progress:
            guard = self._guard()
            with guard, self._stoppable() as stop, self._saving(), self._coordinated(), guard:
                with self._exact_random_numbers():
                    stepper = self._stepper()
                    self._start_callbacks()
                    self._settings.settle(self.optimizer, self.scheduler)
                    self._go_to_place()
                self._train(stepper, target, progress)
                self._save_last()
                stopped_by = stop.reason if self.step < target else None
            loss = progress.finish()
        elapsed = time.perf_counter() - began
        totals = self.step, self.samples, self.tokens
        result = TrainResult(*totals, loss, elapsed, progress.records, stopped_by)
        self._callbacks.call("on_fit_end", self, result)
        return result

    def stop(self, reason: str) -> None:
        """Makes the present or next `fit` end after the micro-batch that it is at, and save."""
        self._stop.set(reason)

    def should_stop(self) -> bool:
        """Whether `fit` is about to end early: for callbacks to ask that take long."""
        return self._stop.is_set

    @property
    def _follows(self) -> bool:
        """Whether rank 0 shows what this rank does, too."""
        return self._site is not None and not self._site.leads

    # Before and after the steps

    def _target(self, max_steps: int | None) -> int:
        if max_steps is not None:
            return at_least(1, "max_steps", max_steps)
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
            self._load_coordinator(coordinator)
            yield
        except BaseException:
            try:
                coordinator.stop()
            except Exception:
                self.logger.exception("the coordinator could not be stopped")
            raise
        coordinator.stop()

    def _stepper(self) -> Stepper:
        self.model.train()
        set_modes(
            self.model, self._modes
        )  # those that were resumed; no later fit goes back to them
        self._modes = None
        if self.precision.use_scaler:
            if self._scaler is None:
                self._scaler = torch.amp.GradScaler(self.device.type)
            self._load_scaler(self._scaler)
        return Stepper(
            self.model,
            self.optimizer,
            device=self.device,
            precision=self.precision,
            scaler=self._scaler if self.precision.use_scaler else None,
            loss_fn=self.loss_fn,
            accumulation_steps=self.accumulation_steps,
            grad_clip=self.grad_clip,
            partial=self._partial,
            sync=gradient_sync(self.model),
            ends=ends_together(self._site, self._own_feed().can_end),
        )

    def _guard(self) -> Guard:
        """What one rank alone raises ends the others, too."""
        manager = self.checkpoint_manager
        return Guard(self._site, self, lambda: manager is not None and manager.is_busy)

    @contextmanager
    def _stoppable(self) -> Iterator[StopFlag]:
        """However a fit ends, the next one is not stopped for the same reason."""
        self._stop.ranks = self._site
        try:
            yield self._stop
        finally:
            self._stop.clear()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """The directory is ours, signals stop the fit, and the last save is waited for."""
        manager = self.checkpoint_manager
        if manager is None or not manager.enabled:
            yield
            return
        with StopSignals(self.stop), manager:
            manager.claim()
            manager.finished()  # what was saved before this fit is nothing to tell its callbacks
            yield

    def _save_last(self) -> None:
        manager = self.checkpoint_manager
        if manager is None or not manager.enabled:
            return
        manager.wait()
        is_saved = self._saved_at == self.step and self._partial is None
        if (self.should_stop() or self.save_final) and not is_saved:
            self._save(manager)
            manager.wait()
        self._tell_saved(manager)

    def _save(self, manager: CheckpointManager) -> None:
        if manager.save(self.step, self.state_dict()) is not None:
            self._saved_at = self.step
        self._tell_saved(manager)

    def _tell_saved(self, manager: CheckpointManager) -> None:
        """Tells callbacks what has become safe on disk; a save beside training does so later."""
        for step, path in manager.finished():
            self._callbacks.call("on_save", self, step, path)

    # Steps

    def _train(self, stepper: Stepper, target: int, progress: Progress) -> None:
        feed, skips = self._own_feed(), 0
        self._note_whole()
        try:
            with closing(feed.batches()) as batches:
                self._stop.agree()
                while self.step < target and not self._stop.is_set:
                    if not stepper.accumulate(batches, self.should_stop):
                        break
                    lr = _as_it_is_now(self.optimizer.param_groups[0]["lr"])
                    self._whole = None
                    done = stepper.finish()
                    self._partial = None  # also what was resumed is part of a whole step now
                    if done is not None:
                        skips = 0
                        self._after_step(done, lr, progress)
                    else:
                        self._note_whole()
                        skips = self._count_skip(skips)
                        self._stop.agree()
        except BaseException as error:
            self._partial = None
            self._save_before_raising(error)
            raise
        finally:
            feed.rest()
        self._partial = stepper.partial
        if self.step < target and not self.should_stop():
            self._say_ended(target, progress)

    def _note_whole(self) -> None:
        if self.save_on_exception and self._site is None:
            self._whole = capture_rng_state(), self._own_feed().state_dict()

    def _save_before_raising(self, error: BaseException) -> None:
        manager, whole = self.checkpoint_manager, self._whole
        if manager is None or not manager.enabled or not isinstance(error, Exception):
            return
        if self._site is not None:  # the others are somewhere else, and cannot be asked
            if self.save_on_exception:
                self.logger.error("a rank has failed: nothing is saved, since that needs them all")
            return
        if whole is None or self.step in (0, self._resumed_at, self._saved_at):
            return
        try:
            manager.wait()
            manager.save(self.step, {**self.state_dict(), "rng": whole[0], "data": whole[1]})
            manager.wait()
        except Exception:
            self.logger.exception("step %d could not be saved after a failure", self.step)

    def _count_skip(self, skips: int) -> int:
        if skips + 1 >= _MOST_SKIPS:
            words = (
                f"{_MOST_SKIPS} optimizer steps in a row were skipped after step {self.step}: "
                "the gradients are not finite, however small the loss is scaled"
            )
            raise told_to_all(RuntimeError(words))
        return skips + 1

    def _after_step(self, done: Accumulated, lr: Any, progress: Progress) -> None:
        self.step += 1
        samples, tokens = done.samples, done.tokens
        if self._site is not None:
            samples, tokens = self._site.sum(samples, tokens)
        self.samples += samples
        self.tokens += tokens
        if self.scheduler is not None:
            self.scheduler.step()
        coordinator = self.coordinator
        if coordinator is not None and coordinator.after_optimizer_step(self.model, self.step):
            self.optimizer.state.clear()
        manager = self.checkpoint_manager
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self._note_whole()
        progress.note(self.step, done.loss, lr, self.samples, self.tokens)
        if self._callbacks.wants("on_step_end"):
            metrics = {"step": self.step, "loss": done.loss, "lr": lr}
            metrics |= {"samples": self.samples, "tokens": self.tokens}
            self._callbacks.call("on_step_end", self, self.step, metrics)
        if manager is not None:
            self._tell_saved(manager)
        self._stop.agree()
        if manager is not None and manager.should_save(self.step):
            self._save(manager)

    def _say_ended(self, target: int, progress: Progress) -> None:
        progress.say(
            f"the dataloader ended after step {self.step}, before step {target}; it cannot be "
            "gone through again",
            logging.WARNING,
        )


def _site_for(model: torch.nn.Module, manager: CheckpointManager | None) -> Site | None:
    """The ranks that train the model together, of which the manager then is one of."""
    site = site_of(model)
    if site is None or manager is None:
        return site
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        words = "FullyShardedDataParallel cannot be saved: shard the model with fully_shard instead"
        raise TypeError(words)
    manager.join(site)
    return site


def _as_it_is_now(lr: Any) -> Any:
    """A learning rate may be a tensor, which schedulers change in place."""
    return lr.clone() if isinstance(lr, torch.Tensor) else lr
