"""Problems with checkpoints that people reported, and what `repair`, `mend` and the like do of them.

Grouped by kind: A damaged or not a checkpoint, B what a writer that died leaves, C which one is the
latest, D keeping and moving files, G size and layout. What `verify` says of each is tested in
`test_cases.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import stat
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import ckpttool
from ckpttool.cli.main import main
from tests import corrupt
from tests.ckpttool.checks.builders import name, point, put, saved, step_bytes, training_state

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "fixtures" / "corpus"
DEAD = 2**22 + 1  # no process of Linux has this id


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A healthy directory: steps 2, 4 and 6, the pointer at 6."""
    return make_run(tmp_path / "run")


def make_run(directory: Path) -> Path:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    for step in (2, 4, 6):
        put(directory, step, step_bytes(step))
    point(directory, 6)
    (directory / "latest.json").chmod(0o644)
    return directory


def cli(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def repair(run: Path, newest: int, *options: str, code: int = 0) -> Result:
    """Repairs; afterwards nothing is wrong, `newest` is the newest step, and it loads in torch."""
    before = contents(run)
    done = cli("repair", run, *options, "--apply", code=code)
    assert before <= contents(run), "something was lost"
    report = ckpttool.verify(run)
    assert [f.id for f in report.findings if f.severity.value == "error"] == []
    assert report.newest_valid == newest
    assert pointer(run) == {"step": newest, "file": name(newest)}
    assert torch.load(run / name(newest), weights_only=True)["step"] == newest
    return done


def contents(run: Path) -> set[str]:
    """Hashes of the contents of all files, set aside or not, but for the books and the pointer."""
    own = ("journal.jsonl", "note.json", ".writer.lock")
    paths = [Path(folder, file) for folder, _, files in os.walk(run) for file in files]
    return {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name not in own and path.is_file() and not path.is_symlink()
    }


def pointer(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "latest.json").read_text())
    return found


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step_*"))


def aside(run: Path) -> list[str]:
    """What lies in quarantine, but for the books."""
    (folder,) = (run / ".quarantine").iterdir()
    return sorted(set(os.listdir(folder)) - {"journal.jsonl", "note.json"})


def goes_aside(run: Path, data: bytes) -> Result:
    """Step 6 is lost with this content: it is kept in quarantine, and training goes on from 4."""
    put(run, 6, data)
    done = repair(run, 4)
    assert steps(run) == [name(2), name(4)]
    (folder,) = (run / ".quarantine").iterdir()
    assert (folder / name(6)).read_bytes() == data
    return done


def comes_back(run: Path, data: bytes) -> Result:
    """Step 6 comes back from this content, byte for byte."""
    put(run, 6, data)
    done = repair(run, 6)
    assert (run / name(6)).read_bytes() == step_bytes(6)
    return done


# ---- A: damaged, or no checkpoint at all


def test_a01_killed_while_saving_in_the_old_format(run: Path, tmp_path: Path) -> None:
    data = corrupt.cut_end(saved(training_state(6), _use_new_zipfile_serialization=False), 8)
    goes_aside(run, data)
    cut = tmp_path / name(6)
    cut.write_bytes(data)
    cli("mend", cut, "-o", tmp_path / "out.pt", code=4)
    cli("mend", cut, "-o", tmp_path / "out.pt", "--allow-loss")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert got["step"] == 6
    assert torch.equal(got["model"]["0.weight"], training_state(6)["model"]["0.weight"])


@pytest.mark.parametrize("kept", [0.6, 0.75])
def test_a02_cut_in_a_copy(kept: float, run: Path, tmp_path: Path) -> None:
    """Every tensor whose record lies before the cut comes back bit for bit."""
    data = corrupt.keep_first(step_bytes(6), int(kept * len(step_bytes(6))))
    goes_aside(run, data)
    cut = tmp_path / name(6)
    cut.write_bytes(data)
    cli("mend", cut, "-o", tmp_path / "out.pt", "--allow-loss")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    for key, tensor in training_state(6)["model"].items():
        assert torch.equal(got["model"][key], tensor)


def test_a02_only_the_end_record_is_gone(run: Path) -> None:
    comes_back(run, corrupt.cut_end(step_bytes(6), 22))


def test_a04_bit_rot(run: Path) -> None:
    place = corrupt.content_range(step_bytes(6), "data/0")
    done = comes_back(run, corrupt.flip_bit(step_bytes(6), place.start + 2))
    assert "model.0.weight[0, 0], float32" in done.output


def test_a05_one_checksum_that_was_not_written(run: Path) -> None:
    """Nothing proves the record then, unless the pointer knows the whole file."""
    data = corrupt.set_crc(step_bytes(6), "data/0", 0)
    goes_aside(run, data)


def test_a06_an_empty_file(run: Path) -> None:
    goes_aside(run, b"")


def test_a08_zeros_after_a_power_loss(run: Path) -> None:
    goes_aside(run, corrupt.zero_tail(step_bytes(6), 6000))


def test_a08_a_whole_file_of_zeros(run: Path) -> None:
    goes_aside(run, corrupt.zeros_like(step_bytes(6)))


def test_a08_of_a_lost_directory_nothing_is_lost(run: Path) -> None:
    """The last block of the file, with nothing in it but the zip's own directory."""
    directory = len(step_bytes(6)) - min(corrupt.entry_offsets(step_bytes(6)).values())
    comes_back(run, corrupt.zero_tail(step_bytes(6), directory))


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n",
        b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>",
        b"\xef\xbb\xbf<html>404</html>",
        b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        b'{"error": "not found"}',
        gzip.compress(b"x" * 1000),
        bytes(4096),
        pickle.dumps({"weights": [1, 2, 3]}),
    ],
    ids=["a09", "a10", "a10-bom", "a10-xml", "a10-json", "a11", "a12", "a18"],
)
def test_a09_to_a18_what_is_no_checkpoint(data: bytes, run: Path) -> None:
    goes_aside(run, data)


def test_a13_saved_twice_to_one_handle(run: Path, tmp_path: Path) -> None:
    """The archive of the step in its name is meant; of a lone file `mend` takes either one."""
    comes_back(run, corrupt.concatenate(step_bytes(4), step_bytes(6)))
    comes_back(run, corrupt.concatenate(step_bytes(6), step_bytes(4)))
    twice = tmp_path / "twice.pt"
    twice.write_bytes(corrupt.concatenate(step_bytes(4), step_bytes(6)))
    for number, step in ((1, 4), (2, 6)):
        out = tmp_path / f"{step}.pt"
        cli("mend", twice, "-o", out, "--archive", number, "--allow-loss")
        assert torch.load(out, weights_only=True)["step"] == step


@pytest.mark.parametrize("count", [2**61, 0])
def test_a14_a_storage_of_wrong_size(count: int, run: Path) -> None:
    data = saved(training_state(6), _use_new_zipfile_serialization=False)
    tensor = training_state(6)["model"]["0.weight"].numpy().tobytes()
    place = data.index(tensor) - 8
    goes_aside(run, corrupt.put_bytes(data, place, count.to_bytes(8, "little")))


def test_a17_cut_at_publication(run: Path) -> None:
    goes_aside(run, corrupt.keep_first(step_bytes(6), 4096))


def test_a19_the_name_says_nothing(tmp_path: Path) -> None:
    place = corrupt.content_range(step_bytes(6), "data/0")
    for wrong in ("model.pth.tar", "model.zip"):
        (tmp_path / wrong).write_bytes(corrupt.flip_bit(step_bytes(6), place.start + 2))
        cli("mend", tmp_path / wrong, "-o", tmp_path / f"{wrong}.pt")
        assert (tmp_path / f"{wrong}.pt").read_bytes() == step_bytes(6)


def test_a22_the_newest_is_damaged(run: Path) -> None:
    """Two of three: training goes on from what is left."""
    put(run, 4, b"")
    put(run, 6, corrupt.keep_first(step_bytes(6), 5000))
    repair(run, 2)
    assert aside(run) == ["latest.json", name(4), name(6)]


def test_a24_a_pickle_cut_at_any_place(run: Path) -> None:
    stream = next(c for full, c in corrupt.read_records(step_bytes(6)) if full.endswith(".pkl"))
    for at in range(1, len(stream), 97):
        put(run, 6, corrupt.replace_record(step_bytes(6), "data.pkl", stream[:at]))
        done = cli("repair", run, code=1)
        assert f"set {name(6)} aside" in done.output


# ---- B: what a writer that died leaves


def test_b01_a_full_disk(run: Path) -> None:
    """Half a temporary, and the pointer still right."""
    (run / f".{name(8)}.tmp-{DEAD}").write_bytes(step_bytes(8)[:3000])
    repair(run, 6)
    assert aside(run) == [f".{name(8)}.tmp-{DEAD}"]


def test_b01_a_full_disk_while_the_pointer_was_written(run: Path) -> None:
    (run / f".latest.json.tmp-{DEAD}").write_bytes(b"")
    put(run, 8, step_bytes(8))
    repair(run, 8)
    assert aside(run) == [f".latest.json.tmp-{DEAD}", "latest.json"]


@pytest.mark.parametrize("percent", [*range(0, 100, 20), 100])
def test_b06_killed_at_any_point_of_a_save(percent: int, run: Path) -> None:
    """A save that was done to the last byte is not thrown away, and half of one never loads."""
    size = len(step_bytes(8)) * percent // 100
    (run / f".{name(8)}.tmp-{DEAD}").write_bytes(step_bytes(8)[:size])
    repair(run, 8 if percent == 100 else 6)


def test_b11_a_rename_that_was_a_copy(run: Path) -> None:
    """On an object store: the temporary whole, the step file half."""
    (run / f".{name(6)}.tmp-{DEAD}").write_bytes(step_bytes(6))
    put(run, 6, step_bytes(6)[:7000])
    repair(run, 6)
    assert (run / name(6)).read_bytes() == step_bytes(6)
    assert aside(run) == [name(6)]


def test_b14_a_file_that_nobody_else_may_read(run: Path) -> None:
    (run / name(4)).chmod(0o600)
    repair(run, 6)
    assert {stat.S_IMODE((run / file).stat().st_mode) for file in steps(run)} == {0o644}


@pytest.mark.parametrize("odd", ["тест_каталог", "a b [1] *", "🙂", "it's $HOME"])
def test_b18_names_of_directories(odd: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / odd)
    put(run, 6, b"")
    repair(run, 4)
    cli("undo", run)
    assert steps(run) == [name(2), name(4), name(6)]


# ---- C: which one is the latest


def test_c01_the_newest_is_not_complete(run: Path) -> None:
    put(run, 8, step_bytes(8)[:6000])
    point(run, 8)
    repair(run, 6)


def test_c02_the_pointer_came_before_the_file(run: Path) -> None:
    point(run, 8)
    repair(run, 6)
    assert aside(run) == ["latest.json"]


def test_c08_stray_names_are_nobodys_business(run: Path) -> None:
    stray = [".DS_Store", "._step_000000000006.pt", "Thumbs.db", "checkpoint-backup", "step_6-hf"]
    for file in stray:
        (run / file).write_text("stray")
    (run / "step_x.pt").mkdir()
    put(run, 6, b"")
    repair(run, 4)
    assert all((run / file).read_text() == "stray" for file in stray)
    assert (run / "step_x.pt").is_dir()


def test_c09_numbers_of_another_width(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step, width in ((20, 6), (100, 7)):
        (run / f"step_{step:0{width}d}.pt").write_bytes(step_bytes(step))
        (run / f"step_{step:0{width}d}.pt").chmod(0o644)
    cli("repair", run, "--apply")
    assert pointer(run) == {"step": 100, "file": "step_0000100.pt"}


@pytest.mark.parametrize("times", [(3, 2, 1), (1, 1, 1), (0, 0, 0)])
def test_c10_times_do_not_order(times: tuple[int, ...], run: Path) -> None:
    (run / "latest.json").unlink()
    for step, moment in zip((2, 4, 6), times, strict=True):
        os.utime(run / name(step), (moment, moment))
    repair(run, 6)


def test_c14_where_there_is_nothing_nothing_is_made(tmp_path: Path) -> None:
    cli("repair", tmp_path, "--apply", code=1)
    assert os.listdir(tmp_path) == []


def test_c14_the_last_step_file_is_never_moved_away(tmp_path: Path) -> None:
    """A trainer that finds no step file begins anew, and says nothing."""
    put(tmp_path, 6, b"")
    cli("repair", tmp_path, "--apply", code=1)
    assert os.listdir(tmp_path) == [name(6)]


def test_c16_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    """Neither a step that is a link, nor the pointer; what they lead to is not touched."""
    elsewhere = make_run(tmp_path / "elsewhere")
    put(elsewhere, 8, step_bytes(8))
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    (run / name(8)).symlink_to(elsewhere / name(8))
    (run / "latest.json").unlink()
    (run / "latest.json").symlink_to(elsewhere / "latest.json")
    repair(run, 6)
    assert not (run / "latest.json").is_symlink()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    cli("undo", run)
    assert os.readlink(run / name(8)) == str(elsewhere / name(8))
    assert os.readlink(run / "latest.json") == str(elsewhere / "latest.json")


def test_c18_a_pointer_that_knows_its_file(run: Path) -> None:
    """The recorded SHA-256 proves what came back, whatever the odds; and it is kept."""
    record = {"size": len(step_bytes(6)), "sha256": hashlib.sha256(step_bytes(6)).hexdigest()}
    content = {"step": 6, "file": name(6), **record}
    (run / "latest.json").write_text(json.dumps(content))
    place = corrupt.content_range(step_bytes(6), "data/0")
    put(run, 6, corrupt.flip_bit(step_bytes(6), place.start + 2))
    cli("repair", run, "--apply", "--bit-odds", 0)
    assert (run / name(6)).read_bytes() == step_bytes(6)
    assert pointer(run) == content


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"4", b"[1]", b"{", b"\xff", b'{"file": ""}', b'{"file": "."}', b"\0" * 49],
)
def test_c_a_pointer_that_cannot_be_read(content: bytes, run: Path) -> None:
    (run / "latest.json").write_bytes(content)
    repair(run, 6)
    assert aside(run) == ["latest.json"]


# ---- D: keeping and moving files


def test_d01_order_is_by_number(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    for step in (9000, 9900, 10000):
        put(run, step, step_bytes(step))
    repair(run, 10000)


@pytest.mark.parametrize("spelling", ["{run}/", "{run}/../run", "{link}", "."])
def test_d03_one_directory_by_many_names(
    spelling: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    monkeypatch.chdir(run)
    put(run, 6, b"")
    cli("repair", spelling.format(run=run, link=link), "--apply")
    assert pointer(run)["step"] == 4
    assert aside(run) == ["latest.json", name(6)]


def test_d06_several_nodes_repair_at_once(run: Path) -> None:
    """One of them does it; the others are refused, or find nothing left to do."""
    from ckpttool.actions.repair.deeds import Options
    from ckpttool.actions.repair.run import Repair
    from ckpttool.errors import RefusedError

    put(run, 6, b"")
    outcomes: list[str] = []

    def one() -> None:
        try:
            repair = Repair(str(run), Options())
            repair.make_plan()
            barrier.wait()
            repair.carry_out()
            outcomes.append("done")
        except RefusedError:
            outcomes.append("refused")

    barrier = threading.Barrier(4)
    nodes = [threading.Thread(target=one) for _ in range(4)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert sorted(outcomes) == ["done", "refused", "refused", "refused"]
    assert steps(run) == [name(2), name(4)]
    assert aside(run) == ["latest.json", name(6)]


def test_d08_what_was_missing_lay_in_a_leftover(run: Path) -> None:
    (run / name(6)).unlink()
    (run / f".{name(6)}.tmp-{DEAD}").write_bytes(step_bytes(6))
    repair(run, 6)
    assert (run / name(6)).read_bytes() == step_bytes(6)


def test_d10_nothing_outside_is_touched(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.pt"
    outside.write_bytes(b"precious")
    (run / "latest.json").write_text(json.dumps({"step": 6, "file": "../outside.pt"}))
    (run / name(7)).symlink_to("../outside.pt")
    repair(run, 6)
    assert outside.read_bytes() == b"precious"


def test_e03_two_operations_within_one_second(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a folder of its own, and they are taken back one by one, the newest first."""
    moment = time.gmtime(1_800_000_000)
    monkeypatch.setattr(time, "gmtime", lambda seconds=None: moment)
    before = contents(run)
    for step in (4, 2):
        cli("rollback", run, "--to", step)
        assert pointer(run)["step"] == step
    stem = "20270115T080000Z"
    assert sorted(path.name for path in (run / ".quarantine").iterdir()) == [stem, f"{stem}-2"]
    assert before <= contents(run)
    for step in (4, 6):
        cli("undo", run)
        assert pointer(run)["step"] == step
    assert steps(run) == [name(2), name(4), name(6)]


# ---- G: size, layout, portability


def test_g01_a_view_that_stores_the_whole(tmp_path: Path) -> None:
    big = torch.arange(10**5, dtype=torch.float32)
    torch.save({"view": big[:10]}, tmp_path / "in.pt")
    cli("slim", tmp_path / "in.pt", "-o", tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size < 4096
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["view"], big[:10])


def test_g02_what_is_shared_stays_shared_and_what_is_not_does_not(tmp_path: Path) -> None:
    big = torch.arange(1000, dtype=torch.float32)
    tied = torch.ones(50)
    state = {"a": big[:10], "b": big[500:510], "c": big[5:15], "tied": tied, "head": tied}
    torch.save({**state, "none": torch.empty(0)}, tmp_path / "in.pt")
    cli("slim", tmp_path / "in.pt", "-o", tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(got[key], value) for key, value in state.items())
    got["tied"][0] = 7
    got["a"][7] = 9
    assert (got["head"][0], got["c"][2]) == (7, 9)
    assert got["b"].untyped_storage().data_ptr() != got["a"].untyped_storage().data_ptr()


@pytest.mark.parametrize("deflate", [True, False], ids=["g05-deflated", "g06-zipped-again"])
def test_g05_g06_zipped_again_by_another_tool(deflate: bool, tmp_path: Path) -> None:
    """What comes out is laid out as torch does it: stored, aligned, to be mapped."""
    source = tmp_path / "in.pt"
    data = corrupt.rezip(step_bytes(6), deflate=deflate, root="unpacked")
    source.write_bytes(corrupt.add_member(data, "__MACOSX/unpacked/._data.pkl", b"mac"))
    cli("slim", source, "-o", tmp_path / "out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.testzip() is None
    got = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert torch.equal(got["model"]["0.weight"], training_state(6)["model"]["0.weight"])


@pytest.mark.parametrize("header", [2, 2**40])
def test_g07_safetensors_under_another_name(header: int, run: Path) -> None:
    goes_aside(run, header.to_bytes(8, "little") + b"{}" + bytes(100))


def test_g08_torchscript_is_no_training_checkpoint(run: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps({}, 2))
        archive.writestr("m/constants.pkl", pickle.dumps((), 2))
        archive.writestr("m/code/__torch__.py", "def forward(self): pass\n")
    goes_aside(run, buffer.getvalue())


def test_g09_a_numpy_scalar_in_the_optimizer(tmp_path: Path) -> None:
    state = training_state(6)
    state["optimizer"]["param_groups"][0]["lr"] = np.float64(0.25)
    torch.save(state, tmp_path / "in.pt")
    cli("harden", tmp_path / "in.pt", "-o", tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    rate = got["optimizer"]["param_groups"][0]["lr"]
    assert (type(rate), rate) == (float, 0.25)
