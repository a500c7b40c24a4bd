"""Kills the nodes of a run again and again, and asks afterwards what was lost or applied twice.

`python -m benchmarks.diloco_kills --kills 50`: a master and three workers, each in a process of its
own, over a directory (or `--store s3`); SIGKILL at random moments, each time the same command is
started anew. At the end the outer state is worked out anew from the ledger, apart from the
coordinator, in a process of its own (`benchmarks.diloco_replay`); with `--lockstep` it is compared,
too, with that of a run which nobody disturbed. Exit status 0 if nothing differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.diloco_nodes import (
    ROOT,
    Forks,
    Node,
    RunError,
    Starter,
    all_done,
    ends_on_sigterm,
    is_done,
    wait_for_all,
)
from benchmarks.diloco_places import Place, fetch_all, outer_step_at, s3_place
from trainer_core.diloco.store import Store

NODES = ("m", "w1", "w2", "w3")
"""The first is the master, and trains like the others."""


class Plan(NamedTuple):
    """A run: local steps are `rounds * inner_steps` on each node, a checkpoint every `every`."""

    rounds: int = 20
    inner_steps: int = 10
    batch: int = 4
    every: int = 3
    seed: int = 0
    lockstep: bool = False
    seconds: float = 300.0


def nodes_of(starter: Starter, folder: Path, place: Place, text: Path, plan: Plan) -> list[Node]:
    """The nodes of a run, not started yet; their checkpoints, logs and diaries go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Node(starter, name, _arguments(name, folder, place, text, plan), folder / f"{name}.log")
        for name in NODES
    ]


def _arguments(name: str, folder: Path, place: Place, text: Path, plan: Plan) -> list[str]:
    role = "master" if name == NODES[0] else "worker"
    known = {"node-id": name, "role": role, "nodes": ",".join(NODES), "url": place.url}
    known |= {"dir": folder / name, "diary": folder / f"{name}.diary", "text": text}
    known |= {"rounds": plan.rounds, "inner-steps": plan.inner_steps, "batch": plan.batch}
    known |= {"every": plan.every, "seed": plan.seed}
    words = [word for key, value in known.items() for word in (f"--{key}", str(value))]
    if place.options is not None:
        words += ["--store-options", str(place.options)]
    settings = {"keep_commits": "null", "poll_seconds": "0.05"}
    if plan.lockstep:
        words.append("--lockstep")
        settings["sync_seconds"] = str(plan.seconds)  # it goes on only together
    else:
        settings |= {"quorum": "3", "quorum_seconds": "1"}
    return [*words, *(word for pair in settings.items() for word in ("--set", "=".join(pair)))]


class Killed(NamedTuple):
    """What the killing came to: how often each node was killed."""

    kills: Counter[str]
    seconds: float


def run_with_kills(nodes: Sequence[Node], plan: Plan, kills: int, place: Place) -> Killed:
    """Runs all nodes to their end, killing one after the other on the way.

    The kills are spread over the run, by outer steps or, where the store is slow and nodes are
    ahead of these, by local ones, so that they don't all hit the beginning; each comes after a
    random wait, so that it hits anything. Raises RunError.
    """
    draw, killed, store = random.Random(plan.seed), Counter[str](), place.open()
    begun = time.monotonic()
    for node in nodes:
        node.start()
    for number in range(kills):
        due = number * max(1, plan.rounds - 2) // kills
        _wait_for(store, due, nodes, plan, begun + plan.seconds)
        time.sleep(draw.uniform(0.0, 0.4))
        victim = draw.choice([node for node in nodes if not is_done(node)] or [None])
        if victim is None:
            raise RunError(f"the run was over after {killed.total()} of {kills} kills")
        if victim.kill():
            killed[victim.name] += 1
            victim.start()
    store.close()
    wait_for_all(nodes, begun + plan.seconds - time.monotonic())
    _drain(nodes[0], plan)
    return Killed(killed, time.monotonic() - begun)


def _drain(master: Node, plan: Plan) -> None:
    """One more round of the master alone, which takes in what came after it had ended.

    In lockstep there can't be anything, and nobody is there to wait for.
    """
    if plan.lockstep:
        return
    arguments = [*master.arguments, "--set", "quorum=1", "--rounds", str(plan.rounds + 1)]
    last = Node(master.starter, master.name, arguments, master.log)
    last.start()
    wait_for_all([last], plan.seconds)


def _wait_for(store: Store, due: int, nodes: Sequence[Node], plan: Plan, deadline: float) -> None:
    while due and outer_step_at(store) < due and not all_done(nodes):
        if not plan.lockstep and max(map(_saved_step, nodes)) >= due * plan.inner_steps:
            return
        if time.monotonic() > deadline:
            words = "\n".join(f"{node.name}:\n{node.end_of_log()}" for node in nodes)
            raise RunError(f"outer step {due} was not reached in time\n{words}")
        time.sleep(0.01)


def _saved_step(node: Node) -> int:
    """The local step of its newest checkpoint; 0 before the first."""
    folder = Path(node.arguments[node.arguments.index("--dir") + 1])
    try:
        return int(json.loads((folder / "latest.json").read_text())["step"])
    except OSError:
        return 0


def replay(place: Place, nodes: Sequence[Node], folder: Path) -> dict[str, Any]:
    """What `benchmarks.diloco_replay` says of a store, in a process of its own.

    `folder`: where the store is copied to for it.
    """
    store = place.open()
    fetch_all(store, folder)
    store.close()
    diaries = [word for node in nodes for word in ("--diary", str(node.log.with_suffix(".diary")))]
    command = [sys.executable, "-m", "benchmarks.diloco_replay", str(folder), *diaries]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if not done.stdout:
        raise RunError(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def is_fine(report: dict[str, Any]) -> bool:
    """Whether the outer state is that of the ledger, and nothing was lost or applied twice."""
    return not (report["problems"] or report["lost"] or report["twice"])


def write_text(folder: Path) -> Path:
    """One text for all nodes and runs, whatever becomes of this project's files meanwhile."""
    paths = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("ckpttool/**/*.py"))]
    target = folder / "text.txt"
    target.write_text("\n".join(path.read_text(encoding="utf-8") for path in paths), "utf-8")
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco_kills")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="the most that it may take")
    parser.add_argument("--lockstep", action="store_true")
    parser.add_argument("--store", choices=("directory", "s3"), default="directory")
    parser.add_argument("--folder", type=Path, help="where all stays to be looked at")
    options = parser.parse_args(arguments)
    plan = Plan(
        rounds=options.rounds,
        seed=options.seed,
        lockstep=options.lockstep,
        seconds=options.seconds,
    )
    with ExitStack() as stack:
        stack.enter_context(ends_on_sigterm())
        if options.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = options.folder
            folder.mkdir(parents=True)
        place = Place(str(folder / "hub"))
        if options.store == "s3":
            place = stack.enter_context(s3_place(folder))
        forks = stack.enter_context(Forks())
        return _report(forks, folder, place, plan, options.kills)


def _report(forks: Forks, folder: Path, place: Place, plan: Plan, kills: int) -> int:
    text = write_text(folder)
    nodes = nodes_of(forks, folder / "nodes", place, text, plan)
    killed = run_with_kills(nodes, plan, kills, place)
    report = replay(place, nodes, folder / "copy")
    each = ", ".join(f"{name} {count}" for name, count in sorted(killed.kills.items()))
    print(f"{killed.kills.total()} kills ({each}) in {killed.seconds:.1f} s")
    print(json.dumps(report, indent=1))
    fine = is_fine(report)
    if plan.lockstep:
        calm = undisturbed(forks, folder, text, plan)["weights_sha256"] == report["weights_sha256"]
        print(f"the weights of a run without kills: {'the same bits' if calm else 'DIFFERENT'}")
        fine &= calm
    return 0 if fine else 1


def undisturbed(starter: Starter, folder: Path, text: Path, plan: Plan) -> dict[str, Any]:
    """What the replay says of the same run over a directory, without kills."""
    place = Place(str(folder / "calm-hub"))
    nodes = nodes_of(starter, folder / "calm", place, text, plan)
    run_with_kills(nodes, plan, 0, place)
    return replay(place, nodes, folder / "calm-copy")


if __name__ == "__main__":
    sys.exit(main())
