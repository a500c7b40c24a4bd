"""What a trainer keeps of itself in a checkpoint, and how it goes on from one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer_core.callbacks import Callbacks
from trainer_core.census.attributes import Attributes
from trainer_core.census.roots import census_of, roots_of_callbacks
from trainer_core.data.feed import Feed
from trainer_core.loop.averaging import swapped
from trainer_core.loop.stepping import Accumulated, load_partial, partial_problems, partial_section
from trainer_core.resuming import resume as resuming
from trainer_core.resuming.beginning import Beginning
from trainer_core.resuming.comparing import differences
from trainer_core.resuming.facts import environment
from trainer_core.resuming.fitting import check_order, names_by_group
from trainer_core.resuming.lazy import give_shapes
from trainer_core.resuming.modes import learning, modes_of, set_modes
from trainer_core.resuming.parts import Parts
from trainer_core.resuming.settings import Settings
from trainer_core.resuming.unfit import UnfitError
from trainer_core.rng import capture_rng_state, grave_failures, restore_rng_state
from trainer_core.site.per_rank import more_sections
from trainer_core.site.ranks import has_shards
from trainer_core.site.sharded import parameter_names
from trainer_core.site.taking import taken
from trainer_core.state import CheckpointError, build_checkpoint, check_checkpoint
from trainer_core.wrappers import plain_state


class Resumable(Beginning):
    """The half of `Trainer` that gives and takes checkpoints; the other has the constructor."""

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
        self._attributes = self._first_attributes()
        self._learning = learning(self.model)

    def _first_attributes(self) -> Attributes:
        loader = self.dataloader
        census = census_of(
            self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            loss_fn=self.loss_fn,
            callbacks=self._callbacks,
            parts={
                "trainer": weakref.ref(self),
                "loader": loader,
                "dataset": getattr(loader, "dataset", None),
                "manager": self.checkpoint_manager,
                "coordinator": self.coordinator,
            },
            device=self.device,
        )
        return Attributes(census, roots_of_callbacks(self._callbacks))

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
            "attributes": self._attributes.section(self.dataloader),
        }
        anew = self._attributes.began_anew(sections["attributes"])
        if anew:
            words = "the checkpoint that was resumed is of an older version"
            self._warn(words, anew, stacklevel=4)
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
        place, has_begun = state.get("data"), self._has_begun
        more = self._attributes.doubts(state, self.dataloader, rewinds=has_begun)
        more += [f"data: approximate: {doubt}" for doubt in self._own_feed().doubts(place)]
        grave = grave_failures(failed, rng, self.device)
        mild = {part: why for part, why in failed.items() if part not in grave}
        more += [f"rng.{part}: {why}".replace("rng.rng", "rng") for part, why in mild.items()]

        def warn(told: list[str]) -> None:
            settings = self._settings.differences(state.get("settings"), _parts_in(told) & allowed)
            if unlike or settings or more:
                words = f"the checkpoint of step {state['step']} and this run differ"
                self._warn(words, [*unlike, *settings, *more], stacklevel=7)

        try:
            told += resuming.apply(state, parts, allowed, warn)
        except UnfitError as error:
            raise error.with_facts(unlike) from error.__cause__
        kept = _parts_in(told) & allowed
        self._attributes.resumed(state, is_restored="attributes" not in kept)
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
        load = functools.partial(self._attributes.load, rewinds=self._has_begun)
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


def _parts_in(told: list[str]) -> set[str]:
    """The parts that these lines are about."""
    return {line.partition(":")[0] for line in told}
