from __future__ import annotations

import io
import math
import pickle
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import FormatError
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.mending.bits import BitMend, find_bits, odds_in_words
from ckpttool.mending.damaged import DamagedRecord, damaged_record, patched
from ckpttool.mending.elements import index_of
from ckpttool.model.checkpoint import Checkpoint, open_checkpoint
from ckpttool.model.tensor import TensorRef
from tests import corrupt

Damage = Callable[..., Checkpoint]


@pytest.fixture
def damage(tmp_path: Path) -> Iterator[Damage]:
    """A function that flips one bit of a record in a file, and opens the file."""
    opened: list[Checkpoint] = []

    def flip(data: bytes, record: str, offset: int, bit: int) -> Checkpoint:
        path = tmp_path / f"step_{len(opened):012}.pt"
        start = corrupt.content_range(data, record).start
        path.write_bytes(corrupt.flip_bit(data, start + offset, bit))
        opened.append(open_checkpoint(path))
        return opened[-1]

    yield flip
    for checkpoint in opened:
        checkpoint.close()


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def the_bit(checkpoint: Checkpoint, record: str = "data/0", **options: Any) -> BitMend:
    assert checkpoint.container is not None
    damaged = damaged_record(checkpoint.container, checkpoint.container.records[record])
    (found,) = find_bits(damaged, checkpoint.tensors.values(), **options)
    return found


def turned_back(mend: BitMend, content: bytes) -> bytes:
    return corrupt.flip_bit(content, mend.offset, mend.bit)


def in_memory(content: bytes, recorded: int, name: str = "data/0", **facts: Any) -> DamagedRecord:
    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    return DamagedRecord(name, len(content), recorded, zlib.crc32(content), read, **facts)


# What a bit of a tensor stands for.

FLOATS = ("float64", "float32", "float16", "bfloat16")
EIGHTS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("name", [*FLOATS, *EIGHTS, *INTEGERS, "bool", "complex64", "complex128"])
def test_value_before_and_after_as_torch_has_them(name: str, damage: Damage) -> None:
    dtype = getattr(torch, name)
    numbers = torch.randint(0, 100, (6, 5), generator=torch.Generator().manual_seed(1))
    tensor = (numbers % 2 if name == "bool" else numbers).to(dtype).T
    raw = torch.frombuffer(bytearray(bytes(tensor.untyped_storage())), dtype=torch.uint8)
    width = tensor.element_size()
    data = saved({"model": {"weight": tensor}})
    for element, byte, bit in ((0, 0, 0), (17, width - 1, 6), (29, width // 2, 3)):
        if name == "bool":
            bit = 0
        changed = raw.clone()
        changed[element * width + byte] ^= 1 << bit
        expected = changed.view(dtype).view(6, 5).T
        row, column = element % 5, element // 5
        found = the_bit(damage(data, "data/0", element * width + byte, bit))
        assert found[:4] == ("data/0", 30 * width, element * width + byte, bit)
        assert found.tensors == ("model.weight",)
        assert found.place == f"model.weight[{row}, {column}]"
        assert found.dtype == name
        assert same(found.before, expected[row, column].item())
        assert same(found.after, tensor[row, column].item())
        assert type(found.after) is type(tensor[row, column].item())
        assert found.refused is None
        assert found.places == 1


def same(first: Any, second: Any) -> bool:
    return bool(first == second or (first != first and second != second))


def test_a_float_that_grew_beyond_measure_is_told_in_words(damage: Damage) -> None:
    data = saved({"model": {"weight": torch.tensor([1.0, 0.0123])}})
    found = the_bit(damage(data, "data/0", 7, 6))
    (before,) = struct.unpack(
        "<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 0.0123))[0] ^ 1 << 30)
    )
    assert found.before == before
    assert found.after == struct.unpack("<f", struct.pack("<f", 0.0123))[0]
    assert found.change == "4.185473e+36 -> 0.0123, 3.4e+38 times smaller"
    assert found.words == f"bit 6 of byte 7 of data/0 (model.weight[1], float32): {found.change}"


@pytest.mark.parametrize(
    ("value", "byte", "bit", "words"),
    [
        (2.0, 7, 7, "-2.0 -> 2.0, its sign turned"),
        (1.0, 6, 3, "1.5 -> 1.0, 33 % smaller"),
        (1.5, 6, 3, "1.0 -> 1.5, 50 % larger"),
        (1.0, 7, 6, "inf -> 1.0"),
        (1.5, 7, 6, "nan -> 1.5"),
        (0.0, 7, 6, "2.0 -> 0.0"),
        (1.0, 0, 0, "1.0000000000000002 -> 1.0, 2.2e-14 % smaller"),
        (3e-5, 7, 6, "5.393079404586948e+303 -> 3e-05, more than 1e+308 times smaller"),
    ],
)
def test_change_in_words(value: float, byte: int, bit: int, words: str, damage: Damage) -> None:
    data = saved({"weight": torch.tensor(value, dtype=torch.float64)})
    assert the_bit(damage(data, "data/0", byte, bit)).change == words


def test_bytes_that_are_no_bool(damage: Damage) -> None:
    found = the_bit(damage(saved({"mask": torch.tensor([True, False])}), "data/0", 0, 4))
    assert (found.before, found.after) == (17, True)
    assert found.change == "17 (no bool) -> True"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantized_tensor_with_what_its_integers_stand_for(damage: Damage) -> None:
    tensor = torch.quantize_per_tensor(torch.tensor([1.0, 2.0, -1.0]), 0.5, 3, torch.qint8)
    found = the_bit(damage(saved({"q": tensor}), "data/0", 1, 6))
    assert (found.before, found.after) == (71, 7)
    assert found.change == "71 (= 34) -> 7 (= 2)"


def test_a_sparse_tensor_by_the_part_that_was_hit(damage: Damage) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    data = saved({"s": dense.to_sparse()})
    values = next(
        name for name, content in corrupt.read_records(data) if content == struct.pack("<2f", 2, 3)
    )
    record = values.partition("/")[2]
    found = the_bit(damage(data, record, 4, 0), record)
    assert found.tensors == ("s.values",)
    assert found.after == 3.0


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_types_that_numpy_lacks(damage: Damage) -> None:
    half = torch.tensor([1 + 2j, 3 - 4j]).to(torch.complex32)
    found = the_bit(damage(saved({"z": half}), "data/0", 7, 7))
    assert (found.before, found.after) == (3 + 4j, 3 - 4j)
    assert found.place == "z[1]"
    scale = torch.tensor([1.0, 8.0]).to(torch.float8_e8m0fnu)
    found = the_bit(damage(saved({"scale": scale}), "data/0", 1, 0))
    assert (found.before, found.after) == (16.0, 8.0)
    pairs = torch.tensor([0x21, 0x43], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found = the_bit(damage(saved({"pairs": pairs}), "data/0", 1, 7))
    assert found.change == "0xc3 -> 0x43"
    assert found.place == "pairs[1]"


def test_several_elements_to_a_byte() -> None:
    value = TensorValue(StorageRef("quint4x2", "0", "cpu", 4), 1, (2, 3), (3, 1), False, "quint4x2")
    content = bytes((0x21, 0x43, 0x65, 0x87))
    healthy = corrupt.flip_bit(content, 1, 6)
    (found,) = find_bits(in_memory(content, zlib.crc32(healthy)), [TensorRef("q", value, None)])
    # Element 3 of the storage, the tensor's third: the upper half of the byte.
    assert (found.place, found.before, found.after) == ("q[0, 2]", 4, 0)


def test_all_tensors_that_share_the_byte_are_named(damage: Damage) -> None:
    base = torch.arange(12.0)
    state = {"a": base, "b": base[4:8], "c": base[::5], "d": base.view(3, 4)}
    found = the_bit(damage(saved(state), "data/0", 4 * 5 + 1, 2))
    assert found.tensors == ("a", "b", "c", "d")
    found = the_bit(damage(saved(state), "data/0", 4 * 9 + 1, 2))
    assert found.tensors == ("a", "d")


def test_bytes_that_no_tensor_reaches(damage: Damage) -> None:
    found = the_bit(damage(saved({"a": torch.arange(12.0)[:3]}), "data/0", 40, 2))
    assert found.tensors == ()
    assert found.tensor is found.place is found.dtype is None
    assert found.before != found.after


def test_an_expanded_tensor_and_one_that_overlaps_itself(damage: Damage) -> None:
    base = torch.arange(6.0)
    windows = torch.as_strided(base, (3, 4), (1, 1))
    state = {"expanded": base[:1].expand(5, 7, 1), "windows": windows}
    assert the_bit(damage(saved(state), "data/0", 2, 0)).tensors == ("expanded", "windows")
    found = the_bit(damage(saved(state), "data/0", 4 * 5, 0))
    assert found.tensors == ("windows",)
    assert found.place == "windows[2, 3]"


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((3, 2), (2, 3)),
        ((4, 3), (3, 5)),
        ((2, 3, 4), (12, 1, 3)),
        ((3, 3), (5, 7)),
        ((2, 0), (1, 1)),
    ],
)
def test_which_elements_a_tensor_of_any_strides_has(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    numbers = torch.arange(40)
    there = set(torch.as_strided(numbers, shape, stride).flatten().tolist())
    for position in range(-1, 41):
        index = index_of(position, shape, stride)
        assert (index is not None) == (position in there)
        if index is not None:
            assert torch.as_strided(numbers, shape, stride)[index].item() == position


def test_big_endian_numbers(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, 2.5, -3.0])
    records = [
        (
            name,
            {"byteorder": b"big", "data/0": struct.pack(">3f", *tensor)}.get(
                name.partition("/")[2], content
            ),
        )
        for name, content in corrupt.read_records(saved({"w": tensor}))
    ]
    data = corrupt.torch_zip(records)
    path = tmp_path / "big.pt"
    path.write_bytes(corrupt.flip_bit(data, corrupt.content_range(data, "data/0").start + 8, 7))
    with open_checkpoint(path) as checkpoint:
        found = the_bit(checkpoint)
    assert (found.before, found.after, found.place) == (3.0, -3.0, "w[2]")


# Records of other content.


def test_a_pickle_that_reads_either_way_says_what_changes(damage: Damage) -> None:
    data = saved({"optimizer": {"param_groups": [{"lr": 0.5, "params": [0]}]}})
    content = dict(corrupt.read_records(data))["archive/data.pkl"]
    offset = content.index(struct.pack(">d", 0.5))
    checkpoint = damage(data, "data.pkl", offset, 4)
    assert checkpoint.readable
    found = the_bit(checkpoint, "data.pkl")
    (wrong,) = struct.unpack(">d", corrupt.flip_bit(struct.pack(">d", 0.5), 0, 4))
    assert found.change.endswith(f"optimizer.param_groups.0.lr: {wrong!r} -> 0.5")
    assert found.refused is None


def test_a_letter_of_a_key(damage: Damage) -> None:
    data = saved({"model": {"weight": torch.zeros(2)}})
    content = dict(corrupt.read_records(data))["archive/data.pkl"]
    found = the_bit(damage(data, "data.pkl", content.index(b"weight"), 0), "data.pkl")
    assert b"veight" in found.before
    assert b"weight" in found.after
    assert "veight" in found.change
    assert found.change.endswith("model: key 'veight' -> key 'weight'")


def test_a_pickle_that_can_be_read_only_mended(damage: Damage) -> None:
    data = saved({"model": {"weight": torch.zeros(2)}, "step": 3})
    content = dict(corrupt.read_records(data))["archive/data.pkl"]
    checkpoint = damage(data, "data.pkl", len(content) - 1, 0)
    assert not checkpoint.readable
    found = the_bit(checkpoint, "data.pkl")
    assert found.change.endswith("the pickle can be read only with the bit turned back")
    assert found.refused is None
    assert turned_back(found, checkpoint.container.read("data.pkl")) == content  # type: ignore[union-attr]


def test_a_bit_in_what_has_no_meaning(damage: Damage) -> None:
    # What is memoized under a number that is never asked for again.
    content = pickle.dumps({"a": 1}, protocol=2)
    records = [("archive/data.pkl", content), ("archive/version", b"3\n")]
    at = content.index(b"q\x01") + 1
    found = the_bit(damage(corrupt.torch_zip(records), "data.pkl", at, 5), "data.pkl")
    assert found.change.endswith("the pickle means the same either way")


def test_every_bit_of_a_pickle_is_found_whatever_it_breaks() -> None:
    content = dict(corrupt.read_records(saved({"w": torch.zeros(3), "step": 7})))[
        "archive/data.pkl"
    ]
    for bit in range(8 * len(content)):
        damaged = in_memory(
            corrupt.flip_bit(content, bit // 8, bit % 8), zlib.crc32(content), "data.pkl"
        )
        (found,) = find_bits(damaged)
        assert (found.offset, found.bit, found.refused) == (bit // 8, bit % 8, None)


def test_a_mend_that_leaves_no_pickle_is_refused() -> None:
    content = b"this was never a pickle, whatever its name says"
    (found,) = find_bits(
        in_memory(corrupt.flip_bit(content, 3, 3), zlib.crc32(content), "data.pkl")
    )
    assert found.refused == "the pickle can't be read with the bit turned back"


def test_a_record_of_a_file_whose_pickle_is_lost(damage: Damage) -> None:
    data = saved({"w": torch.arange(50.0)})
    data = corrupt.zero_range(data, corrupt.content_range(data, "data.pkl").start, 20)
    checkpoint = damage(data, "data/0", 33, 1)
    assert not checkpoint.readable
    found = the_bit(checkpoint)
    assert (found.offset, found.bit, found.tensors) == (33, 1, ())
    content = struct.pack("<50f", *range(50))
    assert turned_back(found, checkpoint.container.read("data/0")) == content  # type: ignore[union-attr]
    assert (found.before, found.after) == (
        corrupt.flip_bit(content, 33, 1)[21:46],
        content[21:46],
    )


def test_plain_records(damage: Damage) -> None:
    found = the_bit(damage(saved({"w": torch.zeros(1)}), "version", 0, 0), "version")
    assert found.change == "'2\\n' -> '3\\n'"


# How sure it is.


def test_refused_above_the_limit_on_odds() -> None:
    content = bytes(6_000_000)
    damaged = in_memory(corrupt.flip_bit(content, 5_000_000, 5), zlib.crc32(content))
    (found,) = find_bits(damaged)
    assert found.odds == 8 * 6_000_000 / 2**32
    assert found.refused is not None
    assert "1.1 % of cases" in found.refused
    assert "limit (--bit-odds 0.01;" in found.refused
    assert "0.012 allows it" in found.refused
    (allowed,) = find_bits(damaged, bit_odds=0.012)
    assert allowed.refused is None
    assert "1.1 %" in allowed.proof


def test_all_places_of_a_record_where_several_explain_it() -> None:
    # 700 MB of zeros that nobody makes: their checksum with bit 100 set, against that without.
    size = 700_000_000
    block = bytes(10**6)
    damaged_crc = zlib.crc32(corrupt.flip_bit(block, 12, 4))
    healthy = zlib.crc32(block)
    for _ in range(699):
        damaged_crc, healthy = zlib.crc32(block, damaged_crc), zlib.crc32(block, healthy)
    damaged = DamagedRecord(
        "data/0", size, healthy, damaged_crc, lambda offset, length: bytes(length)
    )
    found = find_bits(damaged, bit_odds=1.0)
    assert [8 * item.offset + item.bit for item in found] == [100, 100 + 2**32 - 1]
    assert [item.places for item in found] == [2, 2]
    assert "2 bits explain the checksum" in str(found[0].refused)
    assert found[0].odds == 1
    assert "proves nothing" in found[0].proof


def test_no_bit_explains_two_flips_of_a_small_record() -> None:
    content = random.Random(1).randbytes(2000)
    twice = corrupt.flip_bit(corrupt.flip_bit(content, 3), 1500, 7)
    assert find_bits(in_memory(twice, zlib.crc32(content))) == []
    assert find_bits(in_memory(content, zlib.crc32(content))) == []


@pytest.mark.parametrize(
    ("likelihood", "words"),
    [(0.5, "50 %"), (0.0123, "1.2 %"), (2e-8, "1 in 50,000,000")],
)
def test_odds_in_words(likelihood: float, words: str) -> None:
    assert f" are {words} (8" in odds_in_words(likelihood)


# Records as they come.


def test_a_cut_or_compressed_record_has_no_difference(tmp_path: Path) -> None:
    data = saved({"w": torch.arange(5000.0)})
    cut = tmp_path / "cut.pt"
    cut.write_bytes(corrupt.keep_first(data, corrupt.content_range(data, "data/0").start + 999))
    packed = tmp_path / "packed.pt"
    deflated = corrupt.rezip(data, deflate=True)
    packed.write_bytes(
        corrupt.flip_bit(deflated, corrupt.content_range(deflated, "data/0").start + 50)
    )
    for path, left in ((cut, 999), (packed, 0)):
        with open_checkpoint(path) as checkpoint:
            container = checkpoint.container
            assert container is not None
            record = container.records["data/0"]._replace(crc=1234, size=20_000)
            damaged = damaged_record(container, record)
            assert damaged.computed is None
            assert damaged.difference == 0
            assert find_bits(damaged) == []
            assert len(b"".join(damaged.chunks())) == left


def test_a_record_without_a_checksum_is_nothing_to_start_from(damage: Damage) -> None:
    checkpoint = damage(saved({"w": torch.zeros(4)}), "data/0", 0, 0)
    assert checkpoint.container is not None
    record = checkpoint.container.records["data/0"]._replace(crc=None)
    with pytest.raises(FormatError, match="no checksum"):
        damaged_record(checkpoint.container, record)


def test_a_record_that_is_cut_while_it_is_read() -> None:
    content = bytes(100)
    damaged = DamagedRecord(
        "data/0", 100, zlib.crc32(b"\1" + bytes(99)), zlib.crc32(content), lambda o, n: b""
    )
    with pytest.raises(FormatError, match="was cut while"):
        find_bits(damaged)


@given(st.binary(max_size=200), st.data())
def test_a_patch_lands_in_whatever_chunks_there_are(content: bytes, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(content)))
    mask = data.draw(st.binary(max_size=len(content) - offset))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    chunks = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    expected = bytearray(content)
    for index, byte in enumerate(mask):
        expected[offset + index] ^= byte
    assert b"".join(patched(chunks, offset, mask)) == bytes(expected)


def test_facts_for_json(damage: Damage) -> None:
    found = the_bit(damage(saved({"w": torch.tensor([1 + 2j])}), "data/0", 0, 0))
    facts = found.as_dict()
    assert facts["after"] == "(1+2j)"
    assert facts["tensors"] == ["w"]
    assert facts["words"] == found.words
    assert math.isclose(facts["odds"], 64 / 2**32)
