"""The outer optimizer, compared with torch's own SGD to the last bit."""

from __future__ import annotations

import pytest
import torch

from trainer_core.diloco.outer import Average, first_outer, nesterov


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.3, 0.0), (1.0, 0.5)])
def test_ten_steps_equal_those_of_torch_bit_for_bit(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = {"a": (7, 13), "b": (129,), "c": ()}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    outer = first_outer({**weights, "count": torch.tensor(3)})
    parameters = {name: torch.nn.Parameter(t.clone()) for name, t in weights.items()}
    optimizer = torch.optim.SGD(
        parameters.values(), lr=lr, momentum=momentum, nesterov=momentum > 0
    )
    for _ in range(10):
        before = {name: tensor.clone() for name, tensor in outer.state.items()}
        gradient = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        gradient["b"][:5] = -0.0  # its sign is a bit as well
        for name, parameter in parameters.items():
            parameter.grad = gradient[name].clone()
        optimizer.step()
        new = nesterov(outer, gradient, lr=lr, momentum=momentum)
        assert all(torch.equal(before[name], outer.state[name]) for name in before), "in place"
        outer = new
        for name, parameter in parameters.items():
            assert bits(outer.state[name]) == bits(parameter)
            if momentum:
                buffer = optimizer.state[parameter]["momentum_buffer"]
                assert bits(outer.momentum[name]) == bits(buffer)
    assert outer.outer_step == 10
    assert outer.state["count"] == 3


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def test_bfloat16_weights_are_kept_in_fp32() -> None:
    weight = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    outer = first_outer({"w": weight}, 5)
    assert outer.state["w"].dtype == torch.float32
    step = nesterov(outer, {"w": torch.tensor([1e-3, 0.0])}, lr=1.0, momentum=0.9)
    # The first step moves by g + 0.9 g; in bfloat16 it would vanish beside 1.
    assert step.state["w"][0] == torch.tensor(1.0) - torch.tensor(1e-3) * torch.tensor(1.9)
    assert step.outer_step == 6


def test_the_mean_weighs_nodes_and_adds_up_what_one_of_them_sent_in_pieces() -> None:
    average = Average()
    average.add({"w": torch.tensor([1.0, 2.0])}, 1.0)
    average.add({"w": torch.tensor([3.0, 4.0])}, 1.0)  # the same node, its next window
    average.add({"w": torch.tensor([10.0, 0.0])}, 3.0)
    mean = average.mean([1.0, 3.0])
    assert mean["w"].tolist() == [(4 + 30) / 4, 6 / 4]
