"""One byte changed anywhere, one byte missing from any place on: `verify` finds it and says where.

The file is a training checkpoint of a hundred records, written by torch. What torch's writer leaves
unused in such a file is nothing: each byte is content (guarded by a checksum), a field that is
stated twice (and compared), or padding with a fixed value (and compared). So there is no byte that
may change unseen; where the change can do no harm to what torch loads, it is a warning.

A sample of the places is tried here, the same each time; four times as many by
`python -m benchmarks.damage_everywhere`.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from ckpttool.checks.verify import Report, verify
from ckpttool.findings import Severity
from tests import corrupt

NAME = "step_000000000012.pt"
LAYERS = 28
PLACES = 500
CUTS = 125


def training_state() -> dict[str, object]:
    """A model of small layers with Adam's moments: 96 tensors, each with bytes of its own."""
    generator = torch.Generator().manual_seed(5)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    names = [f"layers.{n}.{part}" for n in range(LAYERS // 2) for part in ("weight", "bias")]
    model = {name: tensor(9, 7) if "weight" in name else tensor(9) for name in names}
    moments = {
        n: {"step": torch.tensor(12.0 + n), "exp_avg": tensor(5), "exp_avg_sq": tensor(5)}
        for n in range(22)
    }
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(range(22))}]},
        "scaler": None,
        "scheduler": {"last_epoch": 12},
        "step": 12,
        "samples": 96,
        "tokens": 960,
        "config": {"run": {"name": "damage", "sizes": [9, 7]}},
        "rng": {"python": random.Random(1).getstate(), "torch": generator.get_state(), "cuda": []},
        "coordinator": None,
        "precision": {"mode": "fp32", "autocast_enabled": False, "use_scaler": False},
    }


@cache
def healthy() -> bytes:
    buffer = io.BytesIO()
    torch.save(training_state(), buffer)
    return buffer.getvalue()


@cache
def contents() -> dict[str, range]:
    """Where each record's content lies, by Python's zipfile."""
    data = healthy()
    return {record: corrupt.content_range(data, record) for record in corrupt.entry_offsets(data)}


@cache
def tensors() -> dict[str, set[str]]:
    """The names of the tensors in each storage's record, found by their bytes and not by the pickle."""
    data = healthy()
    by_content = {data[r.start : r.stop]: record for record, r in contents().items()}
    found: dict[str, set[str]] = {}

    def look(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.setdefault(by_content[value.numpy().tobytes()], set()).add(name)
        elif isinstance(value, dict):
            for key, item in value.items():
                look(f"{name}.{key}" if name else str(key), item)

    look("", training_state())
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / NAME


def judge(path: Path, data: bytes) -> Report:
    """The report on a file with this content, as plain data too: nothing in it may fail."""
    path.write_bytes(data)
    path.chmod(0o644)
    report = verify(path)
    json.dumps(report.as_dict())
    return report


def errors(report: Report) -> set[str]:
    return {f.id for f in report.findings if f.severity is Severity.ERROR}


def test_the_healthy_file_is_valid(path: Path) -> None:
    report = judge(path, healthy())
    assert report.findings == []
    assert report.files[0].state == "valid"
    assert len(contents()) >= 100
    assert len(tensors()) == len([r for r in contents() if r.startswith("data/")]) >= 95


def places(count: int, *, inside: bool) -> list[tuple[int, int]]:
    """Offsets inside or outside of the records' contents, each with a change of its byte."""
    rng = random.Random(count)
    data = corrupt.content_bytes(healthy())
    eligible = [n for n in range(len(healthy())) if (n in data) == inside]
    return [(n, rng.randrange(1, 256)) for n in rng.sample(eligible, count)]


@pytest.mark.slow
def test_every_byte_of_a_records_data(path: Path) -> None:
    """Found, as an error, with the record and all tensors in it."""
    change_contents(path, PLACES)


def change_contents(path: Path, count: int) -> None:
    record_of = {offset: record for record, span in contents().items() for offset in span}
    seen: Counter[str] = Counter()
    for offset, mask in places(count, inside=True):
        record = record_of[offset]
        report = judge(path, corrupt.flip_byte(healthy(), offset, mask))
        where = f"byte {offset} of {record}, changed by {mask:#x}"
        found = [f for f in report.findings if f.id == "FIL109"]
        assert [f.place.record for f in found] == [record], where
        if record in tensors():
            assert set(found[0].place.tensors) == tensors()[record], where
        assert report.worst is Severity.ERROR, where
        assert not report.could_not_check, where  # so that the command exits with 1
        # A changed name in the pickle can be that of something dangerous, which outranks damage.
        assert report.files[0].state in ("damaged", "dangerous"), where
        assert report.newest_valid is None, where
        seen[record] += 1
    assert seen["data.pkl"] > 3 * count / 20
    assert len(seen) > min(60, count * 2 // 25)


@pytest.mark.slow
def test_every_byte_outside_of_the_records_data(path: Path) -> None:
    """Places in headers, padding, descriptors, the directory and the end records: all found."""
    change_the_rest(path, PLACES)


def change_the_rest(path: Path, count: int) -> None:
    kinds: Counter[tuple[object, ...]] = Counter()
    for offset, mask in places(count, inside=False):
        report = judge(path, corrupt.flip_byte(healthy(), offset, mask))
        where = f"byte {offset}, changed by {mask:#x}"
        assert report.findings, where
        if report.worst is not Severity.ERROR:
            assert {f.severity for f in report.findings} == {Severity.WARNING}, where
            kind = tuple((f.id, f.facts.get("field")) for f in report.findings)
            kinds[kind] += 1
            if kinds[kind] < 30:  # of each kind of harmless change, some are put to the proof
                assert loads_the_same(path), where
    assert len(kinds) > 5
    assert count / 20 < sum(kinds.values()) < count


def loads_the_same(path: Path) -> bool:
    """Whether torch loads what was saved, bit for bit."""
    loaded, saved = torch.load(path, weights_only=True), training_state()
    return flat(loaded) == flat(saved)


def flat(value: object, name: str = "") -> dict[str, object]:
    if isinstance(value, torch.Tensor):
        return {name: (value.dtype, tuple(value.shape), value.numpy().tobytes())}
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [flat(item, f"{name}.{key}") for key, item in items]
        return {key: item for part in parts for key, item in part.items()} or {name: repr(value)}
    return {name: value}


def test_every_cut(path: Path) -> None:
    """All found, none called anything but damaged."""
    cut(path, CUTS)


def cut(path: Path, count: int) -> None:
    rng = random.Random(6)
    size, near = len(healthy()), 2 * count // 5  # from the end on, two of five
    lengths = rng.sample(range(1, size - near), count - near) + list(range(size - near, size))
    for length in lengths:
        report = judge(path, corrupt.keep_first(healthy(), length))
        assert report.worst is Severity.ERROR, length
        assert report.files[0].state in ("damaged", "not-a-checkpoint"), length
        assert errors(report) & {"FIL104", "FIL105", "FIL106"}, length
        assert not report.could_not_check, length
    assert errors(judge(path, b"")) == {"FIL102"}


@pytest.mark.parametrize("tail", [30, 100, 4096, 20_000])
def test_every_zeroed_tail(tail: int, path: Path) -> None:
    report = judge(path, corrupt.zero_tail(healthy(), tail))
    assert report.worst is Severity.ERROR
    assert report.files[0].state == "damaged"


def test_blocks_in_the_middle(path: Path) -> None:
    """What a lost disk block, or a doubled one, leaves behind."""
    rng = random.Random(7)
    data = healthy()
    for _ in range(60):
        offset = rng.randrange(0, len(data) - 1024, 512)
        for damaged in (
            corrupt.zero_range(data, offset, 512),
            corrupt.cut_out(data, offset, 512),
            corrupt.put_bytes(data, offset, data[offset + 512 : offset + 1024]),
        ):
            if damaged == data:
                continue
            report = judge(path, damaged)
            assert report.findings, offset
            assert report.files[0].state != "valid" or loads_the_same(path), offset


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data, 0),
        (lambda data: corrupt.flip_bit(data, contents()["data/7"].start), 1),
        (lambda data: corrupt.flip_bit(data, contents()["data.pkl"].start + 40), 1),
        (lambda data: corrupt.flip_bit(data, 0), 1),
        (lambda data: corrupt.keep_first(data, len(data) // 2), 1),
        (lambda data: corrupt.cut_end(data, 1), 1),
    ],
)
def test_through_the_command(change: object, code: int, path: Path) -> None:
    assert callable(change)
    path.write_bytes(change(healthy()))
    path.chmod(0o644)
    command = [sys.executable, "-m", "ckpttool", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert "FIL" in done.stdout
