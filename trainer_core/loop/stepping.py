"""The arithmetic of one optimizer step: forward, backward, accumulation, scaling, clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from trainer_core.loop.batches import call_model, count, loss_of, to_device
from trainer_core.precision import PrecisionPlan
from trainer_core.site.gradients import GradientSync

_END = object()

LossFunction = Callable[[torch.nn.Module, Any], Any]


class Accumulated(NamedTuple):
    """What `micro_batches` came to: the sum of their losses, their samples and tokens."""

    micro_batches: int
    loss: torch.Tensor
    samples: int
    tokens: int


class Stepper:
    """Takes the steps of one fit.

    `scaler`: the GradScaler, where the precision plan has one. `partial`: the micro-batches of a
    step that is not whole yet, whose gradients lie in the parameters; None between two steps.
    `sync`: see `gradient_sync`. `ends`: whether the batches have ended on any rank, from whether
    they have on this one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        precision: PrecisionPlan,
        scaler: torch.amp.GradScaler | None,
        loss_fn: LossFunction | None,
        accumulation_steps: int,
        grad_clip: float | None,
        partial: Accumulated | None,
        sync: GradientSync | None = None,
        ends: Callable[[bool], bool] = bool,
    ) -> None:
        self.partial = partial
        self._sync = sync if accumulation_steps > 1 else None
        self._ends = ends
        self._model, self._optimizer, self._device = model, optimizer, device
        self._scaler, self._loss_fn = scaler, loss_fn
        self._accumulation_steps, self._grad_clip = accumulation_steps, grad_clip
        self._autocast = _autocast(precision, device)
        self._clipped = _parameters_to_clip(model, optimizer)
        if partial is None:
            optimizer.zero_grad(set_to_none=True)

    def accumulate(self, batches: Iterator[Any], should_stop: Callable[[], bool]) -> bool:
        """Gradients of one optimizer step, in `partial`; False if they did not become whole.

        That is so if the batches ended, and then nothing is left of them, or because `should_stop`
        said so after a micro-batch: then `partial` says how many there were.
        """
        done = self.partial.micro_batches if self.partial is not None else 0
        for number in range(done, self._accumulation_steps):
            if self.partial is not None and should_stop():
                return False
            try:
                batch = next(batches, _END)
            except RuntimeError:
                if should_stop():
                    return False  # the signal that stops us has killed the loader's workers, too
                raise
            if self._ends(batch is _END):
                self._optimizer.zero_grad(set_to_none=True)
                self.partial = None
                return False
            samples, tokens = count(batch)
            is_last = number == self._accumulation_steps - 1
            with nullcontext() if self._sync is None else self._sync(is_last):
                loss = self._backward(to_device(batch, self._device))
            self._add(loss, samples, tokens)
        return True

    def _add(self, loss: torch.Tensor, samples: int, tokens: int) -> None:
        before = self.partial
        if before is None:
            # A copy: the model may reuse the memory (CUDA graphs), or it is part of a big tensor.
            self.partial = Accumulated(1, loss.clone(), samples, tokens)
        else:
            more = before.samples + samples, before.tokens + tokens
            self.partial = Accumulated(before.micro_batches + 1, before.loss + loss, *more)

    def finish(self) -> Accumulated | None:
        """Steps the optimizer, and gives what went into it; `loss` is now their mean.

        None if the scaler skipped the step because a gradient was not finite.
        """
        done = self.partial
        assert done is not None
        if self._scaler is None:
            self._clip()
            self._optimizer.step()
        elif not self._scaled_update(self._scaler):
            done = None
        self._optimizer.zero_grad(set_to_none=True)
        self.partial = None
        if done is None or self._accumulation_steps == 1:
            return done
        return done._replace(loss=done.loss / self._accumulation_steps)

    def _backward(self, batch: Any) -> torch.Tensor:
        with self._autocast:
            if self._loss_fn is not None:
                loss = loss_of(self._loss_fn(self._model, batch))
            else:
                loss = loss_of(call_model(self._model, batch))
        part = loss / self._accumulation_steps if self._accumulation_steps > 1 else loss
        (part if self._scaler is None else self._scaler.scale(part)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> bool:
        if self._grad_clip is not None:
            scaler.unscale_(self._optimizer)
            self._clip()
        before = scaler.get_scale()
        scaler.step(self._optimizer)
        scaler.update()
        # The scale falls if and only if the step was skipped; at 0 it can fall no further.
        after: float = scaler.get_scale()
        return after >= before and after > 0

    def _clip(self) -> None:
        if self._grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self._clipped, self._grad_clip)


def _autocast(precision: PrecisionPlan, device: torch.device) -> AbstractContextManager[Any]:
    if not precision.autocast_enabled:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)


def _parameters_to_clip(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[torch.nn.Parameter]:
    """The optimizer's, in the model's order: the last bit of a norm depends on the order."""
    mine = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    ordered = [mine.pop(id(p)) for p in model.parameters() if id(p) in mine]
    return [*ordered, *mine.values()]


# A step that is not whole, as part of a checkpoint


def partial_section(
    partial: Accumulated,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation_steps: int,
) -> dict[str, Any]:
    """The micro-batches of a step that is not whole, with the gradients that they have left."""
    gradients = {
        name: parameter.grad
        for name, parameter in named_parameters(model, optimizer).items()
        if parameter.grad is not None
    }
    return {**partial._asdict(), "of": accumulation_steps, "gradients": gradients}


def load_partial(
    section: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Accumulated:
    """Puts copies of the saved gradients where they were; `check_partial` says whether it can."""
    parameters = named_parameters(model, optimizer)
    for name, parameter in parameters.items():
        saved = section["gradients"].get(name)
        parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)
    device = next(iter(parameters.values())).device
    counts = (section[key] for key in ("samples", "tokens"))
    return Accumulated(section["micro_batches"], section["loss"].to(device, copy=True), *counts)


def partial_problems(
    section: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    accumulation_steps: int,
) -> list[str]:
    """What keeps `load_partial` from working, in words that begin with the key; often nothing."""
    if not isinstance(section, Mapping) or not isinstance(section.get("gradients"), Mapping):
        return ["accumulation: is not the state of a step that is not whole"]
    counts = [section.get(key) for key in ("micro_batches", "samples", "tokens")]
    if not all(type(number) is int and number >= 0 for number in counts):
        return ["accumulation: its counts are not whole numbers"]
    if not isinstance(section.get("loss"), torch.Tensor) or section["loss"].ndim:
        return ["accumulation.loss: is not one number"]
    if section.get("of") != accumulation_steps:
        words = f"{section['micro_batches']} of a step's {section.get('of')!r:.20} micro-batches"
        return [f"accumulation: {words} were done, while a step has {accumulation_steps} here"]
    own = named_parameters(model, optimizer)
    return [
        f"accumulation.gradients.{name}: fits no parameter here"
        for name, gradient in section["gradients"].items()
        if not isinstance(gradient, torch.Tensor)
        or name not in own
        or gradient.shape != own[name].shape
        or gradient.dtype != own[name].dtype
    ]


def named_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.nn.Parameter]:
    """The model's, by name, and those of the optimizer that are no part of it, by their place."""
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                named[f"param_groups[{index}][{place}]"] = parameter
    return named
