"""What a trainer keeps of itself in a checkpoint, and how it goes on from one."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer_core.callbacks import Callbacks
from trainer_core.census.census import Census
from trainer_core.checkpoint import CheckpointManager
from trainer_core.coordinator import SyncCoordinator
from trainer_core.data.feed import Feed
from trainer_core.loop.averaging import swapped
from trainer_core.loop.progress import tell
from trainer_core.loop.stepping import Accumulated, load_partial, partial_problems, partial_section
from trainer_core.precision import PrecisionPlan
from trainer_core.resuming import resume as resuming
from trainer_core.resuming.auto_resume import checked_way, newest_state
from trainer_core.resuming.comparing import differences
from trainer_core.resuming.facts import environment
from trainer_core.resuming.fitting import check_order, names_by_group
from trainer_core.resuming.lazy import give_shapes
from trainer_core.resuming.modes import learning, modes_of, set_modes
from trainer_core.resuming.parts import Parts
from trainer_core.resuming.resume import ResumeWarning
from trainer_core.resuming.settings import Settings
from trainer_core.rng import capture_rng_state, grave_failures, restore_rng_state
from trainer_core.site.per_rank import more_sections
from trainer_core.site.ranks import Site, has_shards
from trainer_core.site.sharded import ShardedState, parameter_names
from trainer_core.site.taking import taken
from trainer_core.state import CheckpointError, build_checkpoint, check_checkpoint
from trainer_core.wrappers import plain_state


class Resumable:
    """The half of `Trainer` that gives and takes checkpoints. Its constructor is the other half's.

    `step`, `samples` and `tokens` count what was done, with what was resumed.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataloader: Iterable[Any]
    device: torch.device
    scheduler: Any | None
    precision: PrecisionPlan
    config: Any
    ema: Any | None
    loss_fn: Any | None
    coordinator: SyncCoordinator | None
    checkpoint_manager: CheckpointManager | None
    accumulation_steps: int
    grad_clip: float | None
    logger: logging.Logger
    step: int
    samples: int
    tokens: int
    _site: Site | None

    def _begin_keeping(self, callbacks: Callbacks) -> None:
        """The constructor's part that is about checkpoints."""
        self._callbacks = callbacks
        self._scaler: torch.amp.GradScaler | None = None
        # Resumed, but not yet given to whom they belong: they only exist inside a fit.
        self._scaler_state: Mapping[str, Any] | None = None
        self._coordinator_state: Mapping[str, Any] | None = None
        self._modes: Any = None
        self._may_differ: frozenset[str] = frozenset()
        self._resumed_at: int | None = None
        self._saved_at: int | None = None
        self._has_begun = False
        self._is_fresh = False
        self._is_swapped = False
        self._is_fitting = False
        # Micro-batches of a step that is not whole; their gradients lie in the parameters.
        self._partial: Accumulated | None = None
        self._feed = Feed(self.dataloader)
        self._settings = Settings(
            self.optimizer,
            self.scheduler,
            self.dataloader,
            grad_clip=self.grad_clip,
            accumulation_steps=self.accumulation_steps,
        )
        self._census = self._first_census()
        self._learning = learning(self.model)

    def _first_census(self) -> Census:
        ema = self.ema if isinstance(self.ema, torch.nn.Module) else None
        data = self.dataloader, getattr(self.dataloader, "dataset", None)
        others = *data, self.ema, self.optimizer, self.scheduler, *self._callbacks.stateful.values()
        roots = {"model": self.model, "ema": ema, "loss_fn": self._loss_state()}
        return Census(roots, device=self.device, but=others)

    def _loss_state(self) -> Any:
        """Whatever a loss function that is an object, or one's method, remembers."""
        loss = getattr(self.loss_fn, "__self__", self.loss_fn)
        if loss is None or isinstance(loss, (types.FunctionType, types.ModuleType)):
            return None
        return None if loss is self.model else types.SimpleNamespace(fn=loss)

    # Giving a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint of this moment, as it would be saved. Tensors are shared, not copied.

        Raises CheckpointError, naming the path (`callbacks.lr_finder.fn: is a function`), for what
        a checkpoint cannot hold, and within `averaged_weights`.
        """
        if self._is_swapped:
            words = "model: has the averaged weights now; from those training could not go on"
            raise CheckpointError(words)
        return build_checkpoint(
            model=plain_state(self.model),
            optimizer=self.optimizer.state_dict(),
            scaler=self._scaler_section(),
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            config=self.config,
            coordinator=self._coordinator_section(),
            precision=self.precision,
            extra=self._extra_sections(),
        )

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the body the model has the weights of `ema`, say to be evaluated.

        No checkpoint can be made meanwhile. Raises ValueError where there is no `ema`.
        """
        if self.ema is None:
            raise ValueError("there are no averaged weights: Trainer was given no ema")
        with swapped(self.model, self.ema):
            self._is_swapped = True
            try:
                yield
            finally:
                self._is_swapped = False

    def _extra_sections(self) -> dict[str, Any]:
        sections: dict[str, Any] = {
            "data": self._own_feed().state_dict(),
            "modes": modes_of(self.model, self._learning),
            "environment": environment(self.device),
            "settings": self._settings.section(),
            "attributes": self._census.section(),
        }
        if self._callbacks.stateful:
            sections["callbacks"] = self._callbacks.state_dict()
        if self.ema is not None:
            is_module = isinstance(self.ema, torch.nn.Module)
            sections["ema"] = plain_state(self.ema) if is_module else self.ema.state_dict()
        if self._site is not None:
            sections |= more_sections(self.model, self.dataloader, sections["data"])
        if has_shards(self.model):
            sections["sharded"] = {"parameters": parameter_names(self.model, self.optimizer)}
        else:  # torch keeps an optimizer's state by position alone
            sections["optimizer_names"] = names_by_group(self.model, self.optimizer)
        if self._partial is not None:
            parts = self._partial, self.model, self.optimizer, self.accumulation_steps
            sections["accumulation"] = partial_section(*parts)
        return sections

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

    # Taking one

    def resume(self, state: Mapping[str, Any], *, allow_partial: Collection[str] = ()) -> None:
        """Goes on from a checkpoint (`CheckpointManager.load_latest` gives one).

        Model, optimizer, scheduler, averaged weights, callbacks, counters and random numbers are
        restored at once; the states of scaler and coordinator when `fit` has made the one and
        started the other. `fit` also goes to the place in the data, and restores the random numbers
        once more after that; where the place cannot be found exactly, a ResumeWarning says
        "approximate", and why.

        Checked first, changed after: on any error nothing is changed. Says in one ResumeWarning
        what is different here; of the settings of optimizer and scheduler those of the checkpoint
        count. Raises CheckpointError for what is not a training checkpoint, and for what this run
        could not go on with: it is a ValueError too where a part does not fit, and torch's own
        error is its cause. Raises RuntimeError within a fit of this trainer.
        `allow_partial` names parts that may stay as they are here instead of that: "model" (then
        what fits is loaded), "optimizer", "scheduler", "scaler", "ema", "callbacks", "rng", "data",
        "accumulation", "coordinator", "attributes".
        """
        self._refuse_within_fit("resume")
        allowed = resuming.checked_partial(allow_partial)
        if self._site is None:
            self._resume_or_not(state, allowed)
        else:
            self._site.every(lambda: self._resume_or_not(state, allowed))

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """From the first change that a fit makes until all of it is given back."""
        self._is_fitting = True
        try:
            yield
        finally:
            self._is_fitting = False

    def _refuse_within_fit(self, name: str) -> None:
        if self._is_fitting:
            raise RuntimeError(
                f"{name} was called within a fit of this trainer, by a callback, its model or "
                "another thread: call it before or after, or in on_fit_end"
            )

    def _resume_or_not(self, state: Mapping[str, Any], allowed: frozenset[str]) -> None:
        check_checkpoint(state)
        before = capture_rng_state()
        undo: list[Callable[[], None]] = []
        try:
            state, unkept = taken(state, self._parts(), self._site, self.dataloader)
            for module, saved in ((self.model, state["model"]), (self.ema, state.get("ema"))):
                undo.append(give_shapes(module, saved))
            told = self._resume(state, allowed, unkept)
        except BaseException:
            for take_back in undo:
                take_back()
            restore_rng_state(before)
            raise
        if told:
            title = f"not all of the checkpoint of step {state['step']} was restored"
            self._warn(title, told, stacklevel=4)

    def _resume(
        self, state: Mapping[str, Any], allowed: frozenset[str], unkept: list[str]
    ) -> list[str]:
        rng = state.get("rng")
        failed = restore_rng_state(rng)
        partial, told = self._checked_partial(state, "accumulation" in allowed)
        told += self._grave(failed, rng, "rng" in allowed)
        if "optimizer" not in allowed:
            check_order(state.get("optimizer_names"), self.model, self.optimizer)
        parts = self._parts()
        unlike = unkept + differences(
            state,
            parts,
            precision=self.precision,
            config=self.config,
            device=self.device,
            has_coordinator=self.coordinator is not None,
        )
        unlike += self._settings.differences(state.get("settings"), allowed)
        unlike += self._census.doubts(state.get("attributes"), rewinds=self._has_begun)
        place = state.get("data")
        unlike += [f"data: approximate: {doubt}" for doubt in self._own_feed().doubts(place)]
        grave = grave_failures(failed, rng, self.device)
        mild = {part: why for part, why in failed.items() if part not in grave}
        unlike += [f"rng.{part}: {why}".replace("rng.rng", "rng") for part, why in mild.items()]
        if unlike:
            step = state["step"]
            self._warn(f"the checkpoint of step {step} and this run differ", unlike, stacklevel=5)
        told += resuming.apply(state, parts, allowed)
        kept = {line.partition(":")[0] for line in told} & allowed
        self._settings.resumed(state.get("settings"), self.optimizer, kept)
        self._restore_counters(state)
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.resumed_from(state)
        self._partial = partial and load_partial(partial, self.model, self.optimizer)
        self._own_feed().load_state_dict(place)
        self._may_differ = allowed
        restore_rng_state(rng)  # loading runs hooks and callbacks, which may draw
        return told

    def _parts(self) -> Parts:
        stateful = self._callbacks.stateful
        load = functools.partial(self._census.load, rewinds=self._has_begun)
        return Parts(self.model, self.optimizer, self.scheduler, self.ema, stateful, load)

    def _grave(self, failed: Mapping[str, str], rng: Any, may_differ: bool) -> list[str]:
        grave = grave_failures(failed, rng, self.device)
        words = [f"rng.{part}: {why}" for part, why in grave.items()]
        if words and not may_differ:
            raise CheckpointError(
                f"random numbers could not go on where they were: {'; '.join(words)} "
                '(allow_partial=("rng",) goes on with others)'
            )
        return words

    def _checked_partial(self, state: Mapping[str, Any], may_differ: bool) -> tuple[Any, list[str]]:
        section = state.get("accumulation")
        if section is None:
            return None, []
        parts = self.model, self.optimizer, self.accumulation_steps
        problems = partial_problems(section, *parts)
        if problems and not may_differ:
            words = '(allow_partial=("accumulation",) leaves these micro-batches out)'
            raise CheckpointError(f"{problems[0]} {words}")
        return (None if problems else section), problems

    def _restore_counters(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.samples = state.get("samples", 0)
        self.tokens = state.get("tokens", 0)
        self._scaler = None
        self._scaler_state = state.get("scaler") or None
        self._coordinator_state = state.get("coordinator")
        self._modes = state.get("modes")
        set_modes(self.model, self._modes)
        self._resumed_at = self.step
        self._saved_at = None
        self._has_begun = True
        self._is_fresh = True

    @staticmethod
    def _warn(title: str, lines: list[str], stacklevel: int = 3) -> None:
        warnings.warn("\n  - ".join([f"{title}:", *lines]), ResumeWarning, stacklevel=stacklevel)

    # What is left to do when a fit begins

    def _resume_as_asked(self, resume: str, allow_partial: Collection[str]) -> None:
        manager = self.checkpoint_manager
        if checked_way(resume, manager) == "never" or self._has_begun or manager is None:
            return
        state = newest_state(manager, resume)
        if state is None:
            self._tell(f"fresh start: there is no checkpoint in {manager.directory}")
            return
        path = state.path if isinstance(state, ShardedState) else manager.path_for(state["step"])
        self._tell(f"resuming from {path}")
        self.resume(state, allow_partial=allow_partial)

    def _tell(self, line: str) -> None:
        """Once for all ranks."""
        if self._site is None or self._site.leads:
            tell(self.logger, line)

    def _load_scaler(self, scaler: torch.amp.GradScaler) -> None:
        if self._scaler_state is None:
            return
        before = scaler.state_dict()
        try:
            scaler.load_state_dict(dict(self._scaler_state))
        except Exception as error:  # whatever a malformed state makes torch raise
            scaler.load_state_dict(before)
            if "scaler" not in self._may_differ:
                raise CheckpointError(f"scaler: could not be restored: {error}") from error
            self._warn("not all of the checkpoint was restored", [f"scaler: {error}"])
        self._scaler_state = None

    def _load_coordinator(self, coordinator: SyncCoordinator) -> None:
        if self._coordinator_state is None:
            return
        try:
            coordinator.load_state_dict(self._coordinator_state)
        except Exception as error:  # the coordinator is the user's
            if "coordinator" not in self._may_differ:
                raise
            self._warn("not all of the checkpoint was restored", [f"coordinator: {error}"])
        self._coordinator_state = None

    def _own_feed(self) -> Feed:
        """The feed of the loader; a new one where somebody has put another loader in its place."""
        if self._feed.loader is not self.dataloader:
            old, self._feed = self._feed, Feed(self.dataloader)
            if old.is_waiting:
                self._feed.load_state_dict(old.state_dict())
        return self._feed

    @contextmanager
    def _exact_random_numbers(self) -> Iterator[None]:
        """What the body draws, a run that was never interrupted has not drawn at this point.

        So after a resume the random numbers are restored once more, as the last act before the
        first batch. Those are kept that the caller has seeded since.
        """
        if not self._is_fresh and not self._own_feed().is_waiting:
            yield
            return
        before = capture_rng_state()
        yield
        restore_rng_state(before)
        self._is_fresh = False

    def _go_to_place(self) -> None:
        try:
            doubts = self._own_feed().start()
        except CheckpointError as error:
            if "data" not in self._may_differ:
                raise
            doubts = [f"{error}; a new pass begins"]
        if doubts:
            title = "approximate: the data do not go on exactly where they were"
            self._warn(title, doubts, stacklevel=4)
