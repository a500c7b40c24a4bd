"""Damage by what came back: `mend`, `zip -FF` and torch on the same damaged files, side by side.

`python -m benchmarks.mend_matrix` prints the table of README. What counts as back: the whole file,
byte for byte as it was written; or, where bytes are gone, the tensors whose bytes all precede the
cut, bit for bit. The files are judged by torch, in a process of its own.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate

from ckpttool.mending.plan import Mending, plan_mend
from ckpttool.mending.write import sha256_of_rewritten, write_mended
from tests import corrupt

SEED = 20
SHOWN_TO_OTHERS = 40

# Prints, for each path of a line, the tensors that torch loads, by name with a hash of their bytes.
LOADER = """
import hashlib, json, sys, torch
def flat(value, name=""):
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = repr((value.dtype, tuple(value.shape))).encode()
        yield name, hashlib.sha256(kind + raw).hexdigest()
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{name}.{key}" if name else str(key))
for line in sys.stdin:
    found = {}
    for path in json.loads(line):
        try:
            found[path] = dict(flat(torch.load(path, weights_only=True)))
        except Exception as error:
            found[path] = None
    print(json.dumps(found), flush=True)
"""

Tensors = dict[str, str]


class Damage(NamedTuple):
    """One damaged file: its bytes, and the names of the tensors that are there in full."""

    data: bytes
    there: frozenset[str]


class Kind(NamedTuple):
    """One row of the table. `donor`: the undamaged file is there as a sibling."""

    name: str
    damages: list[Damage]
    donor: bool = False


class Result(NamedTuple):
    """What came of one kind of damage, each as a number of files or of tensors.

    `identical` files came back byte for byte, `refused` were not mended (something would be lost),
    and `invented` came back whole with another content. `tensors` are those that `mend
    --allow-loss` gave back with the right bits, of `there`, and `wrong` those with other bits, in
    some of the files. `others` has, for torch and `zip -FF`, how many tensors of how many each
    gave back right, and how many wrong, in the same files.
    """

    name: str
    files: int
    identical: int
    refused: int
    there: int
    tensors: int
    wrong: int
    invented: int
    others: dict[str, tuple[int, int, int]]


class Matrix:
    """Makes a healthy file in `directory`, damages it, and lets all three have a try.

    Of each kind, at most `shown` files go through what is slow: writing, torch, and `zip -FF`.
    """

    def __init__(self, directory: Path, *, shown: int = SHOWN_TO_OTHERS) -> None:
        self.directory = directory
        self.shown = shown
        self.healthy = directory / "healthy.pt"
        torch.save(state(), self.healthy)
        self.data = self.healthy.read_bytes()
        self.digest = hashlib.sha256(self.data).hexdigest()
        self.tensors = load([self.healthy])[str(self.healthy)] or {}
        self.ends = self._ends()
        self.all = frozenset(self.tensors)
        self.rng = random.Random(SEED)

    def _ends(self) -> dict[str, int]:
        """Where in the file the last byte of each tensor is; each has a storage of its own."""
        data = [n for n in corrupt.entry_offsets(self.data) if n.startswith("data/")]
        data.sort(key=lambda name: int(name[5:]))
        assert len(data) == len(self.tensors)
        spans = [corrupt.content_range(self.data, name).stop for name in data]
        return dict(zip(self.tensors, spans, strict=True))

    # Kinds of damage.

    def kinds(self, *, flips: int, stride: int = 1) -> Iterator[Kind]:
        """All rows; `flips` is how many places each kind of flipped bits gets.

        Of the bytes of the structure, each `stride`th is damaged.
        """
        data = self.data
        yield Kind("the end record cut", [self._whole(corrupt.drop_end_record(data))])
        yield Kind("the central directory cut", [self._whole(corrupt.drop_directory(data))])
        yield Kind("cut at every 5 % of its length", [self._cut(n) for n in range(5, 100, 5)])
        structure = sorted(set(range(len(data))) - corrupt.content_bytes(data))[::stride]
        turned = [self._whole(corrupt.flip_byte(data, offset)) for offset in structure]
        yield Kind("each byte of the zip structure damaged", turned)
        headers = [self._whole(self._without_header(name)) for name in corrupt.entry_offsets(data)]
        yield Kind("each local header zeroed", headers)
        for count, words in ((1, "one bit flipped"), (2, "two bits"), (3, "three bits")):
            yield Kind(f"{words}, in one record", [self._flipped(count) for _ in range(flips)])
        damaged = self._overwritten(64)
        yield Kind("64 bytes of a tensor overwritten", [damaged])
        yield Kind("the same, with a donor", [damaged], donor=True)
        zeroed = self._zeroed(4096)
        yield Kind("4 KiB zeroed", [zeroed])
        yield Kind("the same, with a donor", [zeroed], donor=True)

    def _whole(self, data: bytes) -> Damage:
        return Damage(data, self.all)

    def _cut(self, percent: int) -> Damage:
        length = len(self.data) * percent // 100
        there = frozenset(name for name, end in self.ends.items() if end <= length)
        return Damage(corrupt.keep_first(self.data, length), there)

    def _without_header(self, record: str) -> bytes:
        start = corrupt.header_offset(self.data, record)
        return corrupt.zero_range(
            self.data, start, corrupt.content_range(self.data, record).start - start
        )

    def _record(self) -> tuple[str, range]:
        name = self.rng.choice(list(self.ends))
        place = list(self.ends).index(name)
        return name, corrupt.content_range(self.data, f"data/{place}")

    def _flipped(self, count: int) -> Damage:
        name, content = self._record()
        bits = self.rng.sample(range(8 * len(content)), count)
        data = self.data
        for bit in bits:
            data = corrupt.flip_bit(data, content.start + bit // 8, bit % 8)
        return Damage(data, self.all - {name})

    def _overwritten(self, count: int) -> Damage:
        name, content = self._record()
        start = self.rng.randrange(content.start, content.stop - count)
        new = self.rng.randbytes(count)
        return Damage(corrupt.put_bytes(self.data, start, new), self.all - {name})

    def _zeroed(self, count: int) -> Damage:
        start = self.rng.randrange(len(self.data) // 2, len(self.data) * 3 // 4)
        touched = {n for n, end in self.ends.items() if self._touches(n, end, start, count)}
        return Damage(corrupt.zero_range(self.data, start, count), self.all - touched)

    def _touches(self, name: str, end: int, start: int, count: int) -> bool:
        content = corrupt.content_range(self.data, f"data/{list(self.ends).index(name)}")
        return content.start < start + count and end > start

    # What comes back.

    def result(self, kind: Kind, *, others: bool = True) -> Result:
        """What `mend` makes of one kind of damage, and for some of its files the two others."""
        came = [self.lossless(damage.data, kind.donor) for damage in kind.damages]
        step = -(-len(kind.damages) // self.shown)
        some = kind.damages[::step]
        right, wrong = self.judge([(damage, self.mend(damage.data, kind.donor)) for damage in some])
        found = {}
        for name, tool in (("torch", as_it_is), ("zip -FF", zip_ff)) if others else ():
            right_ones, wrong_ones = self.judge([(damage, tool(damage.data)) for damage in some])
            found[name] = (right_ones, sum(len(damage.there) for damage in some), wrong_ones)
        return Result(
            kind.name,
            len(kind.damages),
            came.count(self.digest),
            came.count(None),
            sum(len(damage.there) for damage in some),
            right,
            wrong,
            len(came) - came.count(self.digest) - came.count(None),
            found,
        )

    def plan(self, data: bytes, donor: bool) -> Mending:
        path = self.directory / "damaged.pt"
        path.write_bytes(data)
        return plan_mend(path, siblings=[str(self.healthy)] if donor else [])

    def lossless(self, data: bytes, donor: bool) -> str | None:
        """SHA-256 of what `mend` would write without `--allow-loss`; None where it refuses."""
        with self.plan(data, donor) as plan:
            if plan.hopeless is not None or plan.loses:
                return None
            return sha256_of_rewritten(plan)

    def mend(self, data: bytes, donor: bool) -> bytes:
        """What `mend --allow-loss` writes."""
        out = self.directory / "mended.pt"
        with self.plan(data, donor) as plan:
            if plan.hopeless is not None:
                return b""
            write_mended(plan, out, allow_loss=True, force=True)
        return out.read_bytes()

    def judge(self, files: list[tuple[Damage, bytes]]) -> tuple[int, int]:
        """How many tensors that are there torch loads with the right bits, and with wrong ones."""
        paths = []
        for index, (_, data) in enumerate(files):
            paths.append(self.directory / f"judged_{index}.pt")
            paths[-1].write_bytes(data)
        loaded = load(paths)
        right = wrong = 0
        for (damage, _), path in zip(files, paths, strict=True):
            tensors = loaded[str(path)] or {}
            right += sum(tensors.get(name) == self.tensors[name] for name in damage.there)
            wrong += sum(self.tensors.get(name) != value for name, value in tensors.items())
            path.unlink()
        return right, wrong


def state() -> dict[str, object]:
    """A small model with its optimizer's moments: each tensor with a storage of its own."""
    generator = torch.Generator().manual_seed(SEED)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    model = {f"layers.{n}.weight": tensor(24, 16) for n in range(8)}
    model |= {f"layers.{n}.bias": tensor(24) for n in range(8)}
    moments = {n: {"exp_avg": tensor(12, 16), "exp_avg_sq": tensor(12, 16)} for n in range(8)}
    return {"model": model, "optimizer": {"state": moments}, "step": 12}


@cache
def judge() -> subprocess.Popen[str]:
    """The process that loads files: one for all, since torch takes seconds to start."""
    command = [sys.executable, "-c", LOADER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """It ends when its input does."""
    process.communicate()


def load(paths: list[Path]) -> dict[str, Tensors | None]:
    """What torch loads from each file, in another process; None where it refuses."""
    process = judge()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(path) for path in paths]) + "\n")
    process.stdin.flush()
    found: dict[str, Tensors | None] = json.loads(process.stdout.readline())
    return found


def as_it_is(data: bytes) -> bytes:
    """torch gets the damaged file itself."""
    return data


def zip_ff(data: bytes) -> bytes:
    """What Info-ZIP's `zip -FF` makes of it; nothing where it gives up, or is not installed."""
    if shutil.which("zip") is None:
        return b""
    with tempfile.TemporaryDirectory() as directory:
        path, out = Path(directory, "damaged.zip"), Path(directory, "fixed.zip")
        path.write_bytes(data)
        subprocess.run(
            ["zip", "-FF", str(path), "--out", str(out)],
            input=b"y\n",
            capture_output=True,
            check=False,
            timeout=60,
        )
        return out.read_bytes() if out.exists() else b""


def table(results: list[Result]) -> str:
    """The results as a table in Markdown."""
    headers = ["damage", "files", "`mend`", "of the tensors that are there", "`zip -FF`", "torch"]
    return tabulate([_cells(r) for r in results], headers, tablefmt="github", disable_numparse=True)


def _cells(result: Result) -> list[str]:
    words = f"{result.identical:,} as they were written"
    if result.files == 1:
        words = "as it was written" if result.identical else "what is left"
    elif result.identical < result.files:
        words += f", {result.refused:,} refused"
    if result.invented:
        words += f", {result.invented:,} mistaken"
    return [
        result.name,
        f"{result.files:,}",
        words,
        _share(result.tensors, result.there, result.wrong),
        *(_share(*result.others[name]) for name in ("zip -FF", "torch") if name in result.others),
    ]


def _share(right: int, there: int, wrong: int) -> str:
    words = f"{100 * right / there:.4g} %" if there else "-"
    return words + (f" ({wrong:,} wrong)" if wrong else "")


def run(*, flips: int, say: Callable[[str], object] = lambda words: None) -> list[Result]:
    """All rows of the table."""
    with tempfile.TemporaryDirectory() as directory:
        matrix = Matrix(Path(directory))
        results = []
        for kind in matrix.kinds(flips=flips):
            say(kind.name)
            results.append(matrix.result(kind))
        return results


if __name__ == "__main__":
    print(table(run(flips=1000, say=lambda words: print(words, "…", file=sys.stderr, flush=True))))
