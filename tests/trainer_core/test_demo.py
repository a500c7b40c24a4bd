"""The demo from outside: what it leaves on disk, how it ends, and that it goes on bit for bit."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import trainer_core
from tests.corrupt import cut_end
from tests.torch_process import TorchProcesses
from trainer_core.demo.__main__ import curve, main
from trainer_core.demo.model import CharTransformer
from trainer_core.demo.text import VOCABULARY, Crops, encode, own_text

ROOT = Path(trainer_core.__file__).parents[1]
DEMO = [sys.executable, "-m", "trainer_core.demo"]
SHORT = ["--steps", "10", "--every", "3"]


Demo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def demo(torch_processes: TorchProcesses) -> Demo:
    def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = torch_processes.run(*DEMO[1:], *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def crc(done: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"weights: crc32 ([0-9a-f]{8})", done.stdout)
    assert found
    return found[1]


def pointer(directory: Path) -> object:
    content = json.loads((directory / "latest.json").read_text())
    return {key: content[key] for key in ("step", "file")}


class Runs(NamedTuple):
    whole: subprocess.CompletedProcess[str]
    died: subprocess.CompletedProcess[str]
    directory: Path  # as the death left it


@pytest.fixture(scope="module")
def runs(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    home = tmp_path_factory.mktemp("runs")
    whole = demo(home / "whole", *SHORT)
    died = demo(home / "died", *SHORT, "--crash-after-save", "6", code=-signal.SIGKILL)
    return Runs(whole, died, home / "died")


@pytest.fixture
def died(runs: Runs, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs.directory, tmp_path / "died"))


def test_the_loss_falls_and_the_end_is_readable(runs: Runs) -> None:
    first, last = re.search(r"loss: (\S+) \S+ (\S+)\n", runs.whole.stdout).groups()  # type: ignore[union-attr]
    assert 4 < float(first) < 5.5 and float(last) < float(first) - 0.3
    assert "done: step 10, 160 samples and 10,240 characters seen" in runs.whole.stdout
    assert runs.whole.stdout.rstrip().endswith("step_000000000009.pt")
    lines = runs.whole.stderr.splitlines()
    assert len(lines) == 10 and all(re.match(r"step \d+/10  loss \d", line) for line in lines)


def test_it_dies_between_the_file_and_the_pointer(runs: Runs) -> None:
    assert sorted(os.listdir(runs.directory)) == [
        *(".writer.lock", "latest.json", "manifest.jsonl"),
        *("step_000000000003.pt", "step_000000000006.pt"),
    ]
    assert pointer(runs.directory) == {"step": 3, "file": "step_000000000003.pt"}
    state = torch.load(runs.directory / "step_000000000006.pt", weights_only=True)
    assert state["step"] == 6
    assert runs.died.stdout.rstrip().endswith("latest.json does not name it yet")


def test_it_goes_on_from_the_newest_valid_file_as_if_nothing_had_happened(
    runs: Runs, demo: Demo, died: Path
) -> None:
    done = demo(died, *SHORT, "--resume")
    assert f"resuming from {died / 'step_000000000006.pt'}" in done.stdout
    assert "though latest.json names step_000000000003.pt" in done.stdout
    assert crc(done) == crc(runs.whole)
    assert pointer(died) == {"step": 9, "file": "step_000000000009.pt"}
    lines = done.stderr.splitlines()
    assert "took over the lock of a writer that is gone" in lines[0]
    assert lines[1].startswith("step 7/10 ")


def test_a_damaged_newest_file_is_passed_over(runs: Runs, demo: Demo, died: Path) -> None:
    newest = died / "step_000000000006.pt"
    newest.write_bytes(cut_end(newest.read_bytes(), 1000))
    done = demo(died, *SHORT, "--resume")
    assert f"resuming from {died / 'step_000000000003.pt'}" in done.stdout
    assert "step_000000000006.pt is not valid" in done.stderr
    assert crc(done) == crc(runs.whole)


def test_with_no_valid_file_left_it_says_what_to_do(demo: Demo, died: Path) -> None:
    for path in died.glob("*.pt"):
        path.write_bytes(cut_end(path.read_bytes(), 1000))
    done = demo(died, *SHORT, "--resume", code=1)
    assert f"`ckpttool verify {died}`" in done.stderr.splitlines()[-1]
    assert len(list(died.glob("*.pt"))) == 2


def test_another_seed_on_resume_is_told_in_a_line(demo: Demo, died: Path) -> None:
    done = demo(died, *SHORT, "--resume", "--seed", "5")
    assert "config.training.seed: 0 was saved, it is 5 here" in done.stderr
    assert "warnings.warn" not in done.stderr


# The rest in this process: it is quicker, and the command is the same


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int) -> tuple[str, str]:
    assert main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_it_does_not_write_over_another_run(died: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, died, *SHORT, code=4)
    assert err == (
        f"demo: {died} holds checkpoints already: add --resume to go on from them, "
        "or choose another directory\n"
    )


def test_resuming_at_the_end_does_nothing(died: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, died, "--steps", "6", "--every", "3", "--resume", code=0)
    assert out.endswith("step 6 of 6 is done already: nothing to do\n")


def test_resuming_from_nothing_is_a_fresh_start_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = said(capsys, tmp_path / "new", "--steps", "1", "--resume", code=0)
    assert "so this is a fresh start" in out and "newest checkpoint" not in out


@pytest.mark.parametrize("crash", ["3", "500"])
def test_a_death_that_would_never_come_is_refused(
    tmp_path: Path, crash: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--crash-after-save", crash])
    assert stop.value.code == 2
    assert f"step {crash} is never saved" in capsys.readouterr().err


def test_a_death_in_the_past_is_refused(died: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, died, *SHORT, "--resume", "--crash-after-save", "6", code=2)
    assert err == "demo: --crash-after-save 6: step 6 is done already\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--steps", "-3"],
        ["--steps", "1e3"],
        ["--every", "x"],
        ["--seed", "9" * 40],
        ["--device", "toaster"],
        ["--device", "meta"],
    ],
)
def test_wrong_values_are_refused_in_words(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), *arguments])
    assert stop.value.code == 2
    assert f"argument {arguments[0]}: " in capsys.readouterr().err.splitlines()[-1]


def test_a_place_that_cannot_be_written_is_told_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        out, err = said(capsys, place, *SHORT, code=3)
        assert out == "" and err.startswith("demo: ") and str(place) in err
        assert err.count("\n") == 1


def test_an_interrupt_ends_it_in_one_line(tmp_path: Path) -> None:
    command = [*DEMO, str(tmp_path), "--steps", "100000"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("step 1/"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        last = process.stderr.read().splitlines()[-1]
    found = re.fullmatch(r"demo: signal SIGINT: step (\d+) is saved, and --resume .*", last)
    assert found, last
    assert process.returncode == 130
    assert (tmp_path / f"step_{int(found[1]):012d}.pt").exists()


def test_without_torch_there_is_one_line_that_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('not here', name='torch')")
    done = subprocess.run(
        [*DEMO, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""},
    )
    assert done.returncode == 1
    assert "pip install 'ckpttool[train]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", [0, 100])
def test_on_a_terminal_a_bar_shows_the_way(tmp_path: Path, columns: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(
        theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30 if columns else 0, columns, 0, 0)
    )
    process = subprocess.Popen(
        [*DEMO, str(tmp_path), *SHORT], stdout=subprocess.DEVNULL, stderr=theirs, cwd=ROOT
    )
    os.close(theirs)
    screen = b""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            screen += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0
    assert b"10/10" in screen and b"steps/s" in screen and b"loss " in screen


# The parts


def test_text_comes_from_the_sources_where_there_is_no_working_tree(tmp_path: Path) -> None:
    for name in ("trainer_core", "ckpttool"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text("of somebody else")
    installed, tree = own_text(tmp_path), own_text()
    assert 0 < installed.files <= tree.files
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "CHANGELOG.md").write_text("one")
    assert own_text(tmp_path).files == installed.files + 2
    assert len(installed.characters) > 100_000
    assert installed.characters.min() >= 0 and installed.characters.max() < VOCABULARY


def test_characters_become_numbers() -> None:
    assert encode("a\n \t~?é").tolist() == [97 - 31, 0, 1, 1, 95, 63 - 31, 63 - 31]


def test_crops_are_the_text_and_its_next_characters() -> None:
    torch.manual_seed(0)
    inputs, targets = next(iter(Crops(torch.arange(50), batch=8, positions=5)))
    assert inputs.shape == targets.shape == (8, 5)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(5))
    assert len(set(inputs[:, 0].tolist())) > 1
    with pytest.raises(ValueError, match="too short"):
        Crops(torch.arange(5), batch=1, positions=5)


def test_the_model_sees_no_later_character() -> None:
    torch.manual_seed(0)
    model = CharTransformer(VOCABULARY, 8, width=16, layers=2, heads=2)
    ids = torch.randint(VOCABULARY, (1, 8))
    other = ids.clone()
    other[0, 5] = (ids[0, 5] + 1) % VOCABULARY
    targets = torch.full((1, 8), 3)
    outputs = []
    model.output.register_forward_hook(lambda module, given, out: outputs.append(out))
    model(ids, targets)
    model(other, targets)
    assert torch.equal(outputs[0][:, :5], outputs[1][:, :5])
    assert not torch.equal(outputs[0][:, 5:], outputs[1][:, 5:])


def test_the_curve_has_its_highest_bar_where_the_loss_is() -> None:
    assert curve([3.0, 1.0, 2.0]) in ("█▁▅", "@_=")
    assert len(curve([float(i) for i in range(1000)])) == 40
    assert curve([2.0]) in ("▁", "_")
