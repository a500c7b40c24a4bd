"""Problems with checkpoints that people reported, one test each, through the library's front door.

Grouped by kind: A damaged or not a checkpoint, C which one is the latest, E while somebody writes,
H what weights_only refuses, K the system that the training core follows, S hostile. Each file is
made as the report says. What single checks do in detail is tested beside them.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
import types
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpttool
from ckpttool.checks.verify import Report
from ckpttool.cli.main import main
from ckpttool.findings import Severity
from fixtures import hostile_files
from tests import corrupt
from tests.ckpttool.checks.builders import name, point, put, saved, step_bytes, training_state
from trainer_core import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    atomic_torch_save,
    restore_rng_state,
)

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "fixtures" / "corpus"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A healthy directory: steps 2, 4 and 6, the pointer at 6."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    for step in (2, 4, 6):
        put(directory, step, step_bytes(step))
    point(directory, 6)
    return directory


def inspect(path: Path) -> str:
    """What `inspect` shows; it must end well whatever the file is."""
    done = CliRunner().invoke(main, ["inspect", str(path)], catch_exceptions=False)
    assert done.exit_code in (0, 1, 3)
    assert "Traceback" not in done.output
    return done.output


def ids(report: Report, step: int = 6) -> set[str]:
    return {f.id for f in report.findings if f.place.path.endswith(name(step))}


def judge(run: Path, data: bytes, state: str, *expected: str) -> Report:
    """Step 6 becomes `data`: it is in this state, with these findings among others; 4 is the newest."""
    path = put(run, 6, data)
    report = ckpttool.verify(run)
    assert report.files[-1].state == state, report.findings
    assert set(expected) <= ids(report), report.findings
    assert report.newest_valid == (6 if state == "valid" else 4)
    inspect(path)
    return report


def words(report: Report, id: str) -> str:
    return next(finding.words for finding in report.findings if finding.id == id)


@cache
def legacy_bytes() -> bytes:
    return saved(training_state(6), _use_new_zipfile_serialization=False)


def pickle_of(data: bytes) -> bytes:
    return next(c for full, c in corrupt.read_records(data) if full.endswith("/data.pkl"))


def with_pickle(stream: bytes) -> bytes:
    return corrupt.replace_record(step_bytes(6), "data.pkl", stream)


# ---- A: damaged, or no checkpoint at all


def test_a01_killed_while_saving_in_the_old_format(run: Path) -> None:
    data = corrupt.cut_end(legacy_bytes(), 8)
    said = words(judge(run, data, "damaged", "FIL105"), "FIL105")
    assert f"{len(data):,} bytes are present of {len(data) + 8:,} needed" in said


@pytest.mark.parametrize("cut", [0.4, 22])
def test_a02_no_central_directory(cut: float, run: Path) -> None:
    data = step_bytes(6)
    data = corrupt.cut_end(data, int(cut if cut > 1 else cut * len(data)))
    report = judge(run, data, "damaged", "FIL105")
    assert "can still be found whole" in words(report, "FIL105")
    assert "ckpttool repair" in (report.findings[0].remedy or "")


def test_a04_bit_rot_that_torch_does_not_see(run: Path) -> None:
    data = step_bytes(6)
    place = corrupt.content_range(data, "data/0")
    report = judge(run, corrupt.flip_bit(data, place.start + 2), "damaged", "FIL109")
    torch.load(run / name(6), weights_only=True)
    finding = next(finding for finding in report.findings if finding.id == "FIL109")
    assert finding.place.record == "data/0"
    assert finding.place.tensors == ("model.0.weight",)


def test_a05_checksums_switched_off(run: Path) -> None:
    judge(run, corrupt.drop_checksums(step_bytes(6)), "valid", "FIL110")
    judge(run, corrupt.set_crc(step_bytes(6), "data/0", 0), "damaged", "FIL109")


def test_a06_an_empty_file(run: Path) -> None:
    assert "never written" in words(judge(run, b"", "damaged", "FIL102"), "FIL102")


def test_a08_zeros_after_a_power_loss(run: Path) -> None:
    big = saved({**training_state(6), "pad": torch.randn(150_000)})
    assert "unflushed" in words(
        judge(run, corrupt.zero_tail(big, 256 << 10), "damaged", "FIL104"), "FIL104"
    )
    assert "unflushed" in words(judge(run, bytes(len(big)), "damaged", "FIL103"), "FIL103")


def test_a09_a_git_lfs_pointer(run: Path) -> None:
    oid = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 12345\n"
    report = judge(run, text.encode(), "not-a-checkpoint", "FIL106")
    assert oid in words(report, "FIL106")
    assert "12,345" in words(report, "FIL106")


@pytest.mark.parametrize(
    ("page", "word"),
    [
        (b"<!DOCTYPE html><html><head><title>Not \x1b[2Jfound</title></head></html>", "HTML"),
        (b"\xef\xbb\xbf<html><title>Sign in</title></html>", "HTML"),
        (b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code></Error>', "XML"),
        (b'{"error": "Repository not found"}', "JSON"),
    ],
)
def test_a10_an_error_page(page: bytes, word: str, run: Path) -> None:
    report = judge(run, page, "not-a-checkpoint", "FIL106")
    assert word in words(report, "FIL106")
    assert "\x1b" not in inspect(run / name(6))


def test_a11_gzip_under_the_same_name(run: Path) -> None:
    report = judge(run, gzip.compress(step_bytes(6)), "not-a-checkpoint", "FIL106")
    assert "gzip" in words(report, "FIL106")
    bomb = gzip.compress(bytes(1 << 26))
    judge(run, bomb, "not-a-checkpoint", "FIL106")


def test_a12_nothing_but_zeros(run: Path) -> None:
    judge(run, bytes(4096), "damaged", "FIL103")


def test_a13_saved_twice_to_one_handle(run: Path) -> None:
    buffer = io.BytesIO()
    for step in (5, 6):
        torch.save(training_state(step), buffer)
    assert "another archive" in words(judge(run, buffer.getvalue(), "damaged", "FIL107"), "FIL107")
    other = saved({**training_state(6), "more": torch.ones(500)})
    judge(run, corrupt.concatenate(step_bytes(6), other), "damaged", "FIL107")


@pytest.mark.parametrize("count", [1 << 61, 0])
def test_a14_a_storage_of_wrong_size(count: int, run: Path) -> None:
    data = legacy_bytes()
    weight = training_state(6)["model"]["0.weight"].numpy().tobytes()
    damaged = corrupt.put_bytes(data, data.index(weight) - 8, struct.pack("<q", count))
    judge(run, damaged, "damaged", "FIL112")


def test_a16_a_member_added_by_another_tool(run: Path) -> None:
    data = corrupt.add_member(step_bytes(6), "archive/notes.txt", b"added later")
    report = judge(run, data, "valid")
    assert {f.severity for f in report.findings} <= {Severity.INFO, Severity.WARNING}
    with ckpttool.open(run / name(6)) as checkpoint:
        assert checkpoint.tensors["model.0.weight"].numpy().shape == (3, 4)


@pytest.mark.slow
def test_a16_a_zip_of_more_than_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets beyond 32 bits, in a sparse file: torch writes headers and no data."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        state = {"big": torch.empty((5 << 30) // 4), "small": torch.empty(3)}
    path = tmp_path / "big.pt"
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, path)
    assert path.stat().st_size > 5 << 30
    with ckpttool.open(path) as checkpoint:
        assert [ref.nbytes for ref in checkpoint.tensors.values()] == [5 << 30, 12]
        assert checkpoint.anomalies == [] or {a.code for a in checkpoint.anomalies} == {
            "checksums-off"
        }
        assert checkpoint.tensors["small"].numpy().tolist() == [0, 0, 0]


def test_a17_cut_at_publication_is_truncated_and_not_unknown(run: Path) -> None:
    report = judge(run, step_bytes(6)[:4096], "damaged", "FIL105")
    assert "FIL106" not in ids(report)


def test_a18_a_plain_pickle(run: Path) -> None:
    data = pickle.dumps({"model": [[1.0, 2.0]], "config": argparse.Namespace(lr=1)}, 2)
    report = judge(run, data, "not-a-checkpoint", "FIL106", "TRU103")
    assert "plain pickle" in words(report, "FIL106")


def test_a19_the_extension_says_nothing(tmp_path: Path) -> None:
    for suffix in (".pth.tar", ".zip", ".bin", ""):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(step_bytes(6))
        with ckpttool.open(path) as checkpoint:
            assert checkpoint.kind == "torch-zip"
        assert ckpttool.verify(path).files[0].state == "intact"


def test_a20_which_torch_can_read_it(run: Path) -> None:
    assert "torch 1.6 or newer reads it" in inspect(run / name(6))
    put(run, 6, legacy_bytes())
    assert "every torch reads it" in inspect(run / name(6))


def test_a21_a_save_of_many_shards_that_failed(tmp_path: Path) -> None:
    whole = saved({"shard": torch.ones(8)})
    for number in range(8):
        shard = tmp_path / f"shard_{number}.pt"
        if number < 5:
            shard.write_bytes(whole)
        elif number < 7:
            shard.touch()
        else:
            (tmp_path / "shard_7.pt.tmp").write_bytes(whole)
    verdicts = [ckpttool.verify(path).files[0].state for path in sorted(tmp_path.glob("*.pt"))]
    assert verdicts == ["intact"] * 5 + ["damaged"] * 2
    report = ckpttool.verify(tmp_path)
    assert report.newest_valid is None
    assert "DIR107" in {finding.id for finding in report.findings}


def test_a22_the_newest_is_damaged(run: Path) -> None:
    data = step_bytes(6)
    put(run, 6, corrupt.flip_bit(data, corrupt.content_range(data, "data/0").start))
    manager = CheckpointManager(run)
    with pytest.raises(CheckpointError, match=r"newest valid step is 4 .*ckpttool fix-pointer"):
        manager.load_latest()
    with pytest.warns(CheckpointWarning, match=name(4)):
        state = manager.load_latest(fallback=True)
    assert state is not None
    assert state["step"] == 4


def test_a23_torch_is_never_asked(tmp_path: Path) -> None:
    """Old versions of torch abort the whole process on a cut file."""
    (tmp_path / name(6)).write_bytes(corrupt.cut_end(legacy_bytes(), 8))
    script = (
        "import sys, ckpttool; r = ckpttool.verify(sys.argv[1]); "
        "assert 'torch' not in sys.modules; print(r.files[0].state)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "damaged\n"


def test_a24_a_pickle_cut_at_any_byte(run: Path) -> None:
    stream = pickle_of(step_bytes(6))
    for length in [*range(120), *random.Random(1).sample(range(120, len(stream)), 150)]:
        put(run, 6, with_pickle(stream[:length]))
        report = ckpttool.verify(run / name(6))
        assert report.files[0].state == "damaged", length
        assert "FIL123" in ids(report), length


# ---- B: what a writer, or a reader, does to a job


READS = """
import json, sys
events = []
sys.addaudithook(lambda event, _: event in ("os.fork", "mmap.__new__") and events.append(event))
from ckpttool.checks import measure
from ckpttool.checks.verify import verify
from ckpttool.io import mapped

path, *kinds = sys.argv[1:]
measure._WORTH_MAPPING = measure._WORTH_TELLING = 0  # as if it were large
found = []
for kind in kinds:
    mapped._file_system = lambda device, kind=kind: kind or None
    events.clear()
    found.append([sorted(set(events)), [f.id for f in verify(path, jobs=2).findings], len(events)])
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps on Linux only")
def test_b16_what_is_not_known_as_local_is_read_and_not_mapped(run: Path) -> None:
    """A damaged record is found either way; only a local disk's file goes to children that map it.

    What kind of file system it is, is said by Linux; whatever has a kind of its own, or none that
    Linux would tell, counts as a network's.
    """
    path = run / name(6)
    place = corrupt.content_range(step_bytes(6), "data/0").start
    path.write_bytes(corrupt.flip_bit(step_bytes(6), place))
    kinds = ["ext4", "nfs4", "fuse.sshfs", "lustre", "cifs", "9p", ""]
    command = [sys.executable, "-c", READS, str(path), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    local, *others = json.loads(done.stdout)
    assert "FIL109" in local[1] and local[2] > 0
    assert others == [[[], local[1], 0]] * len(others)


def test_b16_what_linux_calls_no_disk_is_not_mapped() -> None:
    """The kind is really looked up: /proc is a file system, and none of those that are known."""
    from ckpttool.io.mapped import can_map
    from ckpttool.io.reading import FileReader

    if not os.path.exists("/proc/version"):
        pytest.skip("no /proc here")
    with FileReader("/proc/version") as reader:
        assert not can_map(reader)


# ---- C: which one is the latest


def test_c08_stray_names(run: Path) -> None:
    for stray in ("backup", "step_6-hf.pt", ".DS_Store", f"._{name(6)}", "Thumbs.db", "step_.pt"):
        (run / stray).touch()
    (run / name(8)).mkdir()
    report = ckpttool.verify(run)
    assert report.newest_valid == 6
    assert [f.step for f in report.files if f.state == "valid"] == [2, 4, 6]
    assert CheckpointManager(run).latest_path() == run / name(6)


def test_c09_numbers_of_another_width(tmp_path: Path) -> None:
    for file, step in (("step_9.pt", 9), ("step_10.pt", 10), ("step_000008.pt", 8)):
        (tmp_path / file).write_bytes(saved(training_state(step)))
    report = ckpttool.verify(tmp_path)
    assert (report.newest_valid, len(report.files)) == (10, 3)
    assert "DIR103" in {finding.id for finding in report.findings}
    assert CheckpointManager(tmp_path).latest_path() == tmp_path / "step_10.pt"


@pytest.mark.parametrize("times", [(3e9, 2e9, 1e9), (1e9, 1e9, 1e9), (0, 0, 0)])
def test_c10_times_do_not_order(times: tuple[float, ...], run: Path) -> None:
    for step, time in zip((2, 4, 6), times, strict=True):
        os.utime(run / name(step), (time, time))
    assert ckpttool.verify(run).newest_valid == 6
    manager = CheckpointManager(run, keep_last=1)
    manager.prune()
    assert [path.name for path in run.glob("step_*.pt")] == [name(6)]


def test_c16_links(run: Path, tmp_path: Path) -> None:
    (run / "latest").symlink_to(run / name(6))
    (run / "loop").symlink_to(run / "loop")
    (run / "away").symlink_to(tmp_path)
    report = ckpttool.verify(run)
    assert report.newest_valid == 6
    assert "DIR108" in {finding.id for finding in report.findings}
    moved = run.rename(tmp_path / "moved")
    assert "DIR108" in {finding.id for finding in ckpttool.verify(moved).findings}


# ---- E: while somebody writes


def test_e06_a_trainer_at_work(run: Path) -> None:
    """Its replacing whole files is never called damage: a file is valid, or it was changing."""
    path, stop = run / name(6), threading.Event()

    def trainer() -> None:
        while not stop.is_set():
            atomic_torch_save(training_state(6), path)

    writer = threading.Thread(target=trainer)
    writer.start()
    try:
        states = {ckpttool.verify(path).files[0].state for _ in range(60)}
    finally:
        stop.set()
        writer.join()
    assert states <= {"valid", "changing"}
    assert ckpttool.verify(path).files[0].state == "valid"


# ---- H: what weights_only refuses


def refused(tmp_path: Path, value: Any, **options: Any) -> tuple[str, dict[str, str], Path]:
    """The prediction for a file with `value` and a tensor, and its globals; torch must agree."""
    path = tmp_path / "file.pt"
    path.write_bytes(saved({"w": torch.ones(2), "odd": value}, **options))
    with ckpttool.open(path) as checkpoint:
        assert checkpoint.tensors["w"].numpy().tolist() == [1, 1]
        names = {f"{use.module}.{use.name}": use.trust.value for use in checkpoint.globals}
        need = checkpoint.load_need
    with warnings.catch_warnings(), pytest.raises(pickle.UnpicklingError):
        warnings.simplefilter("ignore")
        torch.load(path, weights_only=True)
    return need, names, path


def test_h01_a_namespace(tmp_path: Path) -> None:
    need, names, path = refused(tmp_path, argparse.Namespace(lr=1))
    assert (need, names["argparse.Namespace"]) == ("allow-list", "benign")
    assert "argparse.Namespace" in inspect(path)


def test_h02_a_config_of_omegaconf(tmp_path: Path) -> None:
    with stub("omegaconf.listconfig", "ListConfig") as kind:
        need, names, _ = refused(tmp_path, kind())
    assert (need, names["omegaconf.listconfig.ListConfig"]) == ("allow-list", "benign")


class stub:
    """A module with one class that exists only while something is pickled."""

    def __init__(self, module: str, attribute: str) -> None:
        parts = module.split(".")
        self.paths = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
        self.kind = type(attribute, (), {"__module__": module})
        self.before: dict[str, types.ModuleType] = {}

    def __enter__(self) -> type:
        self.before = {path: sys.modules[path] for path in self.paths if path in sys.modules}
        sys.modules.update({path: types.ModuleType(path) for path in self.paths})
        setattr(sys.modules[self.paths[-1]], self.kind.__name__, self.kind)
        return self.kind

    def __exit__(self, *_: object) -> None:
        for path in self.paths:
            del sys.modules[path]
        sys.modules.update(self.before)


def test_h03_getattr_is_dangerous(tmp_path: Path) -> None:
    need, names, path = refused(tmp_path, getattr)
    assert need == "weights_only=False"
    assert names["__builtin__.getattr"] == "dangerous"
    assert ckpttool.verify(path).files[0].state == "dangerous"


def test_h04_arrays_of_numpy(tmp_path: Path) -> None:
    need, names, _ = refused(tmp_path, np.arange(3))
    assert need == "allow-list"
    assert set(names.values()) == {"torch-safe", "benign"}
    assert any(path.endswith("multiarray._reconstruct") for path in names)


def test_h05_bytes_are_nothing_special(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(saved({"b": b"\xff\0", "a": bytearray(b"xy")}))
    with ckpttool.open(path) as checkpoint:
        assert (checkpoint.tree, checkpoint.load_need) == (
            *({"b": b"\xff\0", "a": bytearray(b"xy")}, "weights-only"),
        )
    assert torch.load(path, weights_only=True)["b"] == b"\xff\0"


def test_h06_classes_of_dtypes(tmp_path: Path) -> None:
    """Loading an array needs `numpy.dtypes.*`, which torch names only after the first refusal."""
    need, names, _ = refused(tmp_path, np.arange(3, dtype=np.uint32))
    assert need == "allow-list"
    assert names.get("numpy.dtypes.UInt32DType", "benign") == "benign"


def test_h07_opcodes_and_other_files(tmp_path: Path) -> None:
    need, _, path = refused(tmp_path, "text", pickle_protocol=4)
    assert need == "weights_only=False"
    assert "TRU104" in {finding.id for finding in ckpttool.verify(path).findings}
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64)
    with ckpttool.open(path) as checkpoint:
        assert (checkpoint.kind, checkpoint.load_need) == ("git-lfs-pointer", "nothing")


def test_h08_both_generations_of_numpy(tmp_path: Path) -> None:
    new = pickle.dumps(np.arange(3, dtype="<i8"), 2)[2:-1]
    old = new.replace(b"numpy._core.", b"numpy.core.")
    assert new != old or b"numpy.core." in new
    for stream in (old, old.replace(b"numpy.core.", b"numpy._core.")):
        path = tmp_path / "file.pt"
        path.write_bytes(with_pickle(b"\x80\x02}X\x01\x00\x00\x00a" + stream + b"s."))
        with ckpttool.open(path) as checkpoint:
            assert checkpoint.tree["a"].data == np.arange(3, dtype="<i8").tobytes()
            assert checkpoint.load_need == "allow-list"


def test_h09_a_whole_model_whose_class_is_gone(tmp_path: Path) -> None:
    with stub("models", "Net") as kind:
        net = kind()
        vars(net).update(weight=torch.ones(3), sizes=[1, 2])
        need, names, path = refused(tmp_path, net)
    assert (need, names["models.Net"]) == ("weights_only=False", "unknown")
    with ckpttool.open(path) as checkpoint:
        assert checkpoint.tensors["odd.weight"].shape == (3,)
        assert checkpoint.tree["odd"].path == "models.Net"


# ---- K: the system that the training core follows


def test_k01_archives_named_after_the_temporary() -> None:
    path = CORPUS / "seed-runs" / "plain" / name(4)
    with ckpttool.open(path) as checkpoint:
        assert checkpoint.container is not None
        assert checkpoint.container.prefix.startswith(".step_")
    assert ckpttool.verify(path).files[0].state == "valid"


@pytest.mark.parametrize(
    "content", [b"", b'{"step": 6, "fi', b"null", b"5", b"[]", b'{"step": 6}', b"\xff\xfe"]
)
def test_k02_a_broken_pointer_is_said(content: bytes, run: Path) -> None:
    (run / "latest.json").write_bytes(content)
    report = ckpttool.verify(run)
    assert "PTR102" in {finding.id for finding in report.findings}
    assert report.newest_valid == 6


@pytest.mark.parametrize("file", ["", ".", "folder", None])
def test_k03_a_pointer_at_a_directory(file: str | None, run: Path) -> None:
    (run / "folder").mkdir()
    if file is None:
        (run / "latest.json").unlink()
        (run / "latest.json").mkdir()
    else:
        (run / "latest.json").write_text(json.dumps({"step": 6, "file": file}))
    report = ckpttool.verify(run)
    assert any(f.id.startswith("PTR") and f.severity is Severity.ERROR for f in report.findings)
    assert CheckpointManager(run).latest_path() == run / name(6)


def test_k04_a_pointer_that_leads_away(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    away = put(tmp_path / "elsewhere", 8, step_bytes(8))
    (run / name(10)).symlink_to(away)
    for file in (f"../elsewhere/{name(8)}", str(away), name(10)):
        (run / "latest.json").write_text(json.dumps({"step": 8, "file": file}))
        report = ckpttool.verify(run)
        assert "PTR103" in {finding.id for finding in report.findings}, file
        assert report.newest_valid == 6
        assert CheckpointManager(run).latest_path() == run / name(6)


def test_k05_a_pointer_that_says_another_step(run: Path) -> None:
    (run / "latest.json").write_text(json.dumps({"step": 999, "file": name(4)}))
    assert "PTR106" in {finding.id for finding in ckpttool.verify(run).findings}
    with pytest.raises(CheckpointError, match="999"):
        CheckpointManager(run).load_latest()


def test_k07_a_leftover_of_a_killed_save(run: Path) -> None:
    leftover = run / f".{name(8)}.tmp-999999999"
    leftover.write_bytes(step_bytes(6)[:999])
    assert "DIR101" in {finding.id for finding in ckpttool.verify(run).findings}
    CheckpointManager(run, keep_last=None).save(10, training_state(10))
    assert not leftover.exists()


def test_k08_zeroed_bytes_and_an_appended_tail(run: Path) -> None:
    data = step_bytes(6)
    place = next(
        r
        for r in (corrupt.content_range(data, record) for record in corrupt.entry_offsets(data))
        if len(r) > 4000
    )
    judge(run, corrupt.zero_range(data, place.start + 1000, 256), "damaged", "FIL109")
    tail = random.Random(1).randbytes(64 << 10)
    report = judge(run, corrupt.append(data, tail), "valid", "FIL108")
    assert f"{len(tail):,}" in words(report, "FIL108")


def test_k09_nan_weights_and_a_missing_model(run: Path) -> None:
    state = training_state(6)
    state["model"]["0.weight"][0, 0] = float("nan")
    put(run, 6, saved(state))
    assert ckpttool.verify(run, finite=True).findings[0].id == "VAL101"
    del state["model"]
    put(run, 6, saved(state))
    report = ckpttool.verify(run)
    assert "SCH103" in ids(report)


def test_k10_a_file_renamed_to_another_step(run: Path) -> None:
    (run / name(6)).rename(run / name(8))
    report = ckpttool.verify(run)
    assert (report.files[-1].state, report.newest_valid) == ("wrong-step", 4)
    assert "SCH102" in ids(report, 8)


def test_k11_parameter_groups_that_do_not_fit() -> None:
    from tests.trainer_core.resuming.test_resume import Net, new

    trainer = new(seed=1)
    state = trainer.state_dict()
    state["optimizer"]["param_groups"][0]["params"].pop()
    other = new(seed=2, model=Net())
    before = [parameter.detach().clone() for parameter in other.model.parameters()]
    with pytest.raises(ValueError, match="group"):
        other.resume(state)
    after = list(other.model.parameters())
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_k12_garbage_for_random_numbers(run: Path) -> None:
    failures = restore_rng_state({"python": "garbage", "torch": 5})
    assert {"python", "torch"} <= set(failures)
    put(run, 6, saved({**training_state(6), "rng": {"python": "garbage", "torch": 5}}))
    assert "SCH107" in ids(ckpttool.verify(run))


def test_k13_torchs_own_list_of_unsafe_globals_is_not_all(tmp_path: Path) -> None:
    _, names, path = refused(tmp_path, np.arange(3, dtype=np.uint32))
    listed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert set(listed) <= set(names)


def test_k15_secrets_of_a_config(run: Path) -> None:
    config = {"run": {"hf_token": "hf_abcdefghijkl", "lr": 0.1}}
    put(run, 6, saved({**training_state(6), "config": config}))
    report = ckpttool.verify(run)
    assert "SCH115" in ids(report)
    assert "hf_abcdefghijkl" not in json.dumps(report.as_dict())
    assert "hf_abcdefghijkl" not in inspect(run / name(6))


def test_k16_fp16_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    from trainer_core import resolve_precision

    plan = resolve_precision("fp16", torch.device("cpu"))
    assert (plan.mode, plan.use_scaler) == ("fp32", False)
    assert "fp32" in caplog.text


# ---- S: hostile

HONEST = hostile_files.honest_state


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the payloads of `fixtures/hostile_files.py` would leave their mark."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / hostile_files.MARKER


@cache
def hostile() -> dict[str, bytes]:
    files = hostile_files.files(
        saved(HONEST()), saved(HONEST(), _use_new_zipfile_serialization=False)
    )
    return dict(files)


def dangerous(file: str, run: Path, mark: Path, *expected: str) -> None:
    judge(run, hostile()[f"{file}.pt"], "dangerous", *expected)
    for option in ("--json", "--tree", "--globals", "--records"):
        CliRunner().invoke(main, ["inspect", str(run / name(6)), option], catch_exceptions=False)
    assert not mark.exists()


@pytest.mark.parametrize("where", ["central", "local"])
def test_s01_a_flag_that_says_encrypted(where: str, run: Path, mark: Path) -> None:
    dangerous(f"flag-in-{where}", run, mark, "TRU101", "TRU106")


@pytest.mark.parametrize("file", ["wrong-checksum", "two-names"])
def test_s02_what_stops_a_scanner_does_not_hide_the_payload(
    file: str, run: Path, mark: Path
) -> None:
    dangerous(file, run, mark, "TRU101", "FIL113")


def test_s03_a_pickle_under_any_name(run: Path, mark: Path) -> None:
    evil = hostile()["plain-pickle.pt"]
    for record in ("model.py", "weights.npy", "extra/blob", "data/99"):
        data = corrupt.duplicate_record(step_bytes(6), "data/0", evil, name=record)
        judge(run, data, "dangerous", "TRU107")
    judge(run, evil, "dangerous", "TRU101")
    assert not mark.exists()


@pytest.mark.parametrize("file", ["duplicate-evil-first", "duplicate-evil-last", "case-twin"])
def test_s04_two_records_of_one_name(file: str, run: Path, mark: Path) -> None:
    dangerous(file, run, mark, "TRU106")


def test_s05_a_pickle_that_poses_as_data_and_data_that_poses_as_one(run: Path, mark: Path) -> None:
    dangerous("unreferenced-record", run, mark, "TRU107")
    stream = hostile()["plain-pickle.pt"]
    floats = torch.frombuffer(bytearray(stream + bytes(-len(stream) % 4)), dtype=torch.float32)
    judge(run, saved({**training_state(6), "odd": floats}), "valid")


def test_s06_several_pickles_in_one_stream(run: Path, mark: Path) -> None:
    dangerous("second-pickle", run, mark, "TRU105")
    dangerous("garbage-after", run, mark, "TRU101", "FIL123")
    assert ids(judge(run, legacy_bytes(), "valid")) <= {
        "FIL121",
        "FIL126",
    }  # five pickles, all honest


@pytest.mark.parametrize(
    "data",
    [
        hostile_files.seven_zip(b""),
        b"\xfd7zXZ\x00" + bytes(range(200)),
        b"BZh91AY&SY" + bytes(range(200)),
        gzip.compress(b"ustar" + bytes(5000), mtime=0),
    ],
)
def test_s07_other_archives_are_named_and_not_unpacked(data: bytes, run: Path) -> None:
    judge(run, data, "not-a-checkpoint", "FIL106")


@pytest.mark.parametrize("file", [*hostile_files.PAYLOADS])
def test_s09_every_way_of_calling(file: str, run: Path, mark: Path) -> None:
    dangerous(file, run, mark, "TRU101")


@pytest.mark.parametrize("file", ["cyclic", "nested", "doubling"])
def test_s10_shapes_that_exhaust_a_scanner(file: str, run: Path) -> None:
    put(run, 6, hostile()[f"{file}.pt"])
    report = ckpttool.verify(run)
    assert report.newest_valid == 4
    inspect(run / name(6))
    (run / name(6)).write_bytes(with_pickle(bytes.fromhex("80025d9467300a612e")))
    assert ckpttool.verify(run).newest_valid == 4


def test_s12_a_bomb_with_a_false_size(run: Path) -> None:
    judge(run, hostile()["zip-bomb.pt"], "damaged", "FIL118")
    judge(run, corrupt.zip_bomb(size=1 << 30, claim=100), "damaged")


def test_s13_safe_loading_needs_torch_2_6() -> None:
    assert '"torch>=2.6"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_s15_honest_files_are_not_called_dangerous() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file() and path.name != "README.md"]
    for path in files:
        report = ckpttool.verify(path, quick=True)
        found = [
            f for f in report.findings if f.id.startswith("TRU") and f.severity is Severity.ERROR
        ]
        assert found == [], path
    assert len(files) > 80


def test_s16_terminal_escapes(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "bell\x07\x1b[2J\u202e.pt"
    path.write_bytes(hostile()["escape-names.pt"])
    arguments: list[Callable[[], list[str]]] = [
        lambda: ["inspect", str(path), "--tensors", "--tree", "--records"],
        lambda: ["verify", str(path)],
        lambda: ["inspect", str(path), "--json"],
        lambda: ["verify", str(path), "--json"],
    ]
    for make in arguments:
        done = CliRunner().invoke(main, make(), catch_exceptions=False)
        assert not [c for c in done.output if not c.isprintable() and c != "\n"], make()
        if "--json" in make():
            json.loads(done.stdout)


def test_the_cases_are_all_here() -> None:
    """One function at least for each case of the list that this file answers."""
    wanted = {
        *(f"a{n:02}" for n in (1, 2, 4, 5, 6, *range(8, 15), *range(16, 25))),
        *("c08", "c09", "c10", "c16", "e06", *(f"h0{n}" for n in range(1, 10))),
        *(f"k{n:02}" for n in (*range(1, 6), *range(7, 14), 15, 16)),
        *(f"s{n:02}" for n in (*range(1, 8), 9, 10, 12, 13, 15, 16)),
    }
    here = collections.Counter(item.split("_")[1] for item in globals() if item.startswith("test_"))
    assert wanted <= set(here)
    with zipfile.ZipFile(io.BytesIO(step_bytes(6))) as archive:  # and the base of them all is sound
        assert archive.testzip() is None
