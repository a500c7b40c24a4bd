"""A real run in separate processes: a master and three workers, beside one node alone.

`python -m benchmarks.diloco_run` trains the small language model of `trainer_core.diloco.demo` for
20 outer rounds on four nodes, over a directory and over an S3 server (moto's, in a process of its
own), and on one node with the same number of samples and with the same number of steps. Seeds are
fixed and the nodes go in lockstep, so the result is the same each time, and over either store. It
prints a table of held-out losses for README and writes the plot to `docs/diloco_loss.svg`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.diloco_kills import NODES, Plan, nodes_of, write_text
from benchmarks.diloco_nodes import (
    ROOT,
    Commands,
    Node,
    Starter,
    ends_on_sigterm,
    wait_for_all,
)
from benchmarks.diloco_places import Place, s3_place
from benchmarks.line_plot import Line, plot
from trainer_core.diloco.demo.held_out import held_out_loss, new_model, split_text

PLOT = ROOT / "docs" / "diloco_loss.svg"
PLAN = Plan(rounds=20, inner_steps=25, batch=8, every=25, lockstep=True, seconds=1200.0)


class Curve(NamedTuple):
    """Held-out losses after each round's samples, beginning with the untrained model.

    `samples` and `steps` are those of the whole run, the steps of one node. `seconds`: wall time.
    """

    name: str
    losses: list[float]
    steps: int
    samples: int
    seconds: float


def together(
    starter: Starter, folder: Path, name: str, place: Place, text: Path, plan: Plan
) -> Curve:
    """The run of the four nodes over one store."""
    nodes = nodes_of(starter, folder, place, text, plan)
    begun = time.monotonic()
    _run(nodes, plan)
    seconds = time.monotonic() - begun
    losses = global_losses(place, folder, text, plan)
    steps = plan.rounds * plan.inner_steps
    return Curve(name, losses, steps, steps * plan.batch * len(nodes), seconds)


def alone(starter: Starter, folder: Path, name: str, text: Path, plan: Plan) -> Curve:
    """One node with all of the text, which goes `rounds * inner_steps` steps by itself."""
    folder.mkdir(parents=True)
    known = {"node-id": "alone", "dir": folder / "alone", "text": text, "seed": plan.seed}
    known |= {"rounds": plan.rounds, "inner-steps": plan.inner_steps, "batch": plan.batch}
    words = [word for key, value in known.items() for word in (f"--{key}", str(value))]
    begun = time.monotonic()
    _run([Node(starter, "alone", [*words, "--keep-last", "0"], folder / "alone.log")], plan)
    seconds = time.monotonic() - begun
    files = sorted((folder / "alone").glob("step_*.pt"))
    states = [torch.load(file, weights_only=True)["model"] for file in files]
    steps = plan.rounds * plan.inner_steps
    return Curve(name, _losses(states, text, plan), steps, steps * plan.batch, seconds)


def _run(nodes: list[Node], plan: Plan) -> None:
    for node in nodes:
        node.start()
    wait_for_all(nodes, plan.seconds)


def global_losses(place: Place, folder: Path, text: Path, plan: Plan) -> list[float]:
    """That of each global model, round by round, as it lies on the store."""
    from safetensors.torch import load_file

    store, states = place.open(), []
    for entry in store.entries("global/commits")[1:]:
        commit = json.loads(store.read(f"global/commits/{entry.name}"))
        local = folder / "model.safetensors"
        store.fetch(commit["model"]["name"], local)
        states.append(load_file(local))
    store.close()
    assert len(states) == plan.rounds, f"{len(states)} outer steps instead of {plan.rounds}"
    return _losses(states, text, plan)


def _losses(states: list[Mapping[str, Any]], text: Path, plan: Plan) -> list[float]:
    model, held_out = new_model(plan.seed), split_text(text).held_out
    begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return [held_out_loss(model, state, held_out) for state in (begin, *states)]


def curves(folder: Path, plan: Plan) -> list[Curve]:
    """All four runs, one after the other; the two of one node side by side would disturb times."""
    text = write_text(folder)
    longer = plan._replace(inner_steps=plan.inner_steps * len(NODES))
    with Commands() as starter, s3_place(folder) as s3:
        hub = Place(str(folder / "hub"))
        return [
            together(starter, folder / "a", "4 nodes, a directory", hub, text, plan),
            together(starter, folder / "b", "4 nodes, S3", s3, text, plan),
            alone(starter, folder / "c", "1 node, as many samples", text, longer),
            alone(starter, folder / "d", "1 node, as many steps", text, plan),
        ]


def table(found: list[Curve]) -> str:
    """As README shows it."""
    rounds = [one for one in (1, 5, 10, 15, 20) if one < len(found[0].losses)]
    heads = "".join(f" round {one} |" for one in rounds)
    lines = [f"| run | steps of a node | samples |{heads} wall time |"]
    lines.append("|---|---|---|" + "---|" * len(rounds) + "---|")
    for one in found:
        losses = "".join(f" {one.losses[number]:.3f} |" for number in rounds)
        lines.append(
            f"| {one.name} | {one.steps:,} | {one.samples:,} |{losses} {one.seconds:.0f} s |"
        )
    return "\n".join(lines)


def drawn(found: list[Curve], plan: Plan) -> str:
    """The plot: one line for the four nodes, since both stores give the same."""
    lines = [
        Line("4 nodes, in step every round", list(enumerate(found[0].losses))),
        Line("1 node, as many samples", list(enumerate(found[2].losses))),
        Line("1 node, as many steps", list(enumerate(found[3].losses))),
    ]
    x_label = f"outer round ({plan.inner_steps} steps of {plan.batch} samples on each node)"
    return plot("Held-out loss of a small language model", x_label, "nats a character", lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco_run")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the SVG goes")
    parser.add_argument("--rounds", type=int, default=PLAN.rounds)
    options = parser.parse_args(arguments)
    plan = PLAN._replace(rounds=options.rounds)
    torch.set_num_threads(1)
    with ends_on_sigterm(), tempfile.TemporaryDirectory() as folder:
        found = curves(Path(folder), plan)
    options.plot.parent.mkdir(exist_ok=True)
    options.plot.write_text(drawn(found, plan), encoding="utf-8")
    print(table(found))
    same = found[0].losses == found[1].losses
    print(f"\nover both stores: {'the same losses' if same else 'DIFFERENT losses'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
