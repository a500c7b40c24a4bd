"""`-o OUT`, the same for every verb that writes a file anew: judged before anything is read."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from ckpttool.cli.main import main
from ckpttool.io.reading import FileReader
from tests.ckpttool.cli.support import CORPUS, ckpttool, names

VERBS = ("harden", "slim", "export", "mend")
HEALTHY = CORPUS / "torch-2.13.0" / "ckpt_nanogpt.pt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Cut short before the end records, so that `mend` too has something to write."""
    path = tmp_path / "old.pt"
    path.write_bytes(HEALTHY.read_bytes()[:-22])
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_regular_file_stays_what_it_is(verb: str, source: Path, tmp_path: Path) -> None:
    pipe, link, mine = tmp_path / "pipe", tmp_path / "link", tmp_path / "mine"
    os.mkfifo(pipe)
    mine.write_text("mine")
    link.symlink_to(mine)
    file = source if verb == "mend" else HEALTHY
    for out, what in ((pipe, "a pipe"), (link, "a symbolic link"), (tmp_path, "a directory")):
        done = ckpttool(verb, file, "-o", out, "--force")
        assert done.returncode == 4
        assert f"is {what}" in done.stderr
        assert done.stdout == ""
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink() and mine.read_text() == "mine"
    assert names(tmp_path) == ["link", "mine", "old.pt", "pipe"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_bad_out_is_told_before_anything_is_read(verb: str, source: Path, tmp_path: Path) -> None:
    """FILE is damaged, of which nothing is said: it was not even looked at."""
    (tmp_path / "mine").write_text("mine")
    for out, code, why in (
        ("", 2, "is empty"),
        (source, 4, "the very file"),
        (tmp_path / "mine", 4, "only with --force"),
        (tmp_path / "no" / "where", 3, "no such directory"),
    ):
        done = ckpttool(verb, source, "-o", out)
        assert (done.returncode, done.stdout) == (code, ""), out
        assert why in done.stderr
        assert "damaged" not in done.stderr
    assert names(tmp_path) == ["mine", "old.pt"]


@pytest.mark.parametrize("verb", VERBS)
def test_terminated_before_anything_is_written(
    verb: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends like Ctrl-C while FILE is still looked at."""
    before = signal.getsignal(signal.SIGTERM)

    def terminate(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(FileReader, "read", terminate)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("ended by the signal itself"))
    try:
        with pytest.raises(SystemExit) as ended:
            main([verb, str(source), "-o", str(tmp_path / "new")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
    assert names(tmp_path) == ["old.pt"]
