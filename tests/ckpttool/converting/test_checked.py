"""What all conversions share: what they refuse, and that the target is whole or untouched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ckpttool.converting import checked
from ckpttool.converting.checked import open_verified, publish
from ckpttool.converting.harden import plan_harden
from ckpttool.errors import RefusedError, UnreadableError, WriteError
from tests.corrupt import flip_bit

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
HEALTHY = CORPUS / "torch-2.13.0" / "train_zip.pt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copyfile(HEALTHY, tmp_path / "old.pt"))


def flip_in_place(path: Path, offset: int) -> None:
    """One bit turned in the very file that others have open."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(flip_bit(byte, 0))


def test_damage_is_refused_with_the_command_that_mends(source: Path) -> None:
    flip_in_place(source, source.stat().st_size // 2)
    with pytest.raises(RefusedError, match=r"damaged: .*; ckpttool mend .*old\.pt -o OUT"):
        open_verified(str(source))
    spaced = source.rename(source.with_name("a b.pt"))
    with pytest.raises(RefusedError, match=r"ckpttool mend '.*a b\.pt' -o OUT"):
        open_verified(str(spaced))


def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("<!DOCTYPE html><html></html>")
    with pytest.raises(RefusedError, match="HTML.*nothing to convert"):
        open_verified(str(tmp_path / "page"))
    (tmp_path / "nothing").write_bytes(b"")
    with pytest.raises(RefusedError, match="empty.*nothing to convert"):
        open_verified(str(tmp_path / "nothing"))
    with pytest.raises(UnreadableError):
        open_verified(str(tmp_path / "missing"))


def test_what_cannot_be_checked_is_not_converted(fixtures: Path) -> None:
    with pytest.raises(UnreadableError, match="could not be checked"):
        open_verified(str(fixtures / "hostile-files" / "nested.pt"))


def test_a_target_that_proves_wrong_never_gets_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")

    def write(file: BinaryIO) -> None:
        file.write(b"new")

    def check(path: str) -> None:
        assert Path(path).read_bytes() == b"new"
        assert out.read_text() == "old"
        raise WriteError("out", "wrong")

    with pytest.raises(WriteError, match="wrong"):
        publish(str(out), write, check, needed=3, force=True)
    assert os.listdir(tmp_path) == ["out"]
    assert out.read_text() == "old"


def test_a_file_that_comes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        (tmp_path / "out").write_text("theirs")

    with pytest.raises(RefusedError, match="exists already"):
        publish(str(tmp_path / "out"), write, lambda path: None, needed=0, force=False)
    assert (tmp_path / "out").read_text() == "theirs"


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"bytes are needed, [0-9,]+ are free"):
        publish(str(tmp_path / "out"), pytest.fail, pytest.fail, needed=1 << 60, force=False)
    assert not os.listdir(tmp_path)


def test_a_source_that_changes_meanwhile_is_noticed(source: Path, tmp_path: Path) -> None:
    with plan_harden(str(source)) as plan:
        os.utime(source, ns=(1, 1))
        with pytest.raises(UnreadableError, match="changed while it was read"):
            plan.write(str(tmp_path / "new.pt"))
    assert os.listdir(tmp_path) == ["old.pt"]


def test_bytes_that_were_read_wrongly_are_noticed(source: Path, tmp_path: Path) -> None:
    """One bit of a storage changes after the file was verified; its time does not."""
    with plan_harden(str(source)) as plan:
        status = source.stat()
        record = plan._checkpoint.tensors["model.emb.weight"].record
        span = plan._checkpoint.container.span(record) if plan._checkpoint.container else None
        assert record and span
        flip_in_place(source, span[0])
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(WriteError, match=f"{record} was read with another checksum"):
            plan.write(str(tmp_path / "new.pt"))
    assert os.listdir(tmp_path) == ["old.pt"]


def test_the_written_file_is_read_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk gives other bytes than were written: here a bit is flipped under the tool's hands."""
    real = checked._prove

    def prove(out: str, path: str, *rest: Any) -> None:
        flip_in_place(Path(path), os.path.getsize(path) // 2)
        real(out, path, *rest)

    monkeypatch.setattr(checked, "_prove", prove)
    with plan_harden(str(source)) as plan, pytest.raises(WriteError, match="not as it should be"):
        plan.write(str(tmp_path / "new.pt"))
    assert os.listdir(tmp_path) == ["old.pt"]
