"""A tensor read in one stride leaves the same behind as its 33 opcodes read one by one."""

from __future__ import annotations

import struct
import tracemalloc
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.formats import static_pickle, tensor_run
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.pickle_machine import Machine
from ckpttool.formats.rebuild import storage_from_persistent_id
from ckpttool.formats.values import TensorValue
from tests.ckpttool.formats.streams import PROTO_2, canonical, integer, name, put, text

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"

# Where the prelude of `stream` keeps what every tensor's spelling refers to.
STORAGE, FLOAT, CPU, ORDERED, REBUILD, LONG, NUMBER, FAKE = range(8)


def outcome(stream: bytes, limits: ReaderLimits = DEFAULT_LIMITS) -> tuple[Any, ...]:
    """All that one reading leaves behind, its whole memo included."""
    machine = Machine(stream, limits, storage_from_persistent_id)
    static_pickle.interpret(machine, 0)
    result = machine.result
    machine.memo.close()
    memo = [part for item in sorted(machine.memo.items()) for part in item]
    return (
        canonical([memo, result.value]),
        None if result.error is None else (type(result.error), str(result.error)),
        result.end,
        list(result.globals),
        result.called,
        result.computed_calls,
        result.refused_opcodes,
        result.malformed_calls,
        result.nested,
    )


def compare(
    stream: bytes, monkeypatch: pytest.MonkeyPatch, limits: ReaderLimits = DEFAULT_LIMITS
) -> int:
    """Reads with strides and without; gives how many strides there were."""
    strides = 0
    real = tensor_run.TensorRun.read

    def counting(run: tensor_run.TensorRun, *where: int) -> Any:
        nonlocal strides
        found = real(run, *where)
        strides += found is not None
        return found

    with monkeypatch.context() as patch:
        patch.setattr(tensor_run.TensorRun, "read", counting)
        with_strides = outcome(stream, limits)
        patch.setattr(tensor_run.TensorRun, "read", lambda run, *where: None)
        without = outcome(stream, limits)
    assert with_strides == without
    return strides


# ---- real files


@cache
def pickles() -> dict[str, bytes]:
    found = {}
    for path in sorted([*CORPUS.rglob("*.pt"), *CORPUS.rglob("*.ckpt")]):
        if zipfile.is_zipfile(path) and "no_crc32" not in path.name:
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    if member.endswith(".pkl"):
                        found[f"{path.relative_to(CORPUS)} {member}"] = archive.read(member)
    return found


def test_every_pickle_of_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    strides = {file: compare(data, monkeypatch) for file, data in pickles().items()}
    assert len(strides) > 50
    (many,) = (count for file, count in strides.items() if "many_tensors" in file)
    assert many > 2900
    assert sum(1 for count in strides.values() if count) > 10


# ---- streams made up, honest and forged


class Writer:
    """Writes a stream with the C pickler's manners: each object memoized under the next number."""

    def __init__(self, start: int = 300) -> None:
        prelude = (
            *(text("storage"), name("torch.FloatStorage"), text("cpu")),
            *(name("collections.OrderedDict"), name("torch._utils._rebuild_tensor_v2")),
            *(name("torch.LongStorage"), integer(7), name("evil.OrderedDict")),
        )
        self.out = PROTO_2 + b"".join(
            piece + put(index) + b"0" for index, piece in enumerate(prelude)
        )
        self.out += b"]"
        self.next = start
        self.tensors: list[int] = []

    def put(self) -> bytes:
        """LONG_BINPUT of the next number."""
        self.next += 1
        return b"r" + struct.pack("<I", self.next - 1)

    def get(self, index: int, long: bool = False) -> bytes:
        if index < 256 and not long:
            return b"h" + bytes([index])
        return b"j" + struct.pack("<I", index)

    def extent(self, sizes: tuple[int, ...]) -> bytes:
        if not sizes:
            return b")"
        body = b"".join(map(integer, sizes))
        few = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(sizes))
        return (body + few if few else b"(" + body + b"t") + self.put()

    def tensor(
        self,
        key: str = "0",
        numel: int = 6,
        offset: int = 0,
        shape: tuple[int, ...] = (2, 3),
        stride: tuple[int, ...] = (3, 1),
        grad: bool = False,
        *,
        gets: tuple[int, int, int, int] = (STORAGE, FLOAT, CPU, ORDERED),
        long: bool = False,
    ) -> Writer:
        """One call of `_rebuild_tensor_v2`, appended to the list."""
        tag, kind, device, hooks = (self.get(index, long) for index in gets)
        out = self.get(REBUILD) + b"((" + tag + kind + text(key) + self.put() + device
        out += integer(numel) + b"t" + self.put() + b"Q" + integer(offset)
        out += self.extent(shape) + self.extent(stride) + (b"\x88" if grad else b"\x89")
        out += hooks + b")R" + self.put() + b"t" + self.put() + b"R"
        self.tensors.append(self.next)
        self.out += out + self.put() + b"a"
        return self

    def add(self, piece: bytes) -> Writer:
        self.out += piece
        return self

    def done(self) -> bytes:
        return self.out + b"."


sizes = st.lists(st.sampled_from([0, 1, 2, 3, 255, 256, 65_535, 65_536, 2**31 - 1]), max_size=6)


@settings(max_examples=150)
@given(data=st.data())
def test_honest_tensors(data: st.DataObject) -> None:
    start = data.draw(st.sampled_from([256, 300, 70_000]))
    writer = Writer(start)
    count = data.draw(st.integers(1, 5))
    for number in range(count):
        shape = tuple(data.draw(sizes))
        stride = tuple(data.draw(st.sampled_from([0, 1, 6, 300, 70_000])) for _ in shape)
        gets = (STORAGE, data.draw(st.sampled_from([FLOAT, LONG])), CPU, ORDERED)
        writer.tensor(
            str(number * 99),
            data.draw(st.sampled_from([0, 5, 300, 70_000])),
            data.draw(st.sampled_from([0, 1, 400, 70_000])),
            shape,
            stride,
            data.draw(st.booleans()),
            gets=gets,
            long=data.draw(st.booleans()),
        )
        if data.draw(st.booleans()):  # whatever the memo holds by now, used again
            index = data.draw(st.integers(0, FAKE) | st.integers(start, writer.next - 1))
            writer.add(writer.get(index) + b"a")
    with pytest.MonkeyPatch.context() as patch:
        assert compare(writer.done(), patch) == count


def test_every_entry_of_the_memo_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Writer().tensor("0").tensor("1", shape=(), stride=(), numel=1)
    for index in range(300, plain.next):
        writer = Writer().tensor("0").tensor("1", shape=(), stride=(), numel=1)
        stream = writer.add(writer.get(index) + b"a").done()
        assert compare(stream, monkeypatch) == 2
        value = static_pickle.read_pickle(stream).value
        assert len(value) == 3


def test_what_was_left_out_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are in the memo twice: by themselves, and among the arguments."""
    writer = Writer().tensor()
    hooks, arguments = writer.next - 3, writer.next - 2
    for first, second in ((hooks, arguments), (arguments, hooks)):
        both = writer.get(first) + b"a" + writer.get(second) + b"a"
        # And it can be changed through the one name and seen through the other.
        changed = writer.get(hooks) + text("x") + b"K\x01s0"
        assert compare(writer.out + both + changed + b".", monkeypatch) == 1


FORGERIES: dict[str, bytes] = {
    "a later entry under a number that was left out": (
        Writer().tensor().add(b"K\x63r" + struct.pack("<I", 302) + b"0j\x2e\x01\x00\x00a").done()
    ),
    "the same numbers again": (
        Writer().tensor("0").out + Writer().tensor("7").out[len(Writer().out) :] + b"."
    ),
    "lower numbers than before": (
        Writer(400).tensor("0").out + Writer(300).tensor("7").out[len(Writer().out) :] + b"."
    ),
    "numbers among those of another tensor": (
        Writer(300).tensor("0").out + Writer(303).tensor("7").out[len(Writer().out) :] + b"."
    ),
    "numbers that were taken before": (
        Writer()
        .add(b"".join(b"K\x05r" + struct.pack("<I", n) + b"0" for n in (300, 302, 309)))
        .tensor()
        .add(b"j\x2e\x01\x00\x00a")
        .done()
    ),
    "a gap, filled before": (
        Writer().add(b"K\x05r" + struct.pack("<I", 1000) + b"0").tensor().done()
    ),
    "MEMOIZE, which counts": Writer().tensor().add(b"N\x94aN\x94a").tensor("1").done(),
    "MEMOIZE first": Writer().add(b"N\x94a").tensor().done(),
    "PUT in decimals": Writer().tensor().add(b"Np302\na").add(b"g302\na").tensor("1").done(),
    "GET in decimals": Writer().tensor().add(b"g302\nag305\na").done(),
    "BINPUT over what is referred to": (
        Writer().tensor().add(name("torch.LongStorage") + put(FLOAT) + b"0").tensor("1").done()
    ),
    "BINPUT of nonsense over what is referred to": (
        Writer().tensor().add(integer(5) + put(FLOAT) + b"0").tensor("1").done()
    ),
    "LONG_BINPUT over what is referred to": (
        Writer()
        .tensor()
        .add(name("torch.LongStorage") + b"r" + struct.pack("<I", FLOAT) + b"0")
        .tensor("1")
        .done()
    ),
    "the rebuilder replaced": (
        Writer().tensor().add(name("os.system") + put(REBUILD) + b"0").tensor("1").done()
    ),
    "another word than storage": Writer().tensor(gets=(CPU, FLOAT, CPU, ORDERED)).done(),
    "a class that is no storage": Writer().tensor(gets=(STORAGE, REBUILD, CPU, ORDERED)).done(),
    "a class that is text": Writer().tensor(gets=(STORAGE, CPU, CPU, ORDERED)).done(),
    "a device that is no text": Writer().tensor(gets=(STORAGE, FLOAT, NUMBER, ORDERED)).done(),
    "an OrderedDict of another module": Writer().tensor(gets=(STORAGE, FLOAT, CPU, FAKE)).done(),
    "hooks that are no class": Writer().tensor(gets=(STORAGE, FLOAT, CPU, CPU)).done(),
    "an entry that was never set": Writer().tensor(gets=(STORAGE, 99, CPU, ORDERED)).done(),
    "an entry that is set in this very tensor": (
        Writer().tensor(gets=(STORAGE, FLOAT, 300, ORDERED), long=True).done()
    ),
    "an entry that was left out before": (
        Writer().tensor().tensor("1", gets=(STORAGE, FLOAT, 301, ORDERED), long=True).done()
    ),
    "another length of stride": Writer().tensor(shape=(2, 3), stride=(1,)).done(),
    "a shape but no stride": Writer().tensor(shape=(2,), stride=()).done(),
    "no shape but a stride": Writer().tensor(shape=(), stride=(1,)).done(),
    "a key that is no number": Writer().tensor("x").done(),
    "a key of twenty digits": Writer().tensor("9" * 20).done(),
    "a negative offset": Writer().tensor(offset=-1).done(),
    "a negative extent": Writer().tensor(shape=(-1, 2)).done(),
    "two integers in a tuple of one": (
        Writer().tensor(shape=(2, 3), stride=(3, 1)).done().replace(b"\x86", b"\x85")
    ),
    "one integer in a tuple of two": (
        Writer().tensor(shape=(2,), stride=(3,)).done().replace(b"\x85", b"\x86")
    ),
    "three integers in a tuple of two": (
        Writer().tensor(shape=(2, 3, 4), stride=(3, 1, 1)).done().replace(b"\x87", b"\x86")
    ),
    "a key whose length is another": (
        Writer().tensor("12").done().replace(text("12"), b"X\x01\x00\x00\x0012")
    ),
    "a stack that holds something else": (
        Writer().add(b"K\x01").add(b"0").add(name("os.system") + b"((" + text("a") + b"ttRa").done()
    ),
    "the first mark inside another": Writer().add(b"(").tensor().add(b"l").done(),
    "cut in the middle": Writer().tensor().tensor("1").done()[:-30],
    "garbage behind": Writer().tensor().add(b"\xff").done(),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forgery(forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(FORGERIES[forgery], monkeypatch)


def test_the_memo_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Writer().tensor().tensor("1").done()
    for entries in (300, 304, 308, 309, 312, 317, 318):
        compare(stream, monkeypatch, DEFAULT_LIMITS._replace(memo_entries=entries))


def test_a_number_far_away_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer().tensor()
    last = b"R" + b"r" + struct.pack("<I", writer.next - 1)
    assert writer.out.count(last) == 1
    stream = writer.out.replace(last, b"R" + b"r\xff\xff\xff\xff") + b"."
    for limits in (DEFAULT_LIMITS, DEFAULT_LIMITS._replace(memo_entries=1 << 33)):
        tracemalloc.start()
        compare(stream, monkeypatch, limits)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def test_persistent_ids_of_another_kind_are_asked_for() -> None:
    stream = Writer().tensor().tensor("1").done()
    asked = []

    def persistent(pid: Any) -> Any:
        asked.append(pid[2])
        return storage_from_persistent_id(pid)

    value = static_pickle.read_pickle(stream, persistent=persistent).value
    assert asked == ["0", "1"]
    assert all(isinstance(item, TensorValue) for item in value)


# ---- anything at all


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_streams(data: st.DataObject) -> None:
    """One tensor's spelling, then bytes changed at random, mostly where the strides are."""
    writer = Writer().tensor("10", shape=(2, 3)).tensor("11", shape=(4,), stride=(1,))
    writer.tensor("12", shape=(), stride=()).tensor("13", shape=(2, 2, 2, 2), stride=(8, 4, 2, 1))
    content = bytearray(writer.done())
    begin = len(Writer().out)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(begin, len(content) - 1))
        content[place] = data.draw(
            st.integers(0, 255) | st.sampled_from(list(b"(tRQrqhjKMJX)\x85\x86\x87\x88\x89"))
        )
    with pytest.MonkeyPatch.context() as patch:
        compare(bytes(content), patch, DEFAULT_LIMITS._replace(memo_entries=100_000))


@settings(max_examples=150)
@given(data=st.data())
def test_mutated_pickles_of_real_files(data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([f for f, p in pickles().items() if 8000 < len(p) < 20_000]))
    content = bytearray(pickles()[file])
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with pytest.MonkeyPatch.context() as patch:
        compare(bytes(content), patch, DEFAULT_LIMITS._replace(memo_entries=100_000))
