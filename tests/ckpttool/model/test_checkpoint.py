"""`ckpttool.open`: sections, storages, anomalies, trust, limits, and no exception for any content."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.cli.main import main
from ckpttool.errors import UnreadableError
from ckpttool.findings import Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.globals import Trust
from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.model.checkpoint import Checkpoint, open_checkpoint, type_name
from tests import corrupt
from tests.ckpttool.formats.streams import (
    PROTO_2,
    call,
    get,
    integer,
    listed,
    name,
    put,
    storage,
    tensor,
    text,
)
from tests.timing import processor_seconds_below

SYSTEM = name("os.system") + text("true") + b"\x85R"


def saved(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def opened(path: Path, data: bytes, **options: Any) -> Checkpoint:
    """A checkpoint made of bytes; its file is closed at once, its facts stay."""
    path.write_bytes(data)
    with open_checkpoint(path, **options) as checkpoint:
        return checkpoint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.pt"


def container(stream: bytes, **records: bytes) -> bytes:
    """A zip laid out as torch does, with any pickle in it."""
    members = [("a/data.pkl", stream), ("a/byteorder", b"little"), ("a/version", b"3\n")]
    return corrupt.torch_zip(
        [*members, *((f"a/data/{key}", data) for key, data in records.items())]
    )


def codes(checkpoint: Checkpoint) -> list[str]:
    return [anomaly.code for anomaly in checkpoint.anomalies]


def one(checkpoint: Checkpoint, code: str) -> Anomaly:
    (found,) = [anomaly for anomaly in checkpoint.anomalies if anomaly.code == code]
    return found


# ---- what a healthy file says


def test_a_training_checkpoint(file: Path) -> None:
    base = torch.zeros(100)
    state = {
        "model": OrderedDict(w=torch.ones(2, 3), tied=base, view=base[:10], far=base[50:60]),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2, 3, dtype=torch.bfloat16)}}},
        "step": 7,
        3: torch.ones(1),
        "config": None,
    }
    checkpoint = opened(file, saved(state))
    assert (checkpoint.kind, checkpoint.readable, checkpoint.anomalies) == ("torch-zip", True, [])
    sections = {s.name: (s.type, s.tensors, s.nbytes) for s in checkpoint.sections.values()}
    assert sections == {
        "model": ("OrderedDict", 4, 24 + 400 + 40 + 40),
        "optimizer": ("dict", 1, 12),
        "step": ("int", 0, 0),
        "3": ("Tensor", 1, 4),
        "config": ("NoneType", 0, 0),
    }
    assert list(checkpoint.tensors) == [
        *("model.w", "model.tied", "model.view", "model.far", "optimizer.state.0.exp_avg", "3"),
    ]
    assert checkpoint.stored_bytes == checkpoint.used_bytes == 24 + 400 + 12 + 4
    assert checkpoint.tree["step"] == 7
    assert (checkpoint.trust, checkpoint.load_need) == (Trust.TORCH_SAFE, "weights-only")


def test_used_bytes_are_those_that_some_tensor_reaches(file: Path) -> None:
    base = torch.zeros(100)
    checkpoint = opened(file, saved({"a": base[:10], "b": base[5:20], "c": base[50:60]}))
    assert (checkpoint.stored_bytes, checkpoint.used_bytes) == (400, (20 + 10) * 4)
    alone = opened(file, saved({"a": base[90:]}))
    assert (alone.stored_bytes, alone.used_bytes) == (400, 40)


def test_keys_with_dots_and_keys_that_look_alike(file: Path) -> None:
    t = [torch.ones(n) for n in range(1, 7)]
    state = {
        "a": {"b": t[0]},
        "a.b": t[1],
        "a.b#2": t[2],
        "x": {(1, 2): t[3], (3, 4): t[4]},
        1: t[5],
    }
    checkpoint = opened(file, saved(state))
    assert {name: ref.shape for name, ref in checkpoint.tensors.items()} == {
        "a.b": (1,), "a.b#2": (2,), "a.b#2#2": (3,), "x.(tuple)": (4,), "x.(tuple)#2": (5,), "1": (6,),
    }  # fmt: skip
    assert [(s.name, s.tensors) for s in checkpoint.sections.values()] == [
        *(("a", 1), ("a.b", 1), ("a.b#2", 1), ("x", 2), ("1", 1)),
    ]


def test_a_hundred_thousand_tensors_of_one_name_take_linear_time(file: Path) -> None:
    count = 50_000
    keys = b"".join(integer(n) + b"\x85h\x00" for n in range(count))
    stream = PROTO_2 + tensor(storage()) + put(0) + b"0}(" + text("x") + b"}(" + keys + b"uu."
    with processor_seconds_below(20):
        checkpoint = opened(file, container(stream, **{"0": bytes(24)}))
        assert len(checkpoint.tensors) == count


def test_storages_saved_without_a_tensor_are_referred_to(file: Path) -> None:
    checkpoint = opened(file, saved({"s": torch.ones(4).untyped_storage(), "t": torch.ones(2)}))
    assert checkpoint.anomalies == []
    assert (len(checkpoint.storages), checkpoint.stored_bytes) == (2, 16 + 8)
    assert checkpoint.sections["s"].type == "storage"


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_packed_storages_have_the_size_that_torch_gives_them(file: Path) -> None:
    for dtype in (torch.quint4x2, torch.quint2x4):
        packed = torch._empty_per_channel_affine_quantized(
            [3, 5], scales=torch.ones(3), zero_points=torch.zeros(3), axis=0, dtype=dtype
        )
        assert opened(file, saved({"q": packed})).anomalies == []
        legacy = saved({"q": packed}, _use_new_zipfile_serialization=False)
        assert opened(file, legacy).anomalies == []


def test_a_mapping_of_tensors_makes_each_when_asked_for(file: Path) -> None:
    checkpoint = opened(file, saved({"w": torch.ones(2)}))
    assert checkpoint.tensors["w"] is not checkpoint.tensors["w"]
    with pytest.raises(KeyError):
        checkpoint.tensors["nothing"]
    assert "w" in checkpoint.tensors
    assert len(checkpoint.tensors) == 1


def test_it_is_what_the_package_exports(file: Path) -> None:
    file.write_bytes(saved({"w": torch.ones(2)}))
    with ckpttool.open(file) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert repr(checkpoint) == f"Checkpoint({str(file)!r}, torch-zip, 1 tensors)"


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UnreadableError):
            open_checkpoint(path)


def test_names_of_types() -> None:
    values = pickle.loads(pickle.dumps([None, True, 1, 1.5, "", b"", [], (), {}, set()]))
    assert [type_name(value) for value in values] == [
        *("NoneType", "bool", "int", "float", "str", "bytes", "list", "tuple", "dict", "set"),
    ]


# ---- what it takes to load


@pytest.mark.parametrize(
    ("state", "options", "need", "trust"),
    [
        ({"w": torch.ones(1)}, {}, "weights-only", Trust.TORCH_SAFE),
        ({"w": torch.ones(1)}, {"pickle_protocol": 4}, "weights_only=False", Trust.TORCH_SAFE),
        ([], {"pickle_protocol": 4}, "weights_only=False", Trust.TORCH_SAFE),
        ([], {"pickle_protocol": 3}, "weights-only", Trust.TORCH_SAFE),
        ({"w": torch.ones(1)}, {"_use_new_zipfile_serialization": False}, "weights-only", Trust.TORCH_SAFE),
        ({"c": argparse.Namespace(a=1)}, {}, "allow-list", Trust.BENIGN),
        ({"c": frozenset({1})}, {}, "allow-list", Trust.BENIGN),
        ({"c": io.open}, {}, "weights_only=False", Trust.DANGEROUS),
    ],
)  # fmt: skip
def test_load_need(
    state: Any, options: dict[str, Any], need: str, trust: Trust, file: Path
) -> None:
    checkpoint = opened(file, saved(state, **options))
    assert (checkpoint.load_need, checkpoint.trust) == (need, trust)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(file, weights_only=True)
            passes = True
        except Exception:
            passes = False
    assert passes == (need == "weights-only")


def test_other_kinds_need_nothing(file: Path) -> None:
    for data in (b"", b"text", bytes(100), pickle.dumps([1], 2), b"\x1f\x8b\x08" + bytes(50)):
        checkpoint = opened(file, data)
        assert checkpoint.load_need == "nothing"
        assert dict(checkpoint.tensors) == {}
        assert checkpoint.container is None


def test_globals_are_listed_worst_first_and_once(file: Path) -> None:
    stream = PROTO_2 + b"](" + name("m.B") + b")R" + name("m.A") + SYSTEM
    stream += name("collections.OrderedDict") + name("m.B") + b"e."
    checkpoint = opened(file, container(stream))
    assert [(f"{u.module}.{u.name}", u.trust.value, u.called) for u in checkpoint.globals] == [
        ("os.system", "dangerous", True),
        ("m.A", "unknown", False),
        ("m.B", "unknown", True),
        ("collections.OrderedDict", "torch-safe", False),
    ]
    assert checkpoint.trust is Trust.DANGEROUS


def test_a_computed_call_is_dangerous_whatever_it_is_called_on(file: Path) -> None:
    stream = PROTO_2 + name("collections.Counter") + b")R)R."
    checkpoint = opened(file, container(stream))
    assert one(checkpoint, "computed-calls").facts == {"count": 1}
    assert checkpoint.trust is Trust.DANGEROUS
    assert checkpoint.load_need == "weights_only=False"


# ---- what is wrong


def test_a_storage_without_a_record(file: Path) -> None:
    data = corrupt.drop_record(saved({"w": torch.ones(2)}), "data/0")
    found = one(opened(file, data), "storage-missing")
    assert (found.record, found.facts) == ("data/0", {"key": "0", "declared": 8})


@pytest.mark.parametrize("length", [0, 7, 9, 16])
def test_a_record_of_another_size(length: int, file: Path) -> None:
    data = corrupt.replace_record(saved({"w": torch.ones(2)}), "data/0", bytes(length))
    found = one(opened(file, data), "storage-size")
    assert found.facts == {"key": "0", "declared": 8, "actual": length}


def test_a_storage_that_is_declared_twice_counts_with_the_larger_size(file: Path) -> None:
    small, large = tensor(storage("0", 2), 0, (2,)), tensor(storage("0", 9), 0, (2,))
    for first, second in ((small, large), (large, small)):
        checkpoint = opened(
            file, container(PROTO_2 + listed(first, second) + b".", **{"0": bytes(8)})
        )
        assert one(checkpoint, "storage-size").facts["declared"] == 36


def test_a_tensor_beyond_its_storage(file: Path) -> None:
    stream = PROTO_2 + listed(tensor(storage("0", 6), 4, (3,))) + b"."
    found = one(opened(file, container(stream, **{"0": bytes(24)})), "tensor-beyond-storage")
    assert found.facts == {"key": "0", "declared": 28, "actual": 24}


def test_a_record_that_nothing_refers_to(file: Path) -> None:
    data = corrupt.duplicate_record(saved({"w": torch.ones(2)}), "data/0", b"abcd", name="data/9")
    assert one(opened(file, data), "unreferenced-record").record == "data/9"


def test_something_behind_the_pickle(file: Path) -> None:
    stream = PROTO_2 + b"]."
    for tail, whole, dangerous in (
        (bytes(5), False, []),
        (b"garbage", False, []),
        (PROTO_2 + b"}.", True, []),
        (PROTO_2 + SYSTEM + b".", True, ["os.system"]),
        (SYSTEM + b"\xff", False, ["os.system"]),
        (PROTO_2 + b"}." + SYSTEM + b".", True, ["os.system"]),
    ):
        found = one(opened(file, container(stream + tail)), "pickle-trailing")
        assert found.facts == {"length": len(tail), "pickle": whole, "dangerous": dangerous}


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda inner: PROTO_2 + packed(inner) + b"."]
)
@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_inside_the_pickle_is_opened_too(wrap: Any, legacy: bool, file: Path) -> None:
    inner = saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=not legacy)
    checkpoint = opened(file, container(PROTO_2 + packed(wrap(inner)) + b"."))
    assert one(checkpoint, "nested-pickle").facts["dangerous"] == []
    evil = corrupt.torch_zip([("a/data.pkl", PROTO_2 + SYSTEM + b"."), ("a/version", b"3\n")])
    checkpoint = opened(file, container(PROTO_2 + packed(wrap(evil)) + b"."))
    assert one(checkpoint, "nested-pickle").facts["dangerous"] == ["os.system"]
    assert checkpoint.trust is Trust.DANGEROUS


def packed(inner: bytes) -> bytes:
    """The call by which torch loads a file from within a pickle."""
    data = b"B" + struct.pack("<I", len(inner)) + inner
    return name("torch.storage._load_from_bytes") + data + b"\x85R"


def test_files_inside_files_do_not_go_on_for_ever(file: Path) -> None:
    inner = PROTO_2 + SYSTEM + b"."
    for _ in range(40):
        inner = PROTO_2 + packed(inner) + b"."
    checkpoint = opened(file, container(inner))
    assert not one(checkpoint, "nested-pickle").facts["readable"]
    report = ckpttool.verify(file)
    assert report.files[0].state == "dangerous"


def test_a_pickle_that_breaks_off_is_no_content(file: Path) -> None:
    checkpoint = opened(file, container(PROTO_2 + SYSTEM + b"0}"))
    assert (checkpoint.readable, checkpoint.tree, dict(checkpoint.sections)) == (False, None, {})
    assert one(checkpoint, "pickle-malformed").record == "data.pkl"
    assert checkpoint.trust is Trust.DANGEROUS
    assert checkpoint.load_need == "nothing"


def test_a_zip_without_a_pickle(file: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "pickle-missing" in codes(opened(file, buffer.getvalue()))


# ---- limits


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"pickle_bytes": 20}, "20"),
        ({"opcodes": 10}, "10 opcodes"),
        ({"depth": 1}, "nested more than 1 deep"),
        ({"integer_bytes": 3}, "integer"),
    ],
)
def test_a_limit_is_said_and_nothing_is_called_good(
    limits: dict[str, int], reason: str, file: Path
) -> None:
    data = saved({"model": {"layers": {"w": torch.ones(2)}}, "n": 1 << 40})
    checkpoint = opened(file, data, limits=DEFAULT_LIMITS._replace(**limits))
    assert reason in one(checkpoint, "pickle-limit").facts["reason"]
    report = ckpttool.verify(file, limits=DEFAULT_LIMITS._replace(**limits))
    # Nesting is nothing that an honest file has: such a file is no checkpoint, whoever looks.
    assert report.could_not_check == ("depth" not in limits)
    assert report.newest_valid is None and report.worst is Severity.ERROR


def test_a_limit_of_a_plain_pickle(file: Path) -> None:
    limits = DEFAULT_LIMITS._replace(pickle_bytes=100)
    checkpoint = opened(file, pickle.dumps(list(range(500)), 2), limits=limits)
    assert (codes(checkpoint), checkpoint.readable) == (["pickle-limit"], False)


def test_names_that_would_fill_the_memory(file: Path) -> None:
    key = text("k" * 100_000)
    stream = PROTO_2 + tensor(storage()) + put(0) + b"0}" + key + listed(*[get(0)] * 3000) + b"s."
    limits = DEFAULT_LIMITS._replace(pickle_bytes=2_000_000)
    checkpoint = opened(file, container(stream, **{"0": bytes(24)}), limits=limits)
    assert "names" in one(checkpoint, "pickle-limit").facts["reason"]
    assert 1 < len(checkpoint.tensors) < 30


# ---- whatever the bytes are, an answer


@cache
def bases() -> list[bytes]:
    state = {
        "model": OrderedDict(
            w=torch.ones(2, 3), s=torch.eye(3).to_sparse(), h=torch.ones(2).half()
        ),
        "p": torch.nn.Parameter(torch.ones(3)),
        "step": 7,
        "samples": 14,
        "config": {"lr": 1e-3, "names": ["a", ("b", 2)], "n": argparse.Namespace(x=1)},
        "rng": {"python": (3, (1, 2, 3), None), "torch": torch.get_rng_state()[:16]},
        "precision": {"mode": "fp32", "autocast_enabled": False, "use_scaler": False},
    }
    return [
        saved(state),
        saved(state, pickle_protocol=4),
        saved({"w": torch.ones(3), "b": b"bytes"}, _use_new_zipfile_serialization=False),
    ]


def look_at_everything(path: Path) -> None:
    """Opens, lists, prints and verifies; each must end with an answer."""
    with open_checkpoint(path) as checkpoint:
        for ref in checkpoint.tensors.values():
            assert isinstance(ref.nbytes, int)
            for part in (ref, *ref.parts.values()):
                assert isinstance(part.device, str)
                try:
                    part.numpy(mmap=False)
                except ValueError:
                    pass
        assert checkpoint.stored_bytes >= 0
        assert checkpoint.used_bytes >= 0
        assert checkpoint.load_need
    for arguments in (
        ["inspect", "--tree", "--tensors", "--globals"],
        ["inspect", "--json"],
        ["verify"],
    ):
        done = CliRunner().invoke(main, [*arguments, str(path)], catch_exceptions=False)
        assert done.exit_code in (0, 1, 3), done.output
        if "--json" in arguments:
            json.loads(done.stdout)


@settings(max_examples=60)
@given(data=st.data())
def test_any_change_of_the_pickle_ends_in_an_answer(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Changed under right checksums, so that everything behind the pickle is reached too."""
    base = bases()[data.draw(st.integers(0, 1))]
    (content,) = (c for full, c in corrupt.read_records(base) if full.endswith("/data.pkl"))
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        if data.draw(st.booleans()):
            changed[place] = data.draw(st.integers(0, 255))
        else:
            changed[place:place] = data.draw(st.sampled_from(PIECES))
    path = tmp_path_factory.getbasetemp() / "any.pt"
    path.write_bytes(corrupt.replace_record(base, "data.pkl", bytes(changed)))
    look_at_everything(path)


PIECES = [
    *(
        b"N",
        b"0",
        b"2",
        b"(",
        b"t",
        b"]",
        b"}",
        b")",
        b"\x88",
        b"R",
        b"\x81",
        b"b",
        b"Q",
        b"a",
        b"s",
    ),
    *(
        integer(1 << 62),
        integer(-1),
        integer(1 << 2000),
        text("x"),
        text("\x1b[2J\u202e"),
        b"h\x00",
        b"h\x05",
    ),
    *(
        name("os.system"),
        name("m.C"),
        name("torch.Size"),
        SYSTEM,
        b"G\x7f\xf8" + bytes(6),
        b"\x8f",
        b"\x91",
    ),
]


@settings(max_examples=40)
@given(data=st.data())
def test_any_change_of_a_file_ends_in_an_answer(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(bases()[data.draw(st.integers(0, 2))])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "file.pt"
    path.write_bytes(content)
    look_at_everything(path)


HOSTILE = {
    "impossible shapes": listed(
        *[tensor(storage("0", n), n, (n, n), (n, n)) for n in (1 << 62, (1 << 63) - 1)]
    ),
    "an endless number": integer(1 << 2000),
    "keys of every kind": b"}(" + b"".join(k + b"N" for k in (integer(1 << 2000), b"N", b"\x88", b")", text("\x1b"))) + b"u",
    "parts of parts": call(
        "torch._utils._rebuild_sparse_tensor",
        name("torch.sparse_coo"),
        b"(" + tensor(storage()) + call(
            "torch._utils._rebuild_sparse_tensor",
            name("torch.sparse_coo"),
            b"(" + tensor(storage()) * 2 + b"K\x01\x85t",
        ) + b"K\x01\x85t",
    ),
    "a hundred thousand levels": b"]" * 100_000 + b"a" * 99_999,
    "a hundred thousand levels of objects": b"".join([name("m.C") + b")\x81" + put(0) + b"0"] + [b"h\x00" + name("m.C") + b")\x81}" + text("x") + b"h\x00sb" + put(0) + b"0" for _ in range(3000)]) + b"h\x00",
    "doubling": b"K\x00" + put(0) + b"".join(b"0" + get(i) * 2 + b"\x86" + put(i + 1) for i in range(60)),
    "doubled objects": name("m.C") + b")\x81" + put(0) + b"".join(
        b"0" + name("m.C") + b"(" + get(i) * 2 + b"t\x81" + put(i + 1) for i in range(60)
    ),
    "an object that is its own state": name("m.C") + b")\x81" + put(0) + get(0) + b"b",
    "an object that is called": name("m.C") + b")R" + b")R" + b")R",
    "names of a megabyte": name("m." + "x" * 1_000_000) + b")R",
    "a training checkpoint of nonsense": b"}(" + b"".join(
        text(key) + value
        for key, value in (
            ("step", integer(1 << 2000)), ("model", b"]q\x07h\x07a"), ("optimizer", b"}" + text("state") + b"h\x07s"),
            ("rng", name("m.C") + b")R"), ("config", b"h\x07"), ("precision", b"K\x05"), ("coordinator", b"}" + text("outer") + b"h\x07s"),
            ("scheduler", b"}" + text("last_epoch") + b"h\x07s"), ("samples", b"G\x7f\xf8" + bytes(6)), ("tokens", b"\x88"), ("scaler", text("x")),
        )
    ) + b"u",
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_content_ends_in_an_answer_soon(hostile: str, file: Path) -> None:
    file.write_bytes(container(PROTO_2 + HOSTILE[hostile] + b".", **{"0": bytes(24)}))
    with processor_seconds_below(20):
        look_at_everything(file)
