"""The program whose operations `test_power_cut_saving` cuts off, and what must hold after that.

A small training, saved after every second step of eight; then its last save again. `how` is "sync",
"async", or one of the ways of saving wrongly, which must be found out:

not-durable     CheckpointManager(durable=False)
no-file-fsync   only folders are synced
no-name-fsync   only files are synced
pointer-first   the pointer is moved before its file is there
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpttool
from ckpttool.model.pointer import read_pointer
from trainer_core import CheckpointManager, Trainer, atomic_json_dump

RUN = "the-run"
STEPS = 8
EVERY = 2
KEEP = 2
RIGHT = ("sync", "async")
WRONG = ("not-durable", "no-file-fsync", "no-name-fsync", "pointer-first")


class Telling:
    """Writes each step to a file as soon as it is told that it is safe on disk."""

    def __init__(self, acks: str) -> None:
        self.acks = acks

    def on_save(self, trainer: Trainer, step: int, path: Path) -> None:
        """A line for each save, by one write."""
        tell(self.acks, str(step))


class PointerFirst(CheckpointManager):
    """What a save must not be."""

    def save(self, step: int, state: Any) -> Path | None:
        """The pointer first."""
        self.claim()
        self.point_to(step)
        return super().save(step, state)


def tell(acks: str, word: str) -> None:
    """Notes that something is safe."""
    descriptor = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{word}\n".encode())
    os.close(descriptor)


def main(directory: str, acks: str, how: str) -> int:
    """Trains and saves; or, with "json", writes one file three times."""
    if how == "json":
        return _dump(directory, acks)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if how.endswith("-fsync"):
        _leave_out(files=how == "no-file-fsync")
    kind = PointerFirst if how == "pointer-first" else CheckpointManager
    manager = kind(
        directory,
        every_steps=EVERY,
        keep_last=KEEP,
        run_id=RUN,
        async_save=how == "async",
        durable=how != "not-durable",
    )
    with manager:
        made = trainer(manager, Telling(acks))
        made.fit(STEPS)
        manager.save(STEPS, made.state_dict())
        manager.wait()
        tell(acks, "again")
    return 0


def _dump(directory: str, acks: str) -> int:
    for version in (1, 2, 3):
        text = "x" * 6000 * version
        atomic_json_dump({"version": version, "text": text}, Path(directory) / "a.json")
        tell(acks, str(version))
    return 0


def _leave_out(*, files: bool) -> None:
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) != files:
            whole(descriptor)

    os.fsync = fsync


def trainer(manager: CheckpointManager | None, *callbacks: Any) -> Trainer:
    """The same run each time: dropout, momentum, data in order."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.2), nn.Linear(128, 1))
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4) / 48)
    return Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        torch.utils.data.DataLoader(data, batch_size=2, shuffle=True),
        device="cpu",
        loss_fn=lambda model, batch: (model(batch[0]) - 1).square().mean(),
        checkpoint_manager=manager,
        callbacks=callbacks,
    )


class Whole:
    """What the run comes to when nothing happens to it, and whether others come to the same."""

    def __init__(self) -> None:
        made = trainer(None)
        made.fit(STEPS)
        self.end = _bits(made)
        self._known: dict[str, bool] = {}

    def is_reached_from(self, path: Path) -> bool:
        """Whether going on from a checkpoint ends bit for bit alike; each content is tried once."""
        key = hashlib.sha256(path.read_bytes()).hexdigest()
        if key not in self._known:
            again = trainer(None)
            again.resume(torch.load(path, weights_only=True))
            again.fit(STEPS)
            self._known[key] = _bits(again) == self.end
        return self._known[key]


def _bits(made: Trainer) -> str:
    state = made.state_dict()
    found = hashlib.sha256(repr((state["step"], state["samples"])).encode())
    moments = [
        moment for group in state["optimizer"]["state"].values() for moment in group.values()
    ]
    for tensor in [*state["model"].values(), *moments, state["rng"]["torch"]]:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def faults(directory: Path, marks: tuple[str, ...], whole: Whole) -> list[str]:
    """What is wrong with a directory after a power cut, in words; mends it and goes on from it."""
    told = [int(word) for word in marks if word.isdigit()]
    safe = max(told, default=0)
    found: list[str] = []
    if not directory.is_dir():
        return ["nothing is left"] if safe else []
    report = ckpttool.verify(directory)
    found += [f"{file.path} is not valid" for file in report.files if not file.is_valid]
    found += _untrue_records(directory)
    steps = [int(path.stem[5:]) for path in directory.glob("*.pt")]
    if len(steps) < min(len(told), KEEP):
        found.append(f"of {told} only {steps} are left")
    newest = report.newest_valid or 0
    if newest < safe:
        found.append(f"step {safe} was safe, the newest valid one is {newest}")
    found += _selected(directory, safe)
    pointer = read_pointer(directory)
    if pointer.state != "missing" and pointer.target is None:
        found.append(f"the pointer names nothing that is there: {pointer.problem}")
    if found or not newest:
        return found
    found += _mended(directory, newest)
    newest_file = max(directory.glob("step_*.pt"))
    if not whole.is_reached_from(newest_file):
        found.append(f"going on from {newest_file.name} ends otherwise")
    return found


def _selected(directory: Path, safe: int) -> list[str]:
    try:
        state = CheckpointManager(directory).load_latest()
    except Exception as error:
        return [f"the newest cannot be loaded: {error}"]
    step = 0 if state is None else state["step"]
    return [] if step >= safe else [f"step {safe} was safe, and step {step} is selected"]


def _mended(directory: Path, newest: int) -> list[str]:
    """`repair --apply`, then a healthy directory: its newest step is this one or one after it."""
    from ckpttool.actions.repair.deeds import Options
    from ckpttool.actions.repair.run import Repair

    if not newest:
        return []
    repair = Repair(str(directory), Options())
    repair.finish_earlier()
    if repair.make_plan().deeds:
        repair.carry_out()
    report = ckpttool.verify(directory)
    errors = [finding.id for finding in report.findings if finding.severity.value == "error"]
    if errors or (report.newest_valid or 0) < newest:  # a whole temporary is published
        return [f"repair leaves {errors}, newest step {report.newest_valid} instead of {newest}"]
    pointer = json.loads((directory / "latest.json").read_bytes())
    return [] if pointer["step"] == report.newest_valid else ["the pointer is not mended"]


def _untrue_records(directory: Path) -> list[str]:
    """What pointer and manifest say of files that are there, and is not so."""
    entries = {}
    lines = directory / "manifest.jsonl"
    for line in lines.read_bytes().splitlines() if lines.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off while it was written
        entries[entry["file"]] = entry
    pointer = directory / "latest.json"
    try:
        told = [json.loads(pointer.read_bytes())] if pointer.exists() else []
    except ValueError:
        return ["the pointer is no JSON"]
    return [
        f"what is said of {entry['file']} is not so"
        for entry in [*entries.values(), *told]
        if "sha256" in entry and not _is_so(directory / entry["file"], entry)
    ]


def _is_so(path: Path, entry: dict[str, Any]) -> bool:
    if not path.exists():
        return True
    content = path.read_bytes()
    return (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])
