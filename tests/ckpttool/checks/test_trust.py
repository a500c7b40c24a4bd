"""TRU: hostile files. Each would leave a mark if anything in it ran; nothing does."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checks.verify import Report, verify
from ckpttool.findings import Finding, Severity
from tests import corrupt
from tests.ckpttool.checks.builders import name, put, saved, step_bytes, training_state

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


class Payload:
    """Pickles to a call of `os.system`, which makes the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


def evil_pickle(mark: Path, protocol: int = 2) -> bytes:
    return pickle.dumps(Payload(mark), protocol=protocol)


def judge(run: Path, content: bytes, mark: Path) -> Report:
    """The report on the run after its newest file became `content`; nothing may have run."""
    put(run, 6, content)
    report = verify(run)
    assert not mark.exists()
    return report


def of_file(report: Report) -> list[Finding]:
    return [item for item in report.findings if item.place.path.endswith(name(6))]


def ids(report: Report) -> set[str]:
    return {item.id for item in of_file(report)}


def assert_dangerous(report: Report) -> None:
    assert report.files[-1].state == "dangerous"
    assert report.newest_valid == 4
    assert any(item.id.startswith("TRU") and item.severity is ERROR for item in of_file(report))


def test_the_payload_would_run(mark: Path) -> None:
    pickle.loads(evil_pickle(mark))
    assert mark.exists()


def test_tru101_a_dangerous_global(run: Path, mark: Path) -> None:
    report = judge(run, saved({**training_state(6), "extra": Payload(mark)}), mark)
    (finding,) = (item for item in of_file(report) if item.id == "TRU101")
    assert finding.facts["globals"] == [f"{os.system.__module__}.system"]
    assert_dangerous(report)


@pytest.mark.parametrize(
    "stream",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truet\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85}\x92.",  # NEWOBJ_EX
        b"\x80\x02}(cos\nsystem\n(X\x04\x00\x00\x00truetR0u.",  # its result is popped
        b"\x80\x02cbuiltins\ngetattr\n(cos\n__dict__\nX\x03\x00\x00\x00getttR.",
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x02c__builtin__\nexec\n(X\x01\x00\x00\x001tR.",
        b"\x80\x02csubprocess\nPopen\n(X\x04\x00\x00\x00truetR.",
        b"\x80\x02crunpy\nrun_path\n(X\x04\x00\x00\x00truetR.",
    ],
)
def test_tru101_by_whatever_opcode(run: Path, mark: Path, stream: bytes) -> None:
    report = judge(run, corrupt.replace_record(step_bytes(6), "data.pkl", stream), mark)
    assert "TRU101" in ids(report)
    assert_dangerous(report)


@pytest.mark.parametrize("protocol", range(6))
def test_tru101_in_a_plain_pickle_too(run: Path, mark: Path, protocol: int) -> None:
    report = judge(run, evil_pickle(mark, protocol), mark)
    assert {"TRU101", "FIL106"} <= ids(report)
    assert_dangerous(report)


def test_damage_and_danger_are_both_said_and_danger_wins(run: Path, mark: Path) -> None:
    data = saved({**training_state(6), "extra": Payload(mark)})
    report = judge(run, corrupt.set_crc(data, "data.pkl", 0x12345678), mark)
    assert {"TRU101", "FIL109"} <= ids(report)
    assert_dangerous(report)


def test_a_pickle_that_breaks_after_its_payload(run: Path, mark: Path) -> None:
    stream = evil_pickle(mark)[:-1] + b"0\xff\xff garbage"
    report = judge(run, corrupt.replace_record(step_bytes(6), "data.pkl", stream), mark)
    assert {"TRU101", "FIL123"} <= ids(report)
    assert_dangerous(report)


def test_tru102_unknown_classes(run: Path, mark: Path) -> None:
    stream = b"\x80\x02}(X\x04\x00\x00\x00stepK\x06X\x01\x00\x00\x00acmy_models\nNet\n)\x81u."
    report = judge(run, corrupt.replace_record(step_bytes(6), "data.pkl", stream), mark)
    (finding,) = (item for item in of_file(report) if item.id == "TRU102")
    assert (finding.severity, finding.facts["globals"]) == (WARNING, ["my_models.Net"])
    assert report.files[-1].state == "valid"


def test_tru103_an_allow_list_is_an_info(run: Path, mark: Path) -> None:
    import argparse

    state = {**training_state(6), "config": argparse.Namespace(lr=0.1)}
    report = judge(run, saved(state), mark)
    assert [(item.id, item.severity) for item in of_file(report)] == [("TRU103", INFO)]
    assert of_file(report)[0].facts["globals"] == ["argparse.Namespace"]
    assert report.newest_valid == 6


def test_tru104_a_protocol_that_weights_only_refuses(run: Path, mark: Path) -> None:
    report = judge(run, saved(training_state(6), pickle_protocol=4), mark)
    assert [(item.id, item.severity) for item in of_file(report)] == [("TRU104", INFO)]
    assert report.newest_valid == 6


def appended(tail: bytes) -> bytes:
    data = step_bytes(6)
    pickled = dict(corrupt.read_records(data))["archive/data.pkl"]
    return corrupt.replace_record(data, "data.pkl", pickled + tail)


def test_tru105_a_second_pickle_behind_the_first(run: Path, mark: Path) -> None:
    report = judge(run, appended(evil_pickle(mark)), mark)
    assert "TRU105" in ids(report)
    assert_dangerous(report)


def test_tru105_a_harmless_second_pickle_is_an_error_too(run: Path, mark: Path) -> None:
    report = judge(run, appended(b"\x80\x02]."), mark)
    assert ("TRU105", ERROR) in [(item.id, item.severity) for item in of_file(report)]


@pytest.mark.parametrize(("central", "local"), [(True, False), (False, True), (True, True)])
def test_tru106_marked_as_encrypted(run: Path, mark: Path, central: bool, local: bool) -> None:
    data = saved({**training_state(6), "extra": Payload(mark)})
    data = corrupt.set_encrypted(data, "data.pkl", central=central, local=local)
    report = judge(run, data, mark)
    assert {"TRU101", "TRU106"} <= ids(report)
    assert_dangerous(report)


def test_tru106_another_name_in_the_local_header(run: Path, mark: Path) -> None:
    data = saved({**training_state(6), "extra": Payload(mark)})
    report = judge(run, corrupt.rename_local(data, "data.pkl", "data.txt"), mark)
    assert {"TRU101", "TRU106"} <= ids(report)
    assert_dangerous(report)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("twin", ["data.pkl", "DATA.PKL"])
def test_tru106_two_pickles_under_one_name(run: Path, mark: Path, first: bool, twin: str) -> None:
    data = corrupt.duplicate_record(
        step_bytes(6), "data.pkl", evil_pickle(mark), name=twin, first=first
    )
    report = judge(run, data, mark)
    assert "TRU106" in ids(report)
    assert {"TRU101", "TRU107"} & ids(report)
    assert_dangerous(report)


@pytest.mark.parametrize("record", ["data/99", "hidden", "notes.txt", "version"])
def test_tru107_a_pickle_where_none_should_be(run: Path, mark: Path, record: str) -> None:
    data = step_bytes(6)
    if record == "version":
        data = corrupt.replace_record(data, record, evil_pickle(mark))
    else:
        data = corrupt.duplicate_record(data, record, evil_pickle(mark))
    report = judge(run, data, mark)
    (finding,) = (item for item in of_file(report) if item.id == "TRU107")
    assert (finding.severity, finding.place.record) == (ERROR, record)
    assert_dangerous(report)


def test_tru107_at_the_beginning_of_a_long_record(run: Path, mark: Path) -> None:
    long = evil_pickle(mark) + bytes(17 << 20)
    report = judge(run, corrupt.duplicate_record(step_bytes(6), "data/99", long), mark)
    assert "TRU107" in ids(report)
    assert_dangerous(report)


def test_tru107_outside_of_the_root_folder(run: Path, mark: Path) -> None:
    report = judge(run, corrupt.add_member(step_bytes(6), "x.bin", evil_pickle(mark)), mark)
    assert "TRU107" in ids(report)
    assert_dangerous(report)


def test_numbers_that_look_like_a_pickle_are_numbers(run: Path, mark: Path) -> None:
    import torch

    stream = evil_pickle(mark)
    stream += bytes(-len(stream) % 4)
    floats = torch.tensor(struct.unpack(f"<{len(stream) // 4}f", stream))
    state = training_state(6)
    state["model"]["odd"] = floats
    report = judge(run, saved(state), mark)
    assert of_file(report) == []
    assert report.newest_valid == 6


def test_tru108_writable_by_everybody(run: Path) -> None:
    (run / name(4)).chmod(0o666)
    for step in (2, 6):
        (run / name(step)).chmod(0o666)
    report = verify(run)
    assert [(item.id, item.severity) for item in report.findings] == [("TRU108", WARNING)] * 3
    assert report.findings[0].remedy == f"chmod o-w -- '{run / name(2)}'"


def test_tru108_a_directory_that_everybody_may_change(run: Path) -> None:
    run.chmod(0o777)
    (finding,) = verify(run).findings
    assert (finding.id, finding.place.path) == ("TRU108", str(run))
    run.chmod(0o1777)  # sticky, as /tmp: others cannot replace files
    assert verify(run).findings == []


def test_tru108_a_pointer_that_everybody_may_change(run: Path) -> None:
    (run / "latest.json").chmod(0o646)
    (finding,) = verify(run).findings
    assert (finding.id, finding.place.path) == ("TRU108", str(run / "latest.json"))


def test_tru109_names_that_do_not_print(run: Path, mark: Path) -> None:
    state = training_state(6)
    weight = state["model"]["0.weight"]
    state["model"] = {"\x1b[2Jw": weight, "a\nb": weight, "\u202egpj.x": weight, "模型 é": weight}
    report = judge(run, saved(state), mark)
    (finding,) = (item for item in of_file(report) if item.id == "TRU109")
    assert finding.severity is WARNING
    assert finding.words.startswith("3 tensor names")


def test_tru110_torchscript_holds_code(corpus: Path) -> None:
    report = verify(corpus / "torch-2.13.0" / "scripted_ts.pt")
    assert ("TRU110", WARNING) in [(item.id, item.severity) for item in report.findings]
    assert report.files[0].state == "intact"


def test_tru111_a_file_inside_the_pickle(run: Path, mark: Path) -> None:
    inner = saved({"extra": Payload(mark)}, _use_new_zipfile_serialization=False)
    head = b"\x80\x02ctorch.storage\n_load_from_bytes\n"
    stream = head + b"B" + struct.pack("<I", len(inner)) + inner + b"\x85R."
    report = judge(run, corrupt.replace_record(step_bytes(6), "data.pkl", stream), mark)
    assert "TRU111" in ids(report)
    assert_dangerous(report)


def test_cyclic_deep_and_doubling_pickles_end(run: Path, mark: Path) -> None:
    cyclic = b"\x80\x02]\x94g0\na."
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    doubling = b"\x80\x02]q\x00" + b"".join(
        b"(h" + bytes((i,)) + b"h" + bytes((i,)) + b"lq" + bytes((i + 1,)) for i in range(60)
    )
    for stream in (cyclic, deep, doubling + b"."):
        report = judge(run, corrupt.replace_record(step_bytes(6), "data.pkl", stream), mark)
        assert report.newest_valid == 4
        assert ("FIL124" in ids(report)) == (stream is deep)
