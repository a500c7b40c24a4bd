"""`fit(resume=...)`: never from zero in silence, and always said from where."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.corrupt import flip_bit
from trainer_core import CheckpointError, CheckpointManager, CheckpointWarning, Trainer

CKPTTOOL = [sys.executable, "-m", "ckpttool"]


def trainer(directory: Path | None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    manager = None if directory is None else CheckpointManager(directory, every_steps=2)
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [torch.ones(3, 2)],
        device="cpu",
        loss_fn=lambda model, batch: model(batch).square().sum(),
        checkpoint_manager=manager,
        **options,
    )


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(flip_bit(data, 8 * data.index(b"ar")))


def test_auto_begins_goes_on_and_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        trainer(tmp_path).fit(4, resume="auto")
    assert f"fresh start: there is no checkpoint in {tmp_path}" in caplog.text
    caplog.clear()
    again = trainer(tmp_path)
    with caplog.at_level(logging.INFO):
        result = again.fit(6, resume="auto")
    assert f"resuming from {tmp_path / 'step_000000000004.pt'}" in caplog.text
    assert [record["step"] for record in result.metrics] == [5, 6]


def test_auto_with_nothing_left_to_do(tmp_path: Path) -> None:
    trainer(tmp_path).fit(4)
    result = trainer(tmp_path).fit(4, resume="auto")
    assert (result.steps, result.metrics) == (4, [])


def test_auto_passes_over_a_damaged_file_and_says_so(tmp_path: Path) -> None:
    trainer(tmp_path).fit(4)
    damage(tmp_path / "step_000000000004.pt")
    with pytest.warns(CheckpointWarning, match="Loading step_000000000002"):
        result = trainer(tmp_path).fit(6, resume="auto")
    assert result.metrics[0]["step"] == 3


@pytest.mark.parametrize("way", ["auto", "must"])
def test_files_of_which_none_is_valid_stop_it(way: str, tmp_path: Path) -> None:
    trainer(tmp_path).fit(2)
    damage(tmp_path / "step_000000000002.pt")
    before = sorted(path.name for path in tmp_path.iterdir())
    one = trainer(tmp_path)
    with pytest.raises(CheckpointError, match="No valid step is left"):
        one.fit(4, resume=way)
    assert one.step == 0 and sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("way", ["auto", "must"])
def test_traces_of_a_run_stop_it(way: str, tmp_path: Path) -> None:
    pointer = {"step": 4, "file": "step_000000000004.pt"}
    (tmp_path / "latest.json").write_text(json.dumps(pointer))
    with pytest.raises(CheckpointError, match=r"and yet latest\.json is there"):
        trainer(tmp_path).fit(4, resume=way)
    (tmp_path / "latest.json").unlink()
    (tmp_path / "step_000000000002.pt").symlink_to("elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"step_000000000002\.pt is there, which is no reg"):
        trainer(tmp_path).fit(4, resume=way)


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="resume='must' says that there is one"):
            trainer(directory).fit(4, resume="must")
    trainer(tmp_path).fit(2)
    assert trainer(tmp_path).fit(4, resume="must").metrics[0]["step"] == 3


def test_never_begins_anew(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the manager may say that the directory is another run's
        trainer(tmp_path).fit(2)
        one = trainer(tmp_path / "other")
        assert one.fit(2, resume="never").metrics[0]["step"] == 1


def test_a_trainer_that_has_begun_goes_on_from_where_it_is(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.fit(3, resume="auto")  # its last checkpoint is of step 2
    assert one.fit(4, resume="auto").metrics[0]["step"] == 4
    other = trainer(tmp_path)
    state = other.checkpoint_manager.load_latest()  # type: ignore[union-attr]
    other.resume(state)  # type: ignore[arg-type]
    assert other.fit(5, resume="must").metrics[0]["step"] == 5


def test_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'never', 'auto', 'must', not 'yes'"):
        trainer(tmp_path).fit(2, resume="yes")
    with pytest.raises(ValueError, match="resume='auto' needs a checkpoint_manager"):
        trainer(None).fit(2, resume="auto")


def test_what_may_differ_is_passed_on(tmp_path: Path) -> None:
    trainer(tmp_path).fit(2)
    one = trainer(tmp_path)
    one.optimizer = torch.optim.Adam(one.model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError, match="another kind of optimizer"):
            one.fit(4, resume="auto")
        one.fit(4, resume="auto", allow_partial=("optimizer",))
    assert "optimizer: not restored, as allowed" in str(caught[-1].message)
    assert one.step == 4


def test_where_logging_is_not_configured_it_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("nobody.listens")
    logger.propagate = False
    trainer(tmp_path, logger=logger).fit(2, resume="auto")
    assert capsys.readouterr().err.startswith("fresh start: there is no checkpoint in ")


# A pointer that is behind


def behind(directory: Path, *, before: bool = True) -> bytes:
    """Steps 2, 4 and 6, and the pointer as it was after step 2 and before step 4 was there."""
    trainer(directory).fit(2)
    pointer = directory / "latest.json"
    content, times = pointer.read_bytes(), pointer.stat()
    trainer(directory).fit(6, resume="must")
    pointer.write_bytes(content)
    if before:
        os.utime(pointer, ns=(times.st_atime_ns, times.st_mtime_ns))
    return content


def resumed_at(directory: Path, way: str = "auto") -> int:
    """The step after which a run goes on."""
    one = trainer(directory)
    one.fit(7, resume=way)
    return int(one._resumed_at or 0)


def test_a_crash_before_the_pointer_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind(tmp_path)
    assert resumed_at(tmp_path, "must") == 6
    (line,) = [one.getMessage() for one in caplog.records if "going on from" in one.getMessage()]
    assert line == (
        f"{tmp_path}: going on from step_000000000006.pt, saved by the same run after "
        f"{tmp_path / 'latest.json'} was written (step 2)"
    )


def test_without_lines_in_the_manifest_too(tmp_path: Path) -> None:
    behind(tmp_path)
    (tmp_path / "manifest.jsonl").unlink()
    assert resumed_at(tmp_path) == 6


def test_by_itself_loading_goes_by_the_pointer(tmp_path: Path) -> None:
    behind(tmp_path)
    manager = CheckpointManager(tmp_path)
    assert manager.load_latest()["step"] == 2  # type: ignore[index]
    assert manager.load_latest(unpointed=True)["step"] == 6  # type: ignore[index]


def test_a_newer_step_that_is_damaged_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind(tmp_path)
    damage(tmp_path / "step_000000000006.pt")
    assert resumed_at(tmp_path) == 4
    assert "it is newer than the pointer's step, and not used" in caplog.text


def by_hand(where: Path) -> None:
    """Its time says nothing: no trainer writes such a content."""
    (where / "latest.json").write_text('{"step": 2, "file": "step_000000000002.pt"}')
    os.utime(where / "latest.json", ns=(0, 0))


def by_fix_pointer(where: Path) -> None:
    """Its time says nothing here, either."""
    CheckpointManager(where).point_to(6)
    subprocess.run([*CKPTTOOL, "fix-pointer", where, "--step", "2"], check=True)
    os.utime(where / "latest.json", ns=(0, 0))


@pytest.mark.parametrize(
    "move",
    [
        lambda where: None,  # a copy of the older one, written when step 6 was there
        lambda where: CheckpointManager(where).point_to(2),
        by_hand,
        by_fix_pointer,
        lambda where: subprocess.run([*CKPTTOOL, "rollback", where, "--to", "2"], check=True),
    ],
)
def test_a_pointer_that_was_moved_back_is_obeyed(move: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    behind(tmp_path / "run", before=False)
    move(tmp_path / "run")
    assert resumed_at(tmp_path / "run") == 2


def test_a_step_whose_past_is_gone_is_not_taken(tmp_path: Path) -> None:
    behind(tmp_path)
    (tmp_path / "step_000000000004.pt").unlink()
    assert resumed_at(tmp_path) == 2


def test_a_course_that_was_given_up_stays_so(tmp_path: Path) -> None:
    """Back at 2 on purpose, on to 4 anew: the old 6 names 4 as its parent, and is not meant."""
    behind(tmp_path, before=False)
    again = trainer(tmp_path)
    again.fit(4, resume="auto")
    pointer = tmp_path / "latest.json"
    assert json.loads(pointer.read_text())["step"] == 4
    assert resumed_at(tmp_path) == 4


def test_another_runs_steps_are_left_alone(tmp_path: Path) -> None:
    trainer(tmp_path / "other").fit(4)
    trainer(tmp_path / "own").fit(2)
    (tmp_path / "other/step_000000000004.pt").rename(tmp_path / "own/step_000000000004.pt")
    assert resumed_at(tmp_path / "own") == 2
