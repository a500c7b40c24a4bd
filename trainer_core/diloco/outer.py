"""The outer optimizer: average the pseudo-gradients in FP32, then one step of Nesterov SGD.

DiLoCo, Douillard et al. 2023, arXiv 2311.08105. The arithmetic is that of
`torch.optim.SGD(lr, momentum, nesterov=True)`, operation by operation, so that its results are the
same to the last bit: `buf = mu * buf + g` (at the first step `buf = g`), `g + mu * buf`,
`state - lr * that`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from trainer_core.diloco.fingerprint import State, is_float


class Outer(NamedTuple):
    """The whole outer state after `outer_step` outer steps; its tensors are never changed in place.

    `state`: every tensor of the model, floating ones in FP32, on the CPU. `momentum`: the floating
    ones; empty before the first step.
    """

    outer_step: int
    state: State
    momentum: State


class Average:
    """The weighted mean of deltas, added one by one: the caller decides the order.

    A node's several deltas of one round are its progress in pieces: they are added up, and the node
    counts once. So `add` takes each delta with its node's weight, and `mean` divides by the sum of
    the nodes' weights.
    """

    def __init__(self) -> None:
        self._sum: State = {}

    def add(self, delta: State, weight: float) -> None:
        """Adds `weight * delta` to the sum."""
        if not self._sum:
            self._sum = {name: torch.zeros_like(tensor) for name, tensor in delta.items()}
        for name, tensor in delta.items():
            self._sum[name].add_(tensor, alpha=weight)

    def mean(self, weights: Iterable[float]) -> State:
        """The mean, given the weight of each node. Ends this sum: it is divided in place."""
        total = sum(weights)
        for tensor in self._sum.values():
            tensor.div_(total)
        mean, self._sum = self._sum, {}
        return mean


def nesterov(outer: Outer, gradient: State, *, lr: float, momentum: float) -> Outer:
    """The next outer state. Tensors without a gradient (integers, booleans) stay as they are."""
    state, buffers = dict(outer.state), {}
    for name, grad in gradient.items():
        if momentum:
            old = outer.momentum.get(name)
            buffer = grad.clone() if old is None else old.mul(momentum).add_(grad, alpha=1)
            buffers[name] = buffer
            grad = grad.add(buffer, alpha=momentum)
        state[name] = outer.state[name].add(grad, alpha=-lr)
    return Outer(outer.outer_step + 1, state, buffers)


def first_outer(state: State, outer_step: int = 0) -> Outer:
    """The outer state that begins with these weights: floating tensors are cast to FP32."""
    cast = {name: tensor.float() if is_float(tensor) else tensor for name, tensor in state.items()}
    return Outer(outer_step, cast, {})
