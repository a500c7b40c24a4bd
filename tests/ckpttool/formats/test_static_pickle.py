"""The pickle reader against CPython's own: equal on plain data, and running nothing."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import pickletools
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import FormatError, LimitError, PickleError
from ckpttool.formats.globals import Trust, classify
from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.formats.static_pickle import PickleResult, read_pickle
from ckpttool.formats.values import GlobalRef, Opaque, OrderedMap, StorageRef, TensorValue
from ckpttool.model.walk import find_tensors
from tests.ckpttool.formats import streams
from tests.ckpttool.formats.streams import PROTO_2, call, canonical, get, integer, name, put, text
from tests.timing import processor_seconds_below

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"


@cache
def pickle_of(file: str) -> bytes:
    with zipfile.ZipFile(CORPUS / file) as archive:
        (member,) = (item for item in archive.namelist() if item.endswith("/data.pkl"))
        return archive.read(member)


def value_of(data: bytes, **options: Any) -> Any:
    """The value of a stream that must be free of faults."""
    result = read_pickle(data, **options)
    assert result.error is None
    assert result.malformed_calls == []
    assert result.end == len(data)
    return result.value


def error_of(data: bytes, **options: Any) -> FormatError:
    """The error of a stream that must be refused; no value comes with it."""
    result = read_pickle(data, **options)
    assert result.error is not None
    assert result.value is None
    return result.error


# ---- plain data is what pickle.loads gives

# A NaN hashes by its identity, so that a set which holds one has another order each time.
numbers = st.integers() | st.floats(allow_nan=False)
keys = st.recursive(
    st.none() | st.booleans() | numbers | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
leaves = (
    keys
    | st.floats()
    | st.complex_numbers()
    | st.binary().map(bytearray)
    | st.sets(keys, max_size=4)
)
plain = st.recursive(
    leaves | st.integers(-(1 << 900), 1 << 900),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner)
        | st.lists(inner, min_size=4).map(tuple)
        # The same object twice, so that the memo is used.
        | inner.map(lambda item: [item, item])
    ),
    max_leaves=30,
)


@settings(max_examples=300)
@given(value=plain, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_of_every_protocol(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert canonical(value_of(data)) == canonical(pickle.loads(data))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_sizes_that_take_another_opcode(protocol: int) -> None:
    value = {
        "text": ["x" * 255, "x" * 256, "é" * 70_000, "\ud800", "new\nline", "quote'", "\\"],
        "bytes": [b"", b"\0\xff" * 127, b"\xfe" * 256, b"x" * 70_000],
        "bytearrays": [bytearray(), bytearray(b"\x80" * 300)],
        "integers": [0, 255, 256, 65_535, 65_536, -1, 1 << 31, -(1 << 31), 1 << 63, -(1 << 2040)],
        "floats": [0.0, -0.0, 1e-320, 1.7976931348623157e308, float("inf"), float("nan")],
        "long": list(range(2500)),
        "wide": {str(index): index for index in range(2500)},
        "set": set(range(2500)),
        "deep": (1, (2, (3, (4, (5, 6, 7))))),
    }
    data = pickle.dumps(value, protocol)
    assert canonical(value_of(data)) == canonical(pickle.loads(data))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_streams_one_after_another(protocol: int) -> None:
    first, second = pickle.dumps([1], protocol), pickle.dumps({"a": (2,)}, protocol)
    one = read_pickle(first + second)
    two = read_pickle(first + second, start=one.end)
    assert (one.value, one.end, one.protocol) == (
        [1],
        len(first),
        max(protocol, 2) * (protocol > 1),
    )
    assert (two.value, two.end) == ({"a": (2,)}, len(first + second))


# ---- every opcode

# One stream for each opcode, whose value CPython itself tells.
OPCODES: dict[str, bytes] = {
    "INT": b"(I-12\nI01\nI00\nI99999999999\nl.",
    "LONG": b"(L-12L\nL0\nL99999999999999999999L\nl.",
    "BININT": b"J\xfe\xff\xff\xff.",
    "BININT1": b"K\xff.",
    "BININT2": b"M\x01\x80.",
    "LONG1": b"\x8a\x02\x00\x80.",
    "LONG4": b"\x8b\x03\x00\x00\x00\x01\x02\x83.",
    "STRING": b"(S'it\\'s\\n\\x41'\nS\"two\"\nl.",
    "BINSTRING": b"T\x03\x00\x00\x00abc.",
    "SHORT_BINSTRING": b"U\x03abc.",
    "BINBYTES": b"B\x02\x00\x00\x00\xff\x00.",
    "SHORT_BINBYTES": b"C\x02\xff\x00.",
    "BINBYTES8": b"\x8e\x02\x00\x00\x00\x00\x00\x00\x00\xff\x00.",
    "BYTEARRAY8": b"\x96\x02\x00\x00\x00\x00\x00\x00\x00\xff\x00.",
    "NONE": b"N.",
    "NEWTRUE": b"\x88.",
    "NEWFALSE": b"\x89.",
    "UNICODE": b"Vgr\\u00fc\xdfe\n.",
    "SHORT_BINUNICODE": b"\x8c\x04\xc3\xbcab.",
    "BINUNICODE": b"X\x03\x00\x00\x00\xed\xa0\x80.",
    "BINUNICODE8": b"\x8d\x02\x00\x00\x00\x00\x00\x00\x00ab.",
    "FLOAT": b"(F-1.5\nF1e300\nFnan\nl.",
    "BINFLOAT": b"G\xbf\xf8\x00\x00\x00\x00\x00\x00.",
    "EMPTY_LIST": b"].",
    "APPEND": b"]K\x01aK\x02a.",
    "APPENDS": b"](K\x01K\x02e(e.",
    "LIST": b"(K\x01K\x02l.",
    "EMPTY_TUPLE": b").",
    "TUPLE": b"(K\x01K\x02K\x03K\x04t.",
    "TUPLE1": b"K\x01\x85.",
    "TUPLE2": b"K\x01K\x02\x86.",
    "TUPLE3": b"K\x01K\x02K\x03\x87.",
    "EMPTY_DICT": b"}.",
    "DICT": b"(K\x01K\x02K\x01K\x03d.",
    "SETITEM": b"}K\x01K\x02s.",
    "SETITEMS": b"}(K\x01K\x02K\x03K\x04u(u.",
    "EMPTY_SET": b"\x8f.",
    "ADDITEMS": b"\x8f(K\x01K\x02K\x01\x90.",
    "FROZENSET": b"(K\x01K\x02\x91.",
    "POP": b"K\x01K\x020.",
    "DUP": b"(]2K\x01al.",
    "MARK": b"((K\x01tt.",
    "POP_MARK": b"K\x01(K\x02K\x031.",
    "GET": b"]p5\n0g5\n.",
    "BINGET": b"]q\x050h\x05.",
    "LONG_BINGET": b"]r\x05\x01\x00\x000j\x05\x01\x00\x00.",
    "PUT": b"(]p300\ng300\nl.",
    "BINPUT": b"(]q\x07h\x07l.",
    "LONG_BINPUT": b"(]r\x07\x00\x00\x00h\x07l.",
    "MEMOIZE": b"(]\x94}\x94h\x00h\x01l.",
    "PROTO": b"\x80\x05N.",
    "STOP": b"K\x07.",
    "FRAME": b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00K\x01\x95\x01\x00\x00\x00\x00\x00\x00\x00.",
}
# Those that CPython would import, call, or ask its caller for something.
CALLS = {
    "EXT1": b"\x82\x05.",
    "EXT2": b"\x83\x05\x01.",
    "EXT4": b"\x84\x05\x01\x00\x00.",
    "GLOBAL": b"cos\nsystem\n.",
    "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93.",
    "REDUCE": b"cm\nf\n(K\x01tR.",
    "BUILD": b"cm\nf\n)\x81}X\x01\x00\x00\x00aK\x01sb.",
    "INST": b"(K\x01im\nf\n.",
    "OBJ": b"(cm\nf\nK\x01o.",
    "NEWOBJ": b"cm\nf\nK\x01\x85\x81.",
    "NEWOBJ_EX": b"cm\nf\nK\x01\x85}\x92.",
    "PERSID": b"Pan id\n.",
    "BINPERSID": b"K\x01Q.",
    "NEXT_BUFFER": b"\x97.",
    "READONLY_BUFFER": b"\x97\x98.",
}


def test_the_tables_name_every_opcode() -> None:
    assert sorted([*OPCODES, *CALLS]) == sorted(op.name for op in pickletools.opcodes)
    for opcode, stream in {**OPCODES, **CALLS}.items():
        assert opcode in {op.name for op, _, _ in pickletools.genops(stream)}


@pytest.mark.parametrize("opcode", OPCODES)
def test_opcode(opcode: str) -> None:
    stream = OPCODES[opcode]
    assert canonical(value_of(stream)) == canonical(pickle.loads(stream))


def test_calls_stay_opaque() -> None:
    for opcode in ("REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
        value = value_of(CALLS[opcode])
        assert isinstance(value, Opaque)
        assert (value.path, value.args, value.opcode) == ("m.f", (1,), opcode)
    built = value_of(CALLS["BUILD"])
    assert (built.opcode, built.state) == ("NEWOBJ", {"a": 1})


def test_globals_stay_names() -> None:
    for opcode in ("GLOBAL", "STACK_GLOBAL"):
        value = value_of(CALLS[opcode])
        assert isinstance(value, GlobalRef)
        assert (value.module, value.name) == ("os", "system")
    for opcode, number in (("EXT1", 5), ("EXT2", 0x105), ("EXT4", 0x105)):
        assert value_of(CALLS[opcode]).path == f"copyreg.extension({number})"


def test_what_the_caller_would_be_asked_for() -> None:
    for opcode in ("NEXT_BUFFER", "READONLY_BUFFER"):
        assert isinstance(value_of(CALLS[opcode]), Opaque)
    seen = []
    for stream in (CALLS["PERSID"], CALLS["BINPERSID"]):
        assert value_of(stream, persistent=lambda pid: seen.append(pid) or "answer") == "answer"
    assert seen == ["an id", 1]


def test_bytes_that_are_no_opcode_are_refused_by_number() -> None:
    known = {op.code for op in pickletools.opcodes}
    for byte in range(256):
        said = str(read_pickle(bytes([byte]) + bytes(40)).error)
        assert (f"unknown opcode 0x{byte:02x}" in said) == (chr(byte) not in known)


def test_an_unknown_protocol() -> None:
    assert "protocol 6" in str(error_of(b"\x80\x06N."))
    assert read_pickle(b"\x80\x03N.").protocol == 3
    assert read_pickle(b"N.").protocol == 0


# What torch 2.13's weights-only unpickler has a branch for (torch/_weights_only_unpickler.py).
TAKEN_BY_TORCH = {
    "GLOBAL",
    "NEWOBJ",
    "REDUCE",
    "BUILD",
    "APPEND",
    "APPENDS",
    "SETITEM",
    "SETITEMS",
    "MARK",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "NONE",
    "NEWFALSE",
    "NEWTRUE",
    "EMPTY_TUPLE",
    "EMPTY_LIST",
    "EMPTY_DICT",
    "EMPTY_SET",
    "BININT",
    "BININT1",
    "BININT2",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINSTRING",
    "BINPERSID",
    "BINGET",
    "LONG_BINGET",
    "BINPUT",
    "LONG_BINPUT",
    "LONG1",
    "PROTO",
    "STOP",
}


@pytest.mark.parametrize("opcode", [*OPCODES, *CALLS])
def test_opcodes_that_weights_only_refuses(opcode: str) -> None:
    stream = {**OPCODES, **CALLS}[opcode]
    used = {op.name for op, _, _ in pickletools.genops(stream)}
    assert read_pickle(stream).refused_opcodes == used - TAKEN_BY_TORCH


# ---- nothing runs, by whatever opcode


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that appears if a payload runs."""
    return tmp_path / "it ran"


def command(mark: Path) -> bytes:
    return text(f"touch '{mark}'")


SYSTEM = name("os.system")
NAMESPACE = name("argparse.Namespace")
# Each runs the shell command that it is given, as soon as it is unpickled.
ATTACKS: dict[str, Callable[[bytes], bytes]] = {
    "REDUCE": lambda c: SYSTEM + c + b"\x85R.",
    "REDUCE of posix": lambda c: name("posix.system") + c + b"\x85R.",
    "REDUCE, popped again": lambda c: b"}" + SYSTEM + c + b"\x85R0.",
    "REDUCE behind STACK_GLOBAL": lambda c: text("os") + text("system") + b"\x93" + c + b"\x85R.",
    "STACK_GLOBAL from the memo": lambda c: (
        text("system") + put(9) + b"0" + text("os") + put(8) + b"0h\x08h\x09\x93" + c + b"\x85R."
    ),
    "STACK_GLOBAL with a dotted name": lambda c: (
        b"\x80\x04" + text("shutil") + text("os.system") + b"\x93" + c + b"\x85R."
    ),
    "INST": lambda c: b"(" + c + b"ios\nsystem\n.",
    "OBJ": lambda c: b"(" + SYSTEM + c + b"o.",
    "NEWOBJ_EX": lambda c: name("functools.partial") + SYSTEM + c + b"\x86}\x92)R.",
    "NEWOBJ": lambda c: name("functools.partial") + SYSTEM + c + b"\x86\x81)R.",
    "BUILD": lambda c: (
        NAMESPACE + b")\x81}" + text("__setstate__") + SYSTEM + b"sb" + c + b"b."
    ),
    "a call of what a call gave": lambda c: (
        name("builtins.getattr") + name("builtins.__import__") + text("os") + b"\x85R"
        + text("system") + b"\x86R" + c + b"\x85R."
    ),
    "operator.methodcaller": lambda c: (
        name("operator.methodcaller") + text("system") + c + b"\x86R"
        + name("builtins.__import__") + text("os") + b"\x85R\x85R."
    ),
    "map, walked by list": lambda c: (
        name("builtins.list") + name("builtins.map") + SYSTEM + c + b"\x85\x86R\x85R."
    ),
    "then garbage": lambda c: SYSTEM + c + b"\x85R0\xff\xff\xff",
    "APPENDS on an object": lambda c: (
        name("collections.deque") + b")R(" + SYSTEM + c + b"\x85Re."
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_runs_nothing_and_is_seen(attack: str, mark: Path) -> None:
    stream = PROTO_2 + ATTACKS[attack](command(mark))
    result = read_pickle(stream)
    assert not mark.exists()
    worst = {classify(ref.module, ref.name) for ref in result.globals.values()}
    assert Trust.DANGEROUS in worst or result.computed_calls
    # And it would have run: the test of the test.
    try:
        pickle.loads(stream)
    except Exception as error:
        assert "garbage" in attack or isinstance(error, (TypeError, pickle.UnpicklingError))
    assert mark.exists()


def test_an_extension_runs_nothing_and_is_seen(mark: Path) -> None:
    stream = PROTO_2 + b"\x82\xf5" + command(mark) + b"\x85R."
    copyreg.add_extension("os", "system", 0xF5)
    try:
        result = read_pickle(stream)
        assert not mark.exists()
        assert result.called == {"copyreg.extension(245)"}
        assert classify("copyreg", "extension(245)") is not Trust.TORCH_SAFE
        pickle.loads(stream)
        assert mark.exists()
    finally:
        copyreg.remove_extension("os", "system", 0xF5)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize(
    "rebuild",
    ["torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type"],
)
def test_a_rebuilder_that_calls_what_it_is_given(rebuild: str, mark: Path) -> None:
    arguments = (SYSTEM, name("torch.Tensor"), command(mark) + b"\x85", b"}")
    result = read_pickle(PROTO_2 + call(rebuild, *arguments) + b".")
    assert not mark.exists()
    assert isinstance(result.value, Opaque)
    assert result.malformed_calls == [(rebuild, "unknown rebuilder os.system")]
    assert rebuild in result.called
    assert "os.system" in result.globals


@pytest.mark.parametrize("opcode", [b")R", b")\x81", b")}\x92"])
def test_calls_of_what_a_call_gave_are_counted(opcode: bytes) -> None:
    result = read_pickle(name("m.f") + b")R" + opcode + opcode + b".")
    assert (result.computed_calls, result.called) == (2, {"m.f"})
    inside = read_pickle(b"(" + name("m.f") + b")R" + b"K\x01o.")  # and by OBJ
    assert inside.computed_calls == 1


def test_a_global_given_away_as_data_is_still_listed() -> None:
    result = read_pickle(PROTO_2 + b"}(" + text("lr") + SYSTEM + b"u.")
    assert (list(result.globals), result.called) == (["os.system"], set())


def test_a_class_that_is_built_upon() -> None:
    result = read_pickle(PROTO_2 + name("m.C") + b"}" + text("evil") + b"K\x01sb.")
    assert result.called == {"m.C"}
    assert (result.value.opcode, result.value.state) == ("BUILD", {"evil": 1})


def test_keyword_arguments_are_kept() -> None:
    value = value_of(name("m.C") + b")}" + text("a") + b"K\x01s\x92.")
    assert value.kwargs == {"a": 1}


def test_bytes_that_would_be_loaded_as_a_file_are_kept() -> None:
    inner = pickle.dumps(1, 2)
    packed = b"C" + bytes([len(inner)]) + inner
    result = read_pickle(name("torch.storage._load_from_bytes") + packed + b"\x85R.")
    assert result.nested == [inner]


# ---- what is broken gives an error and nothing else

CUT = {
    "torch": lambda: pickle_of("torch-2.13.0/dtypes_all.pt"),
    "torch, protocol 4": lambda: pickle_of("torch-2.13.0/train_proto4.pt")[-3000:],
    **{
        f"protocol {protocol}": lambda p=protocol: pickle.dumps(  # type: ignore[misc]
            {
                "a": [1.5, None, True, -7, 1 << 90, "ü", b"\xff"],
                (1, 2): {frozenset({3})},
                "b": [()],
            },
            p,
        )
        for protocol in range(6)
    },
}


@pytest.mark.parametrize("kind", CUT)
def test_every_cut_is_an_error(kind: str) -> None:
    data = CUT[kind]()
    if "4" in kind and "torch" in kind:  # begins in the middle: only that nothing is raised
        for length in range(0, len(data), 3):
            assert read_pickle(data[:length]).error is not None
        return
    assert read_pickle(data).error is None
    for length in range(len(data)):
        result = read_pickle(data[:length])
        assert isinstance(result.error, PickleError), length
        assert result.value is None
        assert 0 <= result.error.position <= length + 8


@given(data=st.data())
@settings(max_examples=400)
def test_no_mutation_raises(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(CUT)))
    content = bytearray(CUT[kind]())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        choice = data.draw(st.integers(0, 2))
        if choice == 0:
            content[place] = data.draw(st.integers(0, 255))
        elif choice == 1:
            del content[place : place + data.draw(st.integers(1, 9))]
            content += b"."
        else:
            content[place:place] = data.draw(st.binary(max_size=9))
    survives(bytes(content))


@given(
    st.lists(
        st.sampled_from([op.code.encode("latin-1") for op in pickletools.opcodes])
        | st.binary(max_size=9),
        max_size=60,
    )
)
@settings(max_examples=400)
def test_no_heap_of_opcodes_raises(pieces: list[bytes]) -> None:
    survives(b"".join(pieces) + b".")


def survives(stream: bytes) -> PickleResult:
    """Reads and walks whatever it is."""
    result = read_pickle(stream)
    assert result.error is None or isinstance(result.error, FormatError)
    for _, tensor in find_tensors(result.value):
        assert isinstance(tensor, TensorValue)
    return result


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b".",
        b"0.",
        b"1.",
        b"K\x01",
        b"\x85.",
        b"K\x01\x86.",
        b"K\x01K\x02\x87.",
        b"t.",
        b"l.",
        b"d.",
        b"(K\x01d.",
        b"}(K\x01u.",
        b"e.",
        b"K\x01a.",
        b"NK\x01a.",
        b"(e.",
        b"N(K\x01K\x02u.",
        b"N(K\x01\x90.",
        b"a.",
        b"s.",
        b"u.",
        b"\x90.",
        b"\x91.",
        b"R.",
        b"K\x01R.",
        b"cm\nf\nR.",
        b"cm\nf\nK\x01R.",
        b"cm\nf\nK\x01\x81.",
        b"\x81.",
        b"cm\nf\n)\x92.",
        b"(o.",
        b"o.",
        b"im\nf\n.",
        b"b.",
        b"Nb.",
        b"K\x01}b.",
        b"\x93.",
        b"K\x01K\x02\x93.",
        b"h\x00.",
        b"j\x00\x00\x00\x00.",
        b"g0\n.",
        b"gabc\n.",
        b"q\x00.",
        b"(q\x00.",
        b"p-1\n.",
        b"Np-1\n.",
        b"\x94.",
        b"2.",
        b"Q.",
        b"\x98.",
        b"Iabc\n.",
        b"Labc\n.",
        b"Fabc\n.",
        b"Sabc\n.",
        b"S'abc\n.",
        b"S'\n.",
        b"c\xff\nx\n.",
        b"cm\n.",
        b"X\x02\x00\x00\x00\xff\xfe.",
        b"\x8c\x02\xff\xfe.",
        b"V\\u12\n.",
        b"\x8b\xff\xff\xff\xff.",
        b"}]Ns.",
        b"}}Ns.",
        b"\x8f(]\x90.",
        b"(]\x91.",
        b"\x80.",
        b"\x95\xff\x00\x00\x00\x00\x00\x00\x00N.",
        b"P\xff\n.",
    ],
)
def test_misuse_of_stack_marks_and_memo(stream: bytes) -> None:
    assert isinstance(error_of(stream), PickleError)


def test_an_error_says_where() -> None:
    error = error_of(b"\x80\x02K\x01\xffN.")
    assert isinstance(error, PickleError)
    assert error.position == 4


def test_what_was_seen_before_the_error_is_kept() -> None:
    result = read_pickle(SYSTEM + b")R\xff")
    assert isinstance(result.error, PickleError)
    assert (list(result.globals), result.called) == (["os.system"], {"os.system"})


# ---- shapes that explode


def test_lists_that_hold_themselves() -> None:
    value = value_of(b"]q\x00h\x00a.")
    assert value[0] is value
    both = value_of(b"]q\x00}q\x01" + text("up") + b"h\x00sa.")
    assert both[0]["up"] is both
    assert list(find_tensors(both)) == []


def test_a_hundred_thousand_levels() -> None:
    depth = 100_000
    for stream in (b"]" * depth + b"a" * (depth - 1), b")" + b"\x85" * depth):
        assert read_pickle(stream + b".").error is None


def test_forty_levels_of_doubling() -> None:
    stream = b"]q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40)) + b"."
    with processor_seconds_below(10):
        value = value_of(stream)
    assert value[0] is value[1]


def fan(levels: int, width: int = 60) -> bytes:
    """Tuples of tuples: `width ** levels` leaves for who walks, or hashes, them all."""
    first = b"K\x01" + put(0)
    return first + b"".join(b"0(" + get(i) * width + b"t" + put(i + 1) for i in range(levels))


def test_a_key_that_would_take_for_ever_to_hash() -> None:
    with processor_seconds_below(10):
        for levels in (3, 6, 12):
            key = fan(levels)
            for stream in (
                b"}" + key + b"Ns.",
                b"}(" + key + b"Nu.",
                b"(" + key + b"Nd.",
                b"\x8f(" + key + b"\x90.",
                b"(" + key + b"\x91.",
            ):
                assert isinstance(error_of(stream), LimitError)
            for path in ("builtins.set", "builtins.frozenset"):
                assert isinstance(error_of(call(path, b"(" + key + b"l") + b"."), LimitError)


def test_equal_keys_that_would_take_for_ever_to_compare() -> None:
    def tower(first: int) -> bytes:
        levels = b"K\x01\x85" + put(first)
        for index in range(first, first + 40):
            pairs = b"".join(get(index) + integer(n) + b"\x86" for n in (0, 1))
            levels += b"0(" + pairs + b"\x91" + put(index + 1)
        return levels

    with processor_seconds_below(10):
        assert isinstance(error_of(b"}(" + tower(0) + b"N" + tower(100) + b"Nu."), LimitError)


def test_plain_compound_keys_are_no_trouble() -> None:
    keys = [(1, "a", (2.5, None)), frozenset({1, (2, 3)}), tuple(range(300))]
    data = pickle.dumps(dict.fromkeys(keys, 1), 4)
    assert value_of(data) == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("protocol", range(6))
def test_sets_of_tuples_are_plain_at_every_protocol(protocol: int) -> None:
    value = {"pairs": {(1, 2), (3, (4, 5))}, "frozen": frozenset({("a", 1)})}
    assert value_of(pickle.dumps(value, protocol)) == value


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that `work` held at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "stream",
    [
        b"X\xff\xff\xff\xffabc.",
        b"B\xff\xff\xff\x7fabc.",
        b"T\xff\xff\xff\x7fabc.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\xffabc.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x8b\xff\xff\xff\x7fabc.",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"Nr\xff\xff\xff\xff.",
        b"Np99999999999999\n.",
    ],
)
def test_a_huge_declared_length_allocates_nothing(stream: bytes) -> None:
    assert peak_of(lambda: error_of(stream)) < 1 << 17


def hundred_copies(path: str, source: bytes) -> bytes:
    """A hundred calls that each would copy the same big thing out of the memo."""
    return source + put(0) + b"0" + streams.listed(*[call(path, get(0))] * 100) + b"."


MILLION = 1 << 20


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("builtins.bytearray", b"B" + struct.pack("<I", MILLION) + bytes(MILLION)),
        ("_codecs.encode", text("x" * MILLION)),
        ("torch.storage._load_from_bytes", b"\x96" + struct.pack("<Q", MILLION) + bytes(MILLION)),
        ("builtins.set", b"](" + b"".join(map(integer, range(50_000))) + b"e"),
        ("builtins.frozenset", b"](" + b"".join(map(integer, range(50_000))) + b"e"),
        ("torch.Size", b"(" + b"".join(map(integer, range(50_000))) + b"t"),
        ("collections.OrderedDict", b"](" + b"NN\x86" * 50_000 + b"e"),
    ],
)
def test_copies_of_one_thing_do_not_pile_up(path: str, source: bytes) -> None:
    stream = hundred_copies(path, source)
    assert isinstance(error_of(stream), LimitError)
    # One copy of each thing that is spelt is what honest streams have.
    assert read_pickle(source + b"0" + streams.listed(call(path, source)) + b".").error is None
    assert peak_of(lambda: read_pickle(stream)) < 20 * MILLION


def test_failing_calls_do_not_pile_up() -> None:
    """A call with a million arguments, again and again out of the memo."""
    stream = b"(" + b"N" * 50_000 + b"t" + put(0) + b"0" + name("builtins.complex") + put(1) + b"0"
    result = read_pickle(stream + streams.listed(*[get(1) + get(0) + b"R"] * 100) + b".")
    assert isinstance(result.error, LimitError)


def test_texts_of_errors_are_few_and_short() -> None:
    stream = streams.listed(*[call("builtins.complex", text("x" * 100))] * 3000) + b"."
    result = read_pickle(stream)
    assert result.error is None
    assert len(result.malformed_calls) == 1000


@pytest.mark.parametrize(
    "stream",
    [
        call("torch._utils._rebuild_device_tensor_from_cpu_tensor", streams.tensor(streams.storage()), name("torch.float32"), b"h\x28", b"\x89"),
        call("torch._utils._rebuild_wrapper_subclass", b"h\x28", *[b"N"] * 7),
        call("torch._utils._rebuild_meta_tensor_no_storage", b"h\x28", b"))", b"\x89"),
        call("torch._utils._rebuild_qtensor", streams.storage(), b"K\x00))", b"h\x28", b"\x89N"),
        call("torch._utils._rebuild_sparse_tensor", b"h\x28", b")"),
        call("builtins.complex", b"h\x28"),
        b"h\x28Q",
    ],
)  # fmt: skip
def test_what_doubles_is_never_spelt_out(stream: bytes) -> None:
    """Forty levels of pairs, where a call expects a device, a class, a dtype: text would be 2**40."""
    doubling = b"](K\x00" + put(0) + b"".join(get(i) * 2 + b"\x86" + put(i + 1) for i in range(40))
    with processor_seconds_below(10):
        result = read_pickle(doubling + stream + b"e.")
        assert result.error is None
        assert result.malformed_calls


def test_integers_with_one_hash() -> None:
    """Python hashes integers modulo 2**61 - 1: a dictionary of such keys takes quadratic time."""
    prime = (1 << 61) - 1
    for spell in (lambda n: integer(n * prime), lambda n: integer(n * prime) + b"\x85"):
        keys = [spell(n) + b"N" for n in range(1, 50_000)]
        for stream in (
            b"}(" + b"".join(keys) + b"u.",
            b"}" + b"".join(key + b"s" for key in keys) + b".",
            b"\x8f(" + b"".join(keys) + b"\x90.",
            call("builtins.set", b"](" + b"".join(keys) + b"e") + b".",
        ):
            with processor_seconds_below(10):
                assert isinstance(error_of(stream), LimitError)
    honest = {n << 61: n for n in range(5000)} | {(n, str(n)): n for n in range(5000)}
    assert value_of(pickle.dumps(honest, 2)) == honest


def test_escapes_that_python_warns_about() -> None:
    assert value_of(b"S'\\d\\777\\x41\\\\q'\n.") == "\\d\xffA\\q".encode("latin-1")


def test_appending_one_by_one_to_an_object_takes_linear_time() -> None:
    count = 80_000
    stream = name("m.L") + b")\x81" + b"Na" * count + b"NNs" * count + b"."
    with processor_seconds_below(5):
        value = value_of(stream)
        assert (len(value.items), len(value.pairs)) == (count, count)


# ---- limits, each hit once


@pytest.mark.parametrize(
    ("limit", "value", "stream"),
    [
        ("pickle_bytes", 10, b"X\x10\x00\x00\x00" + b"a" * 16 + b"."),
        ("opcodes", 5, b"NNNNNN."),
        ("memo_entries", 300, b"Nr\x2d\x01\x00\x00."),
        ("memo_entries", 300, b"Np301\n."),
        ("memo_entries", 3, b"N\x94\x94\x94\x94\x94\x94."),
        ("integer_bytes", 4, b"\x8a\x05\x01\x01\x01\x01\x01."),
        ("integer_bytes", 4, b"\x8b\x05\x00\x00\x00\x01\x01\x01\x01\x01."),
        ("integer_bytes", 4, b"I1234567890\n."),
        ("integer_bytes", 4, b"L1234567890L\n."),
    ],
)
def test_each_limit(limit: str, value: int, stream: bytes) -> None:
    assert read_pickle(stream).error is None
    error = error_of(stream, limits=DEFAULT_LIMITS._replace(**{limit: value}))
    assert isinstance(error, LimitError)
    assert error.limit == limit


def test_the_depth_of_a_key() -> None:
    key = b"N" + b"\x85" * 60
    error = error_of(b"}" + key + b"Ns.")
    assert isinstance(error, LimitError)
    assert error.limit == "depth"


def test_digits_that_python_refuses_to_spell() -> None:
    """CVE-2020-10735: decimal text costs quadratic time."""
    with processor_seconds_below(10):
        assert isinstance(error_of(b"L" + b"9" * 2_000_000 + b"L\n."), LimitError)


# ---- other manners


def test_collecting_garbage_is_afterwards_as_it_was() -> None:
    before = gc.isenabled()
    try:
        for switch, state in ((gc.enable, True), (gc.disable, False)):
            switch()
            for stream in (b"N.", b"\xff"):
                read_pickle(stream)
                assert gc.isenabled() is state
    finally:
        (gc.enable if before else gc.disable)()


def test_a_persistent_id_that_makes_no_sense_stays_visible() -> None:
    for pid in (
        b"K\x01",
        b")",
        text("x"),
        b"(" + text("storage") + b"NNNNt",
        text("module") + b"\x85",
    ):
        result = read_pickle(pid + b"Q.")
        assert isinstance(result.value, Opaque)
        assert [call for call, _ in result.malformed_calls] == ["persistent id"]


def test_a_tensor_of_torch() -> None:
    value = value_of(PROTO_2 + streams.tensor(streams.storage("7", 9), 1, (2, 3), (3, 1)) + b".")
    assert isinstance(value, TensorValue)
    assert (value.dtype, value.offset, value.shape, value.stride) == ("float32", 1, (2, 3), (3, 1))
    assert isinstance(value.storage, StorageRef)
    assert (value.storage.key, value.storage.numel, value.storage.device) == ("7", 9, "cpu")


def test_an_ordered_dict_keeps_what_is_set_on_it() -> None:
    stream = (
        call("collections.OrderedDict") + b"(" + text("w") + b"Nu}" + text("_metadata") + b"Nsb."
    )
    value = value_of(stream)
    assert isinstance(value, OrderedMap)
    assert (dict(value), value.attributes) == ({"w": None}, {"_metadata": None})
    assert value_of(call("collections.OrderedDict") + b".").attributes == {}


def test_pickles_of_real_checkpoints_are_read_to_the_end() -> None:
    rng = random.Random(1)
    files = [*CORPUS.rglob("*.pt"), *CORPUS.rglob("*.ckpt")]
    rng.shuffle(files)
    read = 0
    for file in files:
        if not zipfile.is_zipfile(file) or "no_crc32" in file.name:
            continue
        with zipfile.ZipFile(file) as archive:
            for member in archive.namelist():
                if member.endswith(".pkl"):
                    data = archive.read(member)
                    result = read_pickle(data)
                    assert (result.error, result.end) == (None, len(data)), file
                    named = pickletools_globals(data)
                    assert named is None or set(result.globals) == named
                    read += 1
    assert read > 50


def pickletools_globals(data: bytes) -> set[str] | None:
    """The names of a protocol 2 stream's globals, by `pickletools`; None for later protocols."""
    names = set()
    for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
        if opcode.name in ("STACK_GLOBAL", "INST"):
            return None
        if opcode.name == "GLOBAL":
            names.add(str(argument).replace(" ", "."))
    return names
