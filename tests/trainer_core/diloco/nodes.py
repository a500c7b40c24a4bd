"""Nodes of an outer loop in this process, and the outer loop worked out apart from it.

A node's life is a generator that yields after each step, so that a test decides who goes on when.
"""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import safetensors.torch
import torch

from tests.trainer_core.diloco.faulty import Killed
from trainer_core.diloco import DumbDiLoCoCoordinator, Store
from trainer_core.diloco.commits import CommitLog

State = dict[str, torch.Tensor]


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


def new_model() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, node_id: str, step: int
) -> None:
    seed = sum(ord(letter) * 131**place for place, letter in enumerate(node_id)) + 7 * step
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


class Node:
    """One node, over several lives. `every`: steps between its checkpoints, which are copies."""

    def __init__(
        self,
        node_id: str,
        role: str,
        open_store: Callable[[], Store],
        *,
        steps: int,
        every: int = 1,
        **options: Any,
    ) -> None:
        self.node_id, self.role, self.open_store = node_id, role, open_store
        self.steps, self.every = steps, every
        usual = {"inner_steps": 2, "synchronous": True, "keep_commits": None}
        patience = {"lease_seconds": 1000.0, "stop_seconds": 60.0, "poll_seconds": 0.0}
        self.options: dict[str, Any] = {**usual, **patience, **options}
        self.checkpoint: dict[str, Any] | None = None
        self.coordinator: DumbDiLoCoCoordinator | None = None
        self.model = new_model()

    def life(self) -> Iterator[int]:
        self.model = model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.coordinator = coordinator = DumbDiLoCoCoordinator(
            model, self.open_store(), node_id=self.node_id, role=self.role, **self.options
        )
        step, saved = 0, self.checkpoint
        if saved is not None:
            model.load_state_dict(saved["model"])
            step = saved["step"]
        coordinator.start()
        if saved is not None:
            coordinator.load_state_dict(copy.deepcopy(saved["coordinator"]))
        while step < self.steps:
            train_step(model, optimizer, self.node_id, step)
            step += 1
            coordinator.after_optimizer_step(model, step)
            if step % self.every == 0:
                self.save(step)
            yield step
        coordinator.stop()

    def save(self, step: int) -> None:
        assert self.coordinator is not None
        state = {"model": self.model.state_dict(), "coordinator": self.coordinator.state_dict()}
        self.checkpoint = copy.deepcopy({**state, "step": step})


def run(nodes: list[Node]) -> int:
    """Lets the nodes take steps in turn until all are done; who is killed begins another life.

    Gives how many were killed.
    """
    lives, deaths = {node.node_id: node.life() for node in nodes}, 0
    for node in itertools.cycle(nodes):
        if not lives:
            return deaths
        if node.node_id not in lives:
            continue
        try:
            next(lives[node.node_id])
        except StopIteration:
            del lives[node.node_id]
        except Killed:
            deaths += 1
            lives[node.node_id] = node.life()
    raise AssertionError


def last_round(master: Node) -> None:
    """The master once more, without a step: what was delivered after its end is applied."""
    run([master])


def replay(store: Store, genesis: State) -> list[tuple[str, int]]:
    """What applying each committed delta once, in ledger order, with torch's own SGD gives.

    Compares each published model and momentum with it, bit for bit; gives the deltas in order.
    """
    log, applied = CommitLog(store), []
    names = list(genesis)
    parameters = [torch.nn.Parameter(genesis[name].clone()) for name in names]
    for outer_step in log.steps():
        commit = log.read(outer_step)
        if outer_step:
            lr, momentum = commit.outer_lr, commit.outer_momentum
            if outer_step == 1:
                optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)
            total: State = {}
            weights: dict[str, float] = {}
            for one in commit.applied:
                delta = safetensors.torch.load(store.read(one.name))
                weights[one.node_id] = one.weight
                for name in names:
                    total[name] = total.get(name, torch.zeros(())) + delta[name] * one.weight
                applied.append((one.node_id, one.local_step))
            for name, parameter in zip(names, parameters, strict=True):
                parameter.grad = total[name] / sum(weights.values())
            optimizer.step()
        _compare(store, commit, names, parameters, optimizer.state if outer_step else None)
    assert len(set(applied)) == len(applied), "a delta was applied twice"
    return applied


def _compare(store: Store, commit: Any, names: Any, parameters: Any, buffers: Any) -> None:
    model = safetensors.torch.load(store.read(commit.model.name))
    for name, parameter in zip(names, parameters, strict=True):
        assert torch.equal(model[name], parameter), (commit.outer_step, name)
    if commit.momentum is not None:
        momentum = safetensors.torch.load(store.read(commit.momentum.name))
        for name, parameter in zip(names, parameters, strict=True):
            assert torch.equal(momentum[name], buffers[parameter]["momentum_buffer"])


def deltas_on(store: Store) -> set[tuple[str, int]]:
    """Every delta that lies on a store: what was acknowledged, where nothing is removed."""
    found = set()
    for node_id in store.folders("nodes"):
        for entry in store.entries(f"nodes/{node_id}"):
            number = entry.name.removeprefix("delta_").removesuffix(".safetensors")
            found.add((node_id, int(number)))
    return found
