"""Damaged, odd and hostile zips: each fault is noticed and named, nothing else is raised."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.container import Container
from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.formats.torch_zip import open_zip
from ckpttool.io.reading import FileReader
from tests import corrupt
from tests.ckpttool.formats.support import Opened, bad_records, codes, everything, one

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
BIG = (CORPUS / "torch-2.13.0" / "train_zip.pt").read_bytes()
SMALL = (CORPUS / "torch-2.13.0" / "tensor_bare.pt").read_bytes()
OLD = (CORPUS / "torch-1.6.0" / "quant.pt").read_bytes()


def hundred_records() -> bytes:
    """A file of 100 records, laid out as torch does."""
    contents = random.Random(20)
    records = [("run/data.pkl", contents.randbytes(900)), ("run/byteorder", b"little")]
    records += [(f"run/data/{i}", contents.randbytes(8 * i + 1)) for i in range(97)]
    return corrupt.torch_zip([*records, ("run/version", b"3\n")])


HUNDRED = hundred_records()


def faults(path: Path, data: bytes) -> tuple[set[str], list[str]]:
    """The codes of all that is odd, and the names of records whose checksum is wrong."""
    with Opened(path, data) as container:
        return codes(everything(container)), bad_records(container)


# ---- every flipped byte, every cut


def test_a_healthy_file_of_hundred_records_has_no_fault(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", HUNDRED) as container:
        assert len(container.entries) == 100
    assert faults(tmp_path / "file", HUNDRED) == (set(), [])


def test_every_flipped_byte_of_a_content_is_found_with_its_record(tmp_path: Path) -> None:
    rng = random.Random(1)
    ranges = {name: corrupt.content_range(HUNDRED, name) for name in corrupt.entry_offsets(HUNDRED)}
    places = [(name, offset) for name, span in ranges.items() for offset in span]
    for name, offset in rng.sample(places, 300):
        damaged = corrupt.flip_bit(HUNDRED, offset, rng.randrange(8))
        with Opened(tmp_path / "file", damaged) as container:
            assert bad_records(container) == [name]


def test_every_flipped_byte_outside_of_contents_is_found(tmp_path: Path) -> None:
    rng = random.Random(2)
    contents = corrupt.content_bytes(HUNDRED)
    places = [offset for offset in range(len(HUNDRED)) if offset not in contents]
    for offset in rng.sample(places, 700):
        damaged = corrupt.flip_bit(HUNDRED, offset, rng.randrange(8))
        noticed, bad = faults(tmp_path / "file", damaged)
        assert noticed or bad, f"byte {offset}"


def flip_each_byte(path: Path, data: bytes, bit_of: Callable[[int], int]) -> None:
    """Flips one bit of each byte, and expects that it is noticed."""
    for offset in range(len(data)):
        bit = bit_of(offset)
        noticed, bad = faults(path, corrupt.flip_bit(data, offset, bit))
        assert noticed or bad, f"bit {bit} of byte {offset}"


@pytest.mark.slow
@pytest.mark.parametrize("data", [SMALL, OLD], ids=["torch-2.13", "torch-1.6"])
@pytest.mark.parametrize("first", [0, 4])
def test_every_byte_of_a_small_file_is_found(data: bytes, first: int, tmp_path: Path) -> None:
    """Two bits of each; `python -m benchmarks.damage_everywhere` flips all eight."""
    flip_each_byte(tmp_path / "file", data, lambda offset: (offset + first) % 8)


def test_bytes_of_a_rezipped_file_that_may_change_unseen(tmp_path: Path) -> None:
    rezipped = corrupt.rezip(SMALL)
    entries = corrupt.entry_offsets(rezipped)
    harmless = set()
    for record, entry in entries.items():
        for field in ("made_by", "needed", "internal", "external"):
            offset, width = corrupt.CENTRAL_FIELDS[field]
            harmless |= set(range(entry + offset, entry + offset + width))
        local = corrupt.header_offset(rezipped, record)
        harmless |= set(range(local + 4, local + 6))  # version needed
    for offset in range(len(rezipped)):
        noticed, bad = faults(tmp_path / "file", corrupt.flip_bit(rezipped, offset, offset % 8))
        assert bool(noticed or bad) == (offset not in harmless), offset


def test_every_cut_is_found(tmp_path: Path) -> None:
    rng = random.Random(3)
    near_the_end = range(len(HUNDRED) - 130, len(HUNDRED))
    for length in [*rng.sample(range(len(HUNDRED)), 400), *near_the_end]:
        with Opened(tmp_path / "file", corrupt.keep_first(HUNDRED, length)) as container:
            assert "no-end-record" in codes(container.anomalies), length


@pytest.mark.parametrize("field", sorted(corrupt.CENTRAL_FIELDS))
def test_damaged_directory_field(field: str, tmp_path: Path) -> None:
    width = corrupt.CENTRAL_FIELDS[field][1]
    damaged = corrupt.set_central(BIG, "data/7", field, (1 << (8 * width - 1)) - 3)
    noticed, bad = faults(tmp_path / "file", damaged)
    assert noticed or bad


@pytest.mark.parametrize("field", sorted(corrupt.LOCAL_FIELDS))
def test_damaged_local_field(field: str, tmp_path: Path) -> None:
    damaged = corrupt.set_local(BIG, "data/7", field, 0x0101)
    noticed, _ = faults(tmp_path / "file", damaged)
    assert noticed & {"header-mismatch", "local-header-damaged"}


def test_what_torch_ignores_is_said_to_be_harmless(tmp_path: Path) -> None:
    for damaged in (
        corrupt.set_central(BIG, "data/7", "external", 1),
        corrupt.set_local(BIG, "data/7", "crc", 1),
        corrupt.set_local(BIG, "data/7", "time", 1),
    ):
        with Opened(tmp_path / "file", damaged) as container:
            assert [a.facts["harmless"] for a in everything(container)] == [True]


# ---- cut, zeroed, lengthened


def whole_records(container: Container) -> dict[str, tuple[int, int | None, int]]:
    return {
        r.name: (r.size, r.crc, r.header_offset) for r in container.entries if r.crc is not None
    }


def test_end_record_gone_leaves_everything(tmp_path: Path) -> None:
    with Opened(tmp_path / "whole", BIG) as container:
        expected = whole_records(container)
    with Opened(tmp_path / "file", corrupt.cut_end(BIG, 22)) as container:
        assert one(everything(container), "no-end-record").facts == {"found_by": "zip64 end record"}
        assert whole_records(container) == expected
        assert not any(record.recovered for record in container.entries)
        assert bad_records(container) == []


@pytest.mark.parametrize("mutation", [corrupt.drop_end_records, corrupt.drop_directory])
@pytest.mark.parametrize("deflate", [None, False, True])
def test_directory_gone_leaves_every_record(
    mutation: Callable[[bytes], bytes], deflate: bool | None, tmp_path: Path
) -> None:
    data = BIG if deflate is None else corrupt.rezip(BIG, deflate=deflate)
    with Opened(tmp_path / "whole", data) as container:
        expected = whole_records(container)
        facts = container.facts
    with Opened(tmp_path / "file", mutation(data)) as container:
        assert whole_records(container) == expected
        assert all(record.recovered for record in container.entries)
        assert one(container.anomalies, "no-end-record").facts["found_by"] == "local headers"
        assert container.facts == facts
        assert bad_records(container) == []


def test_sixty_percent_of_a_file(tmp_path: Path) -> None:
    length = len(BIG) * 6 // 10
    with Opened(tmp_path / "whole", BIG) as container:
        expected = {
            name: record
            for name, record in whole_records(container).items()
            if corrupt.content_range(BIG, name).stop + 16 <= length
        }
    with Opened(tmp_path / "file", corrupt.keep_first(BIG, length)) as container:
        assert whole_records(container) == expected
        assert len(container.entries) == len(expected) + 1
        cut = container.entries[-1]
        content = corrupt.content_range(BIG, cut.name)
        assert cut.size == length - content.start
        assert container.read(cut) == BIG[content.start : length]
        assert one(container.anomalies, "record-unreadable").facts["present"] == cut.size


def test_first_block_of_a_file(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.keep_first(BIG, 4096)) as container:
        assert [record.name for record in container.entries] == ["data.pkl"]
        assert codes(container.anomalies) == {"no-end-record", "record-unreadable"}


def test_damaged_descriptor_without_directory(tmp_path: Path) -> None:
    stop = corrupt.content_range(BIG, "data/5").stop
    damaged = corrupt.drop_directory(corrupt.flip_bit(BIG, stop + 9))
    with Opened(tmp_path / "file", damaged) as container:
        assert len(container.entries) == len(corrupt.entry_offsets(BIG))
        assert [r.name for r in container.entries if r.crc is None] == ["data/5"]
        assert one(container.anomalies, "record-unreadable").record == "data/5"


def test_a_zip_inside_a_record_is_not_taken_for_the_end(tmp_path: Path) -> None:
    inner = corrupt.torch_zip([("other/data.pkl", b"N."), ("other/data/0", bytes(500))])
    outer = corrupt.torch_zip([("a/data.pkl", b"N."), ("a/data/0", inner), ("a/version", b"3\n")])
    with Opened(tmp_path / "file", corrupt.drop_directory(outer)) as container:
        assert list(container.records) == ["data.pkl", "data/0", "version"]
        assert container.read("data/0") == inner


def test_unflushed_tail_of_zeros(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.zero_tail(BIG, 30_000)) as container:
        assert codes(container.anomalies) >= {"no-end-record", "zero-tail"}
        # The bytes before them may be zero as well.
        assert 30_000 <= one(container.anomalies, "zero-tail").facts["length"] < 40_000
        assert len(container.entries) > 20


@pytest.mark.parametrize("length", [1, 512, 65_536, 70_000, 2_000_000])
def test_zeros_behind_the_archive(length: int, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.append(BIG, bytes(length))) as container:
        found = one(everything(container), "trailing-bytes")
        assert found.facts == {"length": length, "zeros": True, "where": "behind"}
        assert bad_records(container) == []


def test_other_bytes_behind_the_archive(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.append(BIG, b"\0\0junk")) as container:
        assert one(everything(container), "trailing-bytes").facts["zeros"] is False


def test_a_stray_signature_behind_the_archive(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.append(BIG, b"PK\5\6" + bytes(40))) as container:
        # torch takes the last signature and finds an empty archive there.
        assert codes(container.anomalies) == {"end-record-damaged", "trailing-bytes"}
        assert bad_records(container) == []


def test_bytes_before_the_archive(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.prepend(BIG, b"7 bytes")) as container:
        assert one(everything(container), "leading-bytes").facts["length"] == 7
        assert codes(everything(container)) == {"leading-bytes"}
        assert bad_records(container) == []


def test_two_archives_show_the_last(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.concatenate(SMALL, BIG)) as container:
        found = one(everything(container), "second-archive")
        assert found.facts == {"length": len(SMALL), "where": "before"}
        assert container.prefix == "train_zip"
        assert bad_records(container) == []


def test_two_archives_of_one_layout_show_the_first(tmp_path: Path) -> None:
    # torch loads the first of them without a word: the last end record leads into it.
    second = corrupt.replace_record(SMALL, "data/0", b"x" * len(content_of(SMALL, "data/0")))
    assert len(second) == len(SMALL)
    with Opened(tmp_path / "file", corrupt.concatenate(SMALL, second)) as container:
        found = one(container.anomalies, "second-archive")
        assert found.facts == {"length": len(second), "where": "behind"}
        assert container.read("data/0") == content_of(SMALL, "data/0")


def test_the_second_of_two_archives_is_cut(tmp_path: Path) -> None:
    cut = corrupt.concatenate(SMALL, corrupt.keep_first(BIG, 20_000))
    with Opened(tmp_path / "file", cut) as container:
        found = one(container.anomalies, "second-archive")
        assert (found.facts["length"], found.facts["where"]) == (20_000, "behind")


def content_of(data: bytes, record: str) -> bytes:
    span = corrupt.content_range(data, record)
    return data[span.start : span.stop]


# ---- checksums


def test_all_checksums_zero(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.drop_checksums(BIG)) as container:
        assert not container.has_checksums
        assert codes(everything(container)) == {"checksums-off"}


def test_one_checksum_zero(tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.set_crc(BIG, "data/4", 0)) as container:
        assert container.has_checksums
        assert everything(container) == []
        assert bad_records(container) == ["data/4"]


def test_damaged_compressed_data(tmp_path: Path) -> None:
    data = corrupt.rezip(BIG, deflate=True)
    span = corrupt.content_range(data, "data.pkl")
    for offset in span[: len(span) // 2 : 29]:
        with Opened(tmp_path / "file", corrupt.flip_byte(data, offset)) as container:
            assert bad_records(container) == ["data.pkl"]


# ---- hostile


@pytest.mark.parametrize(
    ("central", "local", "expected"),
    [
        (True, False, {"encrypted", "header-mismatch"}),
        (False, True, {"header-mismatch"}),
        (True, True, {"encrypted"}),
    ],
)
def test_encryption_flags_hide_nothing(
    central: bool, local: bool, expected: set[str], tmp_path: Path
) -> None:
    data = corrupt.set_encrypted(BIG, "data.pkl", central=central, local=local)
    with Opened(tmp_path / "file", data) as container:
        assert codes(everything(container)) == expected
        assert container.read("data.pkl") == content_of(BIG, "data.pkl")


def test_local_name_that_differs(tmp_path: Path) -> None:
    data = corrupt.rename_local(BIG, "data.pkl", "date.pkl")
    with Opened(tmp_path / "file", data) as container:
        found = one(everything(container), "header-mismatch")
        assert (found.record, found.facts["field"]) == ("data.pkl", "name")
        assert found.facts["harmless"] is False
        assert container.read("data.pkl") == content_of(BIG, "data.pkl")


@pytest.mark.parametrize("first", [True, False])
def test_duplicate_record(first: bool, tmp_path: Path) -> None:
    data = corrupt.duplicate_record(BIG, "data.pkl", b"N.", first=first)
    with Opened(tmp_path / "file", data) as container:
        found = one(everything(container), "duplicate-record")
        assert found.record == "data.pkl"
        assert found.facts["count"] == 2
        twins = [record for record in container.entries if record.name == "data.pkl"]
        assert sorted(map(container.read, twins)) == sorted([b"N.", content_of(BIG, "data.pkl")])


def test_records_that_differ_in_case(tmp_path: Path) -> None:
    data = corrupt.duplicate_record(BIG, "data.pkl", b"N.", name="DATA.pkl")
    with Opened(tmp_path / "file", data) as container:
        assert one(everything(container), "case-twin-record").facts["count"] == 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a/../../x", "leads out of its folder"),
        ("/etc/passwd", "absolute"),
        ("C:/windows/x", "absolute"),
        ("a/\x1b[2Jx", "control characters"),
        ("a/x\ny", "control characters"),
        ("a/\u202egnp.exe", "control characters"),
        ("a\\..\\x", "leads out of its folder"),
    ],
)
def test_bad_names(name: str, problem: str, tmp_path: Path) -> None:
    data = corrupt.torch_zip([("a/data.pkl", b"N."), (name, b"1")])
    with Opened(tmp_path / "file", data) as container:
        assert one(container.anomalies, "bad-record-name").facts["problem"] == problem


def test_record_outside_of_the_file(tmp_path: Path) -> None:
    data = corrupt.set_central(BIG, "data/3", "offset", 0x7FFFFFFF)
    with Opened(tmp_path / "file", data) as container:
        assert "record-outside-file" in codes(container.anomalies)
        assert "data/3" in bad_records(container)


def test_overlapping_records(tmp_path: Path) -> None:
    there = corrupt.header_offset(BIG, "data/4")
    data = corrupt.set_central(BIG, "data/3", "offset", there)
    noticed, _ = faults(tmp_path / "file", data)
    assert "records-overlap" in noticed


def test_unknown_compression(tmp_path: Path) -> None:
    data = corrupt.set_central(BIG, "data/3", "method", 12)
    with Opened(tmp_path / "file", data) as container:
        assert one(container.anomalies, "unsupported-method").facts == {"method": 12}
        with pytest.raises(FormatError, match="method 12"):
            container.read("data/3")


@pytest.mark.parametrize("field", ["entries", "size"])
def test_directory_of_an_impossible_size(field: str, tmp_path: Path) -> None:
    end = corrupt.end_record_offset(BIG)
    at = {"entries": 32, "size": 40}[field]
    data = corrupt.put_bytes(BIG, end - 76 + at, (1 << 60).to_bytes(8, "little"))
    tracemalloc.start()
    try:
        noticed, _ = faults(tmp_path / "file", data)
        assert noticed
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    bomb = corrupt.zip_bomb(size=64 << 20)
    limits = DEFAULT_LIMITS._replace(inflated_bytes=1 << 20)
    with Opened(tmp_path / "file", bomb, limits) as container:
        with pytest.raises(LimitError) as caught:
            container.read("data.pkl")
        assert caught.value.limit == "inflated_bytes"


@pytest.mark.parametrize("claim", [1, 1000, 1 << 31])
def test_bomb_that_announces_another_size(claim: int, tmp_path: Path) -> None:
    bomb = corrupt.zip_bomb(size=64 << 20, claim=claim)
    with Opened(tmp_path / "file", bomb) as container:
        tracemalloc.start()
        try:
            with pytest.raises(FormatError):
                for _ in container.chunks("data.pkl"):
                    pass
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_more_records_than_permitted(tmp_path: Path) -> None:
    limits = DEFAULT_LIMITS._replace(records=10)
    with Opened(tmp_path / "file", BIG, limits) as container:
        assert len(container.entries) == 10
        assert one(container.anomalies, "too-many-records").facts["limit"] == 10


def test_thousands_of_stray_signatures(tmp_path: Path) -> None:
    hostile = corrupt.keep_first(BIG, 30_000) + b"PK\5\6" * 100_000 + b"PK\7\x08" * 1000
    with Opened(tmp_path / "file", hostile) as container:
        assert "no-end-record" in codes(container.anomalies)


# ---- whatever happens, only what is promised is raised


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from([SMALL, OLD, corrupt.rezip(SMALL, deflate=True)]))
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "put", "cut", "zero", "out", "repeat"]))
        if kind == "flip" and data:
            data = corrupt.flip_byte(data, offset, draw(st.integers(1, 255)))
        elif kind == "put":
            new = draw(st.sampled_from([b"\xff" * 4, b"PK\5\6", b"PK\1\2", b"\xff" * 8, b"PK\3\4"]))
            data = data[:offset] + new + data[offset + len(new) :]
        elif kind == "cut":
            data = corrupt.keep_first(data, offset)
        elif kind == "zero":
            data = data[:offset] + bytes(min(len(data) - offset, 40)) + data[offset + 40 :]
        elif kind == "out":
            data = corrupt.cut_out(data, offset, draw(st.integers(1, 50)))
        else:
            data = data[:offset] + data[offset // 2 :]
    return data


@given(mutations())
@settings(max_examples=300)
def test_no_mutation_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(data)
    with FileReader(path) as reader:
        container = open_zip(reader, DEFAULT_LIMITS)
        list(container.check_structure())
        for record in container.entries:
            for read in (container.read, container.crc32, container.span):
                try:
                    read(record)
                except FormatError as error:
                    assert error.record == record.name
