"""`inspect`: what is shown of directories and files, as text and as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpttool.cli.main import main
from ckpttool.io.lock import WriterLock
from tests.ckpttool.cli.support import (
    CORPUS,
    ROOT,
    ckpttool,
    ckpttool_json,
    cut,
    make_run,
    write_step,
)

PENDING = CORPUS / "seed-runs" / "pending"
STEP_6 = PENDING / "step_000000000006.pt"


def facts_of(text: str) -> dict[str, str]:
    """The labelled lines of a page; of two with the same label the first."""
    lines = (re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines())
    return dict(reversed([(p[0], p[1]) for p in lines if len(p) == 2]))


# Directories


def test_directory(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6, pointer=4)
    cut(tmp_path / "step_000000000006.pt")
    (tmp_path / ".step_000000000008.pt.tmp-1").touch()
    (tmp_path / "notes.txt").touch()
    done = ckpttool("inspect", tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines[3:6]]
    assert [(row[0], row[3]) for row in rows] == [("2", "valid"), ("4", "valid"), ("6", "damaged")]
    assert rows[1][-4:] == ["fp32", "32", "256", "weights_only=True"]
    assert "latest.json names step 4, step_000000000004.pt" in lines
    assert "1 leftover of a writer: .step_000000000008.pt.tmp-1" in lines
    assert "1 other file: notes.txt" in lines
    assert f"  run: ckpttool verify {tmp_path}" in lines


def test_directory_shows_who_writes_and_what_can_be_taken_back(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4)
    (run / "manifest.jsonl").touch()
    document = ckpttool_json("inspect", run)
    assert (document["lock"], document["operations"]) == (None, [])
    assert ckpttool("rollback", run, "--to", "2").returncode == 0
    with WriterLock.acquire(run, program="trainer\x1b[31m", run_id="r1"):
        lines = ckpttool("inspect", run).stdout.splitlines()
        (lock,) = (line for line in lines if line.startswith("lock: "))
        assert lock.startswith(f"lock: held by pid {os.getpid()} on ")
        assert "(trainer\\x1b[31m), since 20" in lock
        told = "set aside by 1 operation: `ckpttool history` lists what can be taken back"
        assert lines[lines.index(lock) + 1 :] == [told]
        document = ckpttool_json("inspect", run)
        assert (document["lock"]["state"], document["lock"]["run_id"]) == ("held", "r1")
        assert [one["state"] for one in document["operations"]] == ["finished"]
        path = run / ".writer.lock"
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1}))
        assert "which has ended" in ckpttool("inspect", run).stdout


def test_real_directory() -> None:
    done = ckpttool("inspect", PENDING)
    assert done.returncode == 0
    row = done.stdout.splitlines()[5].split("  ")
    # 12 model tensors in float32: 15,680 bytes; the coordinator holds three times as many.
    assert [cell.strip() for cell in row if cell] == [
        "6",
        "101.3 KiB",
        "valid",
        "15.3 KiB",
        "8.4 KiB",
        "45.9 KiB",
        "fp32",
        "12",
        "192",
        "allow-list",
    ]


def test_directory_json() -> None:
    document = ckpttool_json("inspect", PENDING)
    assert [step["step"] for step in document["steps"]] == [2, 4, 6]
    step = document["steps"][2]
    assert (step["state"], step["load_need"], step["samples"]) == ("valid", "allow-list", 12)
    assert step["sections"]["coordinator"] == {"type": "dict", "tensors": 36, "nbytes": 47040}
    assert document["pointer"]["step"] == 6
    assert document["others"] == []


@pytest.mark.parametrize("names", [[], ["notes.txt"]])
def test_directory_without_steps(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    done = ckpttool("inspect", cwd=tmp_path)
    assert "no step files" in done.stdout
    assert "there is no latest.json" in done.stdout


def test_lists_want_a_file(tmp_path: Path) -> None:
    for option in ("--tensors", "--tree", "--records", "--globals"):
        assert ckpttool("inspect", tmp_path, option).returncode == 2


def test_odd_entries_are_not_opened(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    os.mkfifo(tmp_path / "step_000000000004.pt")
    (tmp_path / "step_000000000006.pt").symlink_to("/dev/zero")
    (tmp_path / "step_000000000008.pt").mkdir()
    done = ckpttool("inspect", tmp_path)
    assert done.stdout.count("not-opened") == 3


def on_terminal(columns: int, *arguments: str | Path, **env: str) -> str:
    """What the command shows on a terminal this wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpttool", *arguments],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**clean, "TERM": "xterm", **env},
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 65536)
        except OSError:
            break
    process.wait(30)
    os.close(master)
    return shown.decode()


def test_terminal_width_and_colour() -> None:
    plain = re.compile(r"\x1b\[[0-9;]*m")
    for width in (80, 100):
        for path in (CORPUS / "seed-runs" / "plain", STEP_6):
            shown = on_terminal(width, "inspect", path)
            assert "\x1b[" in shown
            long = [li for li in plain.sub("", shown).split("\r\n") if len(li) > width]
            # A path, or a text without blanks, is never broken.
            assert [line for line in long if len(line.split()) > 2] == []
    assert "\x1b[" not in on_terminal(80, "inspect", STEP_6, NO_COLOR="1")
    narrow = on_terminal(60, "inspect", STEP_6, "--tensors", NO_COLOR="1").split("\r\n")
    assert max(map(len, narrow)) <= 60
    assert any("…" in line for line in narrow)
    assert "…" not in ckpttool("inspect", STEP_6, "--tensors").stdout


# Files


def test_file_page() -> None:
    done = ckpttool("inspect", STEP_6)
    assert done.returncode == 0
    facts = facts_of(done.stdout)
    assert facts["kind"].startswith("a training checkpoint: a torch file")
    assert facts["size"] == "103,691 bytes (101.3 KiB)"
    assert facts["format"] == "new zip format: torch 1.6 or newer reads it"
    assert "root folder .step_000000000006.pt/" in facts["container"]
    assert facts["tensors"] == "61 tensors in 60 storages; 70.6 KiB stored, 70.6 KiB used"
    assert "numpy._core.multiarray._reconstruct" in facts["load"]
    assert "weights_only=False runs code that the file chooses" in facts["load"]
    assert facts["counters"] == "step 6, 12 samples, 192 tokens"
    assert facts["precision"] == "fp32, autocast off, no scaler"
    assert facts["optimizer"].startswith("AdamW, 1 group, 4 parameters")
    assert facts["scheduler"].startswith("LambdaLR, step 6")
    assert facts["rng"] == "python, numpy, torch"
    assert facts["role"] == "worker, node w2"
    assert facts["steps"] == "local 6, global -1"
    pending = "step 2 on outer step -1, generation 0, 30.6 KiB"
    assert facts["pending upload"] == f"{pending} (delta 15.3 KiB, target_state 15.3 KiB)"
    assert facts["boundaries"] == "last dispatched 2, last skipped 6"
    assert facts["outer state"] == "none"
    assert "  coordinator  dict              36  45.9 KiB" in done.stdout.splitlines()
    assert facts["benign"].startswith("numpy.dtype")


def test_load_words() -> None:
    plain = facts_of(ckpttool("inspect", CORPUS / "torch-2.13.0" / "ckpt_nanogpt.pt").stdout)
    assert plain["load"] == "torch.load(weights_only=True), the default since torch 2.6, takes it"
    whole = ckpttool("inspect", CORPUS / "torch-2.13.0" / "py_objects.pt").stdout
    assert "refuses it (__main__.DC" in facts_of(whole)["load"]
    legacy = facts_of(ckpttool("inspect", CORPUS / "torch-1.6.0" / "train_legacy.pt").stdout)
    assert legacy["format"].startswith("legacy stream of torch before 1.6")


def test_stored_against_used() -> None:
    path = CORPUS / "torch-2.13.0" / "small_view_of_big_storage.pt"
    facts = facts_of(ckpttool("inspect", path).stdout)
    assert "78.1 KiB stored, 12 B used" in facts["tensors"]


def test_secrets_in_a_config_are_not_shown(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "a.pt"
    content = {"step": 1, "config": {"api_key": "hush-1234", "deep": {"password": "hush"}, "n": 1}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(content, 2))
        archive.writestr("a/version", "3\n")
    shown = ckpttool("inspect", path).stdout
    assert "hush" not in shown
    assert '"api_key": "(hidden)", "deep": {"password": "(hidden)"}, "n": 1' in shown


def test_a_page_stays_short_whatever_the_file_holds(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "a.pt"
    content = {f"k{n}": n for n in range(5000)} | {"step": 1, "config": [*range(100_000)]}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(content, 2))
        archive.writestr("a/version", "3\n")
    shown = ckpttool("inspect", path).stdout
    assert len(shown) < 10_000
    assert "and 4,962 more (--tensors and --tree show all)" in shown
    assert "… (--tree shows all)" in shown


def test_tensors() -> None:
    lines = ckpttool("inspect", STEP_6, "--tensors").stdout.splitlines()
    assert len(lines) == 62
    assert lines[0].split() == ["name", "dtype", "shape", "device", "storage", "bytes"]
    first = lines[1].split()
    assert first[:2] == ["model.transformer.wte.weight", "float32"]
    assert "[64, 16]" in lines[1]
    assert lines[1].endswith("4.0 KiB")
    some = ckpttool("inspect", "--tensors", "optimizer.*exp_avg", STEP_6).stdout.splitlines()
    assert [line.split()[0] for line in some[1:]] == [
        f"optimizer.state.{n}.exp_avg" for n in range(4)
    ]
    assert ckpttool("inspect", "--tensors", STEP_6).stdout.splitlines() == lines
    assert len(ckpttool("inspect", STEP_6, "--tensors", "nothing").stdout.splitlines()) == 1


def test_records_and_globals() -> None:
    with zipfile.ZipFile(STEP_6) as archive:
        expected = {
            (info.filename.partition("/")[2], f"{info.file_size:,}", f"{info.CRC:08x}")
            for info in archive.infolist()
        }
    lines = ckpttool("inspect", STEP_6, "--records").stdout.splitlines()
    assert {(r[0], r[1], r[3]) for r in map(str.split, lines[1:])} == expected
    lines = ckpttool("inspect", STEP_6, "--globals").stdout.splitlines()
    assert ["benign", "numpy.ndarray"] in [line.split()[:2] for line in lines]


def test_tree() -> None:
    lines = ckpttool("inspect", STEP_6, "--tree").stdout.splitlines()
    assert "  step: 6" in lines
    assert "    transformer.wte.weight: tensor float32 [64, 16]" in lines


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("torch-2.13.0/hf_trainer/checkpoint-10/model.safetensors", "safetensors", 1),
        ("torch-2.13.0/truncated_zip.pt", "truncated", 1),
        ("torch-2.13.0/scripted_ts.pt", "TorchScript", 0),
        ("torch-2.13.0/plain_pickle.pkl", "pickle", 1),
        ("README.md", "text", 1),
    ],
)
def test_kinds(name: str, words: str, code: int) -> None:
    done = ckpttool("inspect", CORPUS / name)
    assert done.returncode == code
    assert words in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\0" * 4096, "zero"),
        (b"<!doctype html><title>Sign \x1b[31min</title>", "HTML"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 5\n",
            "LFS",
        ),
        (b"\x1f\x8b\x08" + b"\0" * 50, "gzip"),
        (b"\x80\x02]\x94g0\na.", "pickle"),
        (b"\xffnoise\x1b]0;title\x07" * 9, "no format"),
        (b"PK\x03\x04" + b"\xff" * 200, "zip"),
    ],
)
def test_anything_is_named_or_at_least_survived(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "step_000000000002.pt"
    path.write_bytes(content)
    for option in ([], ["--tree"], ["--tensors"], ["--records"], ["--globals"], ["--json"]):
        done = ckpttool("inspect", path, *option)
        assert done.returncode == 1, done.stderr
        assert done.stderr == ""
        assert "\x1b" not in done.stdout
    assert words.lower() in ckpttool("inspect", path).stdout.lower()


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, reason in ((tmp_path / "fifo", "named pipe"), (Path("/dev/null"), "device")):
        done = ckpttool("inspect", path)
        assert done.returncode == 3
        assert reason in done.stderr
    assert ckpttool("inspect", "").returncode == 2
    assert ckpttool("inspect", "a\nb").returncode == 3


# JSON of a file


def test_file_json_has_the_apis_names() -> None:
    document = ckpttool_json("inspect", STEP_6)
    assert document["kind"] == "torch-zip"
    assert document["training"]["coordinator"]["pending_upload"]["step"] == 2
    assert document["sections"]["model"] == {"type": "OrderedDict", "tensors": 12, "nbytes": 15680}
    assert {use["trust"] for use in document["globals"]} == {"benign", "torch-safe"}
    assert len(document["tensors"]) == 61
    tensor = document["tensors"][0]
    assert tensor["name"] == "model.transformer.wte.weight"
    assert (tensor["dtype"], tensor["shape"], tensor["stride"]) == ("float32", [64, 16], [16, 1])
    assert (tensor["device"], tensor["nbytes"]) == ("cpu", 4096)
    tree = document["tree"]
    assert tree["step"] == 6
    assert tree["model"]["transformer.wte.weight"] == {"$tensor": tensor["name"]}
    assert tree["optimizer"]["state"]["0"]["exp_avg"]["$tensor"] == "optimizer.state.0.exp_avg"


def referred(value: Any) -> set[str]:
    if isinstance(value, dict):
        if list(value) == ["$tensor"]:
            return {value["$tensor"]}
        return set().union(*map(referred, value.values()), set())
    return set().union(*map(referred, value), set()) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    "path",
    sorted(p for p in CORPUS.rglob("*") if p.suffix in (".pt", ".pth", ".pkl", ".ckpt", ".bin")),
    ids=lambda path: str(path.relative_to(CORPUS)),
)
def test_json_of_the_corpus(path: Path) -> None:
    """Valid JSON without NaN, and the tree refers to every listed tensor and to no other."""
    done = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    document = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    listed = {tensor["name"] for tensor in document["tensors"]}
    found = referred(document["tree"])
    assert found == listed


def test_listed_tensors_can_be_chosen_in_json() -> None:
    document = ckpttool_json("inspect", STEP_6, "--tensors", "model.*", "--records")
    assert len(document["tensors"]) == 12
    assert len(document["records"]) == 66


def test_json_of_hostile_names(tmp_path: Path) -> None:
    path = write_step(tmp_path, 2)
    data = path.read_bytes()
    assert b"samples" in data
    path.write_bytes(data.replace(b"samples", b"\x1b[2J\xe2\x80"))
    done = ckpttool("inspect", path, "--json")
    assert "\x1b" not in done.stdout
    json.loads(done.stdout)
