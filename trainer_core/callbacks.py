"""What a caller may hook into a run: the callbacks of `Trainer.fit`."""

from __future__ import annotations

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


class Callbacks:
    """Those of one trainer, in order, with only the methods that each has.

    Raises TypeError for one that is neither callable nor has any of the methods.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._hooks: dict[str, list[Any]] = {name: [] for name in _NAMES}
        for callback in callbacks:
            self._add(callback)

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

    def wants(self, name: str) -> bool:
        """Whether any callback has this method."""
        return bool(self._hooks[name])

    def call(self, name: str, *arguments: Any) -> None:
        """Calls this method of each callback that has it."""
        for hook in self._hooks[name]:
            hook(*arguments)
