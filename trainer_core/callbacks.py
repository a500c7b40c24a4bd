"""What a caller may hook into a run: the callbacks of `Trainer.fit`."""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_core.trainer import Trainer, TrainResult

_NAMES = ("on_fit_start", "on_step_end", "on_save", "on_fit_end")


class Callback:
    """Does nothing at each of four moments; override those that you need.

    Any object with some of these methods will do, and a plain function is taken as `on_step_end`.
    What a callback raises ends the fit.

    One that has `state_dict()` and `load_state_dict(state)` as well is part of each checkpoint,
    under its attribute `name`, or that of its class; of several with one name the second is
    `name#2`, and so on. The state is plain values, lists, dictionaries and tensors; numpy's arrays
    come back as tensors. It is restored by `Trainer.resume`, before any of the methods is called.

    Of one without them attributes are kept that steps have changed (a count, the best loss, see
    `trainer_core.census.kept_values`), and set back both in `Trainer.resume` and after
    `on_fit_start`. What that sets, and nothing changes later, is the program's: when it began, say.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step, the coordinator started. Not called if no step is left to do."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        """After each optimizer step that counted, before its checkpoint.

        `metrics` has `step`, `loss`, `lr`, `samples` and `tokens`. The loss is a tensor on the
        device: `float(metrics["loss"])` waits for it, so don't do that at every step.
        """

    def on_save(self, trainer: Trainer, step: int, path: Path) -> None:
        """After a checkpoint is safe on disk."""

    def on_fit_end(self, trainer: Trainer, result: TrainResult) -> None:
        """After the last step, if nothing failed."""


def has_state(part: Any) -> bool:
    """Whether it has the two methods `state_dict` and `load_state_dict`."""
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )


def _kind_of(callback: Any) -> str:
    """The name of its class; of a function its own, of a method that of what it belongs to."""
    if isinstance(callback, types.MethodType):
        return _kind_of(callback.__self__)
    return (
        callback.__name__ if isinstance(callback, types.FunctionType) else type(callback).__name__
    )


class Callbacks:
    """Those of one trainer, in order, with only the methods that each has.

    `stateful` are those that say themselves what a checkpoint holds of them, by the name that they
    have there; `others` the rest, of which attributes are kept (see `trainer_core.census`).
    Raises TypeError for one that is neither callable nor has any of the methods.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._hooks: dict[str, list[Any]] = {name: [] for name in _NAMES}
        self.stateful: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        for callback in callbacks:
            self._add(callback)
            self._note_name(callback, self.stateful if has_state(callback) else self.others)

    def _add(self, callback: Any) -> None:
        found = [name for name in _NAMES if callable(getattr(callback, name, None))]
        for name in found:
            # A method that only passes on to the base class would cost a call at each step.
            if getattr(type(callback), name, None) is not getattr(Callback, name):
                self._hooks[name].append(getattr(callback, name))
        if not found and callable(callback):
            self._hooks["on_step_end"].append(callback)
        elif not found:
            raise TypeError(
                f"a callback is a function or has one of {', '.join(_NAMES)}: {callback!r}"
            )

    def _note_name(self, callback: Any, named: dict[str, Any]) -> None:
        given = getattr(callback, "name", None)
        name = given if isinstance(given, str) and given else _kind_of(callback)
        same = sum(1 for other in named if other.partition("#")[0] == name)
        named[f"{name}#{same + 1}" if same else name] = callback

    def state_dict(self) -> dict[str, Any]:
        """The states of all that have one, by name."""
        return {name: callback.state_dict() for name, callback in self.stateful.items()}

    def wants(self, name: str) -> bool:
        """Whether any callback has this method."""
        return bool(self._hooks[name])

    def call(self, name: str, *arguments: Any) -> None:
        """Calls this method of each callback that has it."""
        for hook in self._hooks[name]:
            hook(*arguments)
