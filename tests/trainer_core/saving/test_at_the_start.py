"""A directory that could take no checkpoint is found out when training begins, not at its first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.errors import CkptToolError
from trainer_core import CheckpointError, CheckpointManager, SaveWarning, Trainer


def trainer(directory: Path, seen: list[int], **options: Any) -> Trainer:
    model = nn.Linear(2, 1)
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [torch.ones(3, 2)],
        device="cpu",
        loss_fn=lambda model, batch: model(batch).square().sum(),
        checkpoint_manager=CheckpointManager(directory, every_steps=2, **options),
        callbacks=[lambda trainer, step, metrics: seen.append(step)],
    )


def a_file(directory: Path) -> None:
    directory.rmdir()
    directory.write_text("a run that was saved under this name")


def below_a_file(directory: Path) -> None:
    directory.rmdir()
    directory.parent.rmdir()
    directory.parent.write_text("not a directory")


def a_directory_for_a_pointer(directory: Path) -> None:
    (directory / "latest.json").mkdir()


def a_directory_for_the_lock(directory: Path) -> None:
    (directory / ".writer.lock").mkdir()
    (directory / ".writer.lock" / "something").touch()


def read_only(directory: Path) -> None:
    directory.chmod(0o555)
    if os.access(directory, os.W_OK):
        pytest.skip("this user may write everywhere")


@pytest.mark.parametrize(
    "spoil",
    [a_file, below_a_file, a_directory_for_a_pointer, a_directory_for_the_lock, read_only],
)
def test_what_fails_the_first_save_is_told_before_the_first_step(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    directory = tmp_path / "runs" / "a"
    directory.mkdir(parents=True)
    spoil(directory)
    seen: list[int] = []
    with pytest.raises((CkptToolError, CheckpointError, OSError)) as caught:
        trainer(directory, seen, lock_patience=0).fit(4)
    assert seen == [] and str(tmp_path) in str(caught.value)
    assert not list(tmp_path.rglob("step_*"))
    if spoil is a_directory_for_a_pointer:
        assert "latest.json: cannot write: is a directory" in str(caught.value)
        assert not (directory / ".writer.lock").exists()  # it was given back
        (directory / "latest.json").rmdir()
        assert trainer(directory, seen).fit(4).steps == 4  # once it is mended


def test_whoever_wants_to_train_on_is_warned_then(tmp_path: Path) -> None:
    (tmp_path / "latest.json").mkdir()
    seen: list[int] = []
    with pytest.warns(SaveWarning, match="is a directory") as caught:
        trainer(tmp_path, seen, on_error="warn").fit(4)
    assert seen == [1, 2, 3, 4] and len(caught) == 3  # at the start, and at each save


def link(path: Path) -> None:
    path.symlink_to("elsewhere.json")


def link_to_a_directory(path: Path) -> None:
    path.symlink_to(path.parent)


@pytest.mark.parametrize("put", [link, link_to_a_directory, os.mkfifo])
def test_what_can_be_replaced_fails_no_save(
    tmp_path: Path, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A save replaces it, follows nothing, and waits for nobody."""
    put(tmp_path / "latest.json")
    trainer(tmp_path, []).fit(2)
    assert stat.S_ISREG((tmp_path / "latest.json").lstat().st_mode)
    assert not (tmp_path / "elsewhere.json").exists()
    assert CheckpointManager(tmp_path).load_latest()["step"] == 2  # type: ignore[index]
