"""What every finding is put together from: command lines that can be pasted."""

from __future__ import annotations

import os
import subprocess

import pytest

from ckpttool.checks.base import command, quoted
from ckpttool.render.text import escape

PATHS = [
    b"plain",
    b"with a space",
    b"it's",
    b"-x",
    b"--apply",
    b"new\nline",
    b"tab\t'quote' \\ and $HOME",
    b"\x1b[31m",
    b"not utf-8: \xff\xfe7",
    "bidi \u202e and \u00e9".encode(),
    b"",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_shell_reads_a_path_back_as_it_was(path: bytes) -> None:
    """Even after it was escaped for the screen."""
    shown = escape(quoted(os.fsdecode(path)))
    assert shown.isprintable()
    script = os.fsencode(f"printf %s {shown}")
    back = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, check=True).stdout
    assert back == (b"./" + path if path.startswith(b"-") else path)


def test_options_stay_options_and_a_path_never_looks_like_one() -> None:
    assert command("repair", "-x", "--allow-loss", "--apply") == (
        "ckpttool repair ./-x --allow-loss --apply"
    )
    assert command("mend", "--x", "-o", "OUT.pt") == "ckpttool mend ./--x -o OUT.pt"
