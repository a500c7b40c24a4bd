"""`inspect` of one file with 100,000 tensors, against CPython's own C unpickler.

The baseline reads the same `data.pkl` with the least that can stand in for what it names: each
rebuilder gives its arguments back, each storage is its persistent id. It makes no names, shapes or
sizes of that, and looks at nothing else of the file. It is timed as Python is, and also with the
garbage collector off, which is much faster and has no bar: it is here to be seen.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.inputs import many_tensors_file
from benchmarks.measure import CKPTTOOL, TAKE_TURNS, Row, in_one_process, interleaved
from benchmarks.measure import process as whole
from benchmarks.measure import python as whole_python

UNPICKLE = """
import collections, gc, pickle, sys

class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return collections.OrderedDict if name == "OrderedDict" else (lambda *values: values)

    def persistent_load(self, identity):
        return identity

def unpickle():
    with open(sys.argv[1], "rb") as file:
        return Unpickler(file).load()

def unpickle_without_gc():
    gc.disable()
    unpickle()
    gc.enable()
"""
OPEN = """
import ckpttool

def inspect():
    with ckpttool.open(sys.argv[2]) as checkpoint:
        return len(checkpoint.tensors), len(checkpoint.sections), checkpoint.used_bytes
"""


TURNS = "take_turns(ours=inspect, plain=unpickle, without_gc=unpickle_without_gc)"


def run() -> list[Row]:
    file = many_tensors_file()
    pickled = _data_pkl(file)
    inside = in_one_process(TAKE_TURNS + UNPICKLE + OPEN + TURNS, pickled, file)
    ours, theirs = interleaved(
        lambda: whole(CKPTTOOL, "inspect", file),
        lambda: whole_python(UNPICKLE + "unpickle()", pickled),
    )
    name = "inspect 100,000 tensors"
    library = f"{name}, in process / C unpickler"
    return [
        Row(f"{name}, whole process / the C unpickler's", ours.seconds, theirs.seconds, at_most=4),
        Row(f"{name}, whole process / C unpickler alone", ours.seconds, inside["plain"], at_most=4),
        Row(library, inside["ours"], inside["plain"], at_most=4),
        Row(f"{library} without gc", inside["ours"], inside["without_gc"]),
    ]


def _data_pkl(file: Path) -> Path:
    target = file.with_name("data.pkl")
    with zipfile.ZipFile(file) as archive:
        name = next(item for item in archive.namelist() if item.endswith("/data.pkl"))
        target.write_bytes(archive.read(name))
    return target
