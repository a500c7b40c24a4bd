"""What must not be written over: asked of the file system alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ckpttool.errors import RefusedError, WriteError
from ckpttool.io.output import refuse_output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "old.pt"
    path.write_text("old")
    return path


def test_the_source_under_any_name(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "twin")
    for out in (source, tmp_path / "link", tmp_path / "twin", tmp_path / "." / "old.pt"):
        with pytest.raises(RefusedError, match="the very file .* never touched"):
            refuse_output(str(out), str(source), force=True)


def test_force_replaces_regular_files_only(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "elsewhere").symlink_to(there)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for name, what in (
        ("pipe", "a pipe"), ("elsewhere", "a symbolic link"), ("nowhere", "a symbolic link"),
        ("socket", "a socket"), ("", "a directory"), ("/dev/zero", "a device"),
    ):  # fmt: skip
        for force in (False, True):
            with pytest.raises(RefusedError, match=f"is {what}.*only regular files"):
                refuse_output(str(tmp_path / name), str(source), force=force)
    with pytest.raises(RefusedError, match="only with --force"):
        refuse_output(str(there), str(source), force=False)
    refuse_output(str(there), str(source), force=True)
    refuse_output(str(tmp_path / "new"), str(source), force=False)


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("", "must name the file"),
        ("no/where.pt", "no such directory"),
        ("old.pt/where.pt", "cannot write: Not a directory"),
        ("x" * 300, "cannot write: File name too long"),
        ("a\0b", "cannot write: .*null"),
    ],
)
def test_names_that_cannot_be_written(
    out: str, why: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(WriteError, match=why):
        refuse_output(out, "old.pt", force=True)


def test_a_directory_that_may_not_be_written_to(source: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("permissions do not bind this user")
    with pytest.raises(WriteError, match="may not be written to"):
        refuse_output(str(closed / "new"), str(source), force=False)
