"""`verify` of a big file that lies in the page cache: checksums as fast as memory gives the bytes.

As a whole process against `python -m zipfile -t`, which checks the same checksums. Without the
interpreter's start against isal's CRC-32 alone, in one thread, over the same bytes, which for the
baseline already lie in memory.
"""

from __future__ import annotations

import sys

from benchmarks.inputs import SIZE_GB, real_file
from benchmarks.measure import CKPTTOOL, TAKE_TURNS, Row, in_one_process, interleaved, process

INSIDE = """
import ckpttool
from isal.isal_zlib import crc32

content = open(sys.argv[1], "rb").read()

def verify():
    report = ckpttool.verify(sys.argv[1])
    assert not [one for one in report.findings if one.severity.value == "error"], report.findings

take_turns(ours=verify, baseline=lambda: crc32(content))
"""


def run() -> list[Row]:
    file = real_file()
    ours, theirs = interleaved(
        lambda: process(CKPTTOOL, "verify", file),
        lambda: process(sys.executable, "-m", "zipfile", "-t", file),
    )
    inside = in_one_process(TAKE_TURNS + INSIDE, file)
    name = f"verify {SIZE_GB:g} GB"
    return [
        Row(f"{name} / python -m zipfile -t", ours.seconds, theirs.seconds, at_least=3),
        Row(f"{name}, in process / isal CRC-32", inside["ours"], inside["baseline"], at_most=1.5),
    ]
