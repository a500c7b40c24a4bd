"""torch's two older formats: the stream of before 1.6, and the tar of before 0.1.10."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import FormatError
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.torch_legacy import LegacyContainer, open_legacy
from ckpttool.formats.torch_legacy_tar import LegacyTarContainer, open_legacy_tar
from ckpttool.formats.values import TensorValue
from ckpttool.io.reading import FileReader
from tests import corrupt
from tests.ckpttool.formats.support import codes, one

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
STREAM = (CORPUS / "torch-2.13.0" / "train_legacy.pt").read_bytes()

# Asks torch, in a process of its own, for a legacy file and for what is in it.
MAKE = """
import hashlib, json, sys, torch
path = sys.argv[1]
base = torch.arange(100, dtype=torch.float64)
state = {
    "half": torch.ones(7, dtype=torch.bfloat16), "bytes": torch.arange(5, dtype=torch.uint8),
    "empty": torch.zeros(0), "view": base[10:20], "all": base, "complex": torch.ones(3) * 1j,
}
torch.save(state, path, _use_new_zipfile_serialization=False)
facts = {}
for tensor in state.values():
    storage = tensor.untyped_storage()
    content = bytes(storage.tolist())
    facts[str(storage._cdata)] = [len(content), hashlib.sha256(content).hexdigest()]
json.dump(sorted(facts.values()), sys.stdout)
"""


def torch_process(script: str, *arguments: str) -> Any:
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class Stream:
    def __init__(self, path: Path, data: bytes, limits: ReaderLimits = DEFAULT_LIMITS) -> None:
        path.write_bytes(data)
        self.reader = FileReader(path)
        self.container = open_legacy(self.reader, limits)

    def __enter__(self) -> LegacyContainer:
        return self.container

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def pickle_ends(data: bytes, count: int = 5) -> list[int]:
    """Where the pickles at the beginning end, by Python's own opcode tables."""
    import pickletools

    stream, ends = io.BytesIO(data), []
    for _ in range(count):
        for opcode, _, _ in pickletools.genops(stream):
            assert opcode is not None
        ends.append(stream.tell())
    return ends


ENDS = pickle_ends(STREAM)


@pytest.mark.parametrize("version", ["1.6.0", "2.0.1", "2.13.0"])
def test_files_of_the_corpus(version: str) -> None:
    path = CORPUS / f"torch-{version}" / "train_legacy.pt"
    ends = pickle_ends(path.read_bytes())
    with FileReader(path) as reader:
        container = open_legacy(reader, DEFAULT_LIMITS)
        assert container.anomalies == []
        assert list(container.check_structure()) == []
        results = container.pickle_results
        assert [result.end for result in results.values()] == ends
        assert list(results) == [
            "magic_number",
            "protocol_version",
            "sys_info",
            "data.pkl",
            "storage_keys",
        ]
        assert container.facts == {"protocol_version": 1001, "little_endian": True}
        assert not container.has_checksums
        assert container.pickles() == ["data.pkl"]
        assert container.span("data.pkl") == (ends[2], ends[3] - ends[2])
        # Storages lie behind each other, each behind its count, up to the end of the file.
        position = ends[4]
        for name in list(container.records)[1:]:
            offset, length = container.span(name)
            assert offset == position + 8
            position = offset + length
        assert position == reader.size


def test_storages_are_those_that_torch_wrote(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    expected = torch_process(MAKE, str(path))
    with FileReader(path) as reader:
        container = open_legacy(reader, DEFAULT_LIMITS)
        assert container.anomalies == []
        contents = [container.read(n) for n in container.records if n != "data.pkl"]
    assert sorted([len(c), hashlib.sha256(c).hexdigest()] for c in contents) == expected


def test_opening_reads_no_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_process(
        "import sys, torch; torch.save({'w': torch.zeros(3 << 20)}, sys.argv[1],"
        " _use_new_zipfile_serialization=False); print(0)",
        str(tmp_path / "big.pt"),
    )
    read = []
    original = FileReader.read

    def counting(self: FileReader, offset: int, length: int) -> bytes:
        data = original(self, offset, length)
        read.append(len(data))
        return data

    monkeypatch.setattr(FileReader, "read", counting)
    with FileReader(tmp_path / "big.pt") as reader:
        container = open_legacy(reader, DEFAULT_LIMITS)
        assert len(container.records) == 2
    assert sum(read) < 6 * 65_536 + 100


def test_pickles_longer_than_the_first_piece(tmp_path: Path) -> None:
    path = tmp_path / "long.pt"
    torch_process(
        "import sys, torch; torch.save({'t': 'x' * 3_000_000, 'w': torch.ones(4)}, sys.argv[1],"
        " _use_new_zipfile_serialization=False); print(0)",
        str(path),
    )
    with FileReader(path) as reader:
        container = open_legacy(reader, DEFAULT_LIMITS)
        assert container.anomalies == []
        assert len(container.pickle_results["data.pkl"].value["t"]) == 3_000_000


@pytest.mark.parametrize("missing", [1, 8, 100, 30_000])
def test_cut_storages_say_how_much_is_missing(missing: int, tmp_path: Path) -> None:
    with Stream(tmp_path / "file", corrupt.cut_end(STREAM, missing)) as container:
        found = one(container.anomalies, "truncated")
        assert found.facts == {"needed": len(STREAM), "present": len(STREAM) - missing}
        assert len(container.records) == 45
        with pytest.raises(FormatError, match="is cut"):
            container.read(list(container.records)[-1])
        assert container.read(list(container.records)[1])


def test_every_cut_is_found(tmp_path: Path) -> None:
    inside_pickles = list(range(1, ENDS[2] + 5)) + list(range(ENDS[2], ENDS[4], 97))
    for length in [*inside_pickles, *range(ENDS[4], len(STREAM), 1009)]:
        with Stream(tmp_path / "file", corrupt.keep_first(STREAM, length)) as container:
            assert codes(container.anomalies) == {"truncated"}, length


@pytest.mark.parametrize("count", [1 << 61, 0, -1, (1 << 63) - 1])
def test_damaged_element_count(count: int, tmp_path: Path) -> None:
    damaged = corrupt.put_bytes(STREAM, ENDS[4], struct.pack("<q", count))
    with Stream(tmp_path / "healthy", STREAM) as container:
        expected = {name: container.span(name) for name in container.records}
        first = list(container.records)[1]
    with Stream(tmp_path / "file", damaged) as container:
        found = one(container.anomalies, "storage-size-word")
        assert (found.record, found.facts["elements"]) == (first, count)
        assert found.facts["declared"] == expected[first][1]
        assert {name: container.span(name) for name in container.records} == expected


def test_bytes_behind_the_last_storage(tmp_path: Path) -> None:
    with Stream(tmp_path / "file", corrupt.append(STREAM, bytes(64))) as container:
        found = one(container.anomalies, "trailing-bytes")
        assert found.facts == {"length": 64, "zeros": True, "where": "behind"}


def test_another_magic_number(tmp_path: Path) -> None:
    with Stream(tmp_path / "file", corrupt.flip_bit(STREAM, 6)) as container:
        assert one(container.anomalies, "legacy-header-damaged").facts["field"] == "magic_number"
        assert len(container.records) == 45


def replace_pickle(number: int, new: bytes) -> bytes:
    start = ENDS[number - 1] if number else 0
    return STREAM[:start] + new + STREAM[ENDS[number] :]


EVIL = b"cos\nsystem\n(X\x04\x00\x00\x00truetR."


@pytest.mark.parametrize("number", [0, 1, 2, 4])
@pytest.mark.parametrize("evil", [EVIL, EVIL[:-1] + b"\xff\xff"], ids=["whole", "then garbage"])
def test_a_call_in_a_pickle_beside_the_main_one(number: int, evil: bytes, tmp_path: Path) -> None:
    pytest.importorskip("ckpttool.formats.globals")
    with Stream(tmp_path / "file", replace_pickle(number, evil)) as container:
        found = one(container.anomalies, "hidden-pickle")
        assert found.facts["dangerous"] == ["os.system"]


def test_unknown_protocol_version(tmp_path: Path) -> None:
    data = replace_pickle(1, pickle.dumps(1002, 2))
    with Stream(tmp_path / "file", data) as container:
        assert one(container.anomalies, "legacy-header-damaged").facts["found"] == "1002"


@pytest.mark.parametrize("keys", [{"a": 1}, [1.5], "abc", None])
def test_storage_keys_of_another_type(keys: object, tmp_path: Path) -> None:
    with Stream(tmp_path / "file", replace_pickle(4, pickle.dumps(keys, 2))) as container:
        assert one(container.anomalies, "legacy-header-damaged").facts["field"] == "storage_keys"


def test_storage_that_the_object_does_not_mention(tmp_path: Path) -> None:
    with Stream(tmp_path / "file", replace_pickle(4, pickle.dumps(["12"], 2))) as container:
        assert one(container.anomalies, "storage-unknown").facts["key"] == "12"


def test_a_key_that_comes_twice(tmp_path: Path) -> None:
    with Stream(tmp_path / "healthy", STREAM) as container:
        key = container.pickle_results["storage_keys"].value[0]
    with Stream(tmp_path / "file", replace_pickle(4, pickle.dumps([key, key], 2))) as container:
        assert one(container.anomalies, "duplicate-record").record == f"data/{key}"


def test_more_storages_than_permitted(tmp_path: Path) -> None:
    with Stream(tmp_path / "file", STREAM, DEFAULT_LIMITS._replace(records=10)) as container:
        assert one(container.anomalies, "too-many-records").facts == {"declared": 44, "limit": 10}


def test_pickle_beyond_its_limit(tmp_path: Path) -> None:
    limits = DEFAULT_LIMITS._replace(pickle_bytes=2000)
    with Stream(tmp_path / "file", STREAM, limits) as container:
        assert container.pickle_results["data.pkl"].error is not None
        assert container.records["data.pkl"].size <= 2000


# ---- the tar


def global_of(name: str) -> bytes:
    return b"ctorch\n" + name.encode() + b"\n"


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def triple(key: int, second: bytes, kind: str) -> bytes:
    return b"\x80\x02(" + integer(key) + second + global_of(kind) + b"t."


FLOATS = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
INTEGERS = struct.pack("<3q", 7, 8, 9)


def storages_member() -> bytes:
    return b"".join(
        (
            pickle.dumps(2, 2),
            triple(11, text("cpu"), "FloatStorage") + struct.pack("<q", 6) + FLOATS,
            triple(12, text("cpu"), "LongStorage") + struct.pack("<q", 3) + INTEGERS,
            pickle.dumps([], 2),
        )
    )


def tensors_member() -> bytes:
    return b"".join(
        (
            pickle.dumps(2, 2),
            triple(21, integer(11), "FloatTensor") + struct.pack("<iiqqqqq", 2, 0, 2, 2, 2, 1, 1),
            triple(22, integer(12), "LongTensor") + struct.pack("<iiqqq", 1, 0, 3, 1, 0),
        )
    )


def object_member() -> bytes:
    one_, two = text("a") + text("21") + b"Q", text("b") + text("22") + b"Q"
    return b"\x80\x02}(" + one_ + two + text("step") + integer(4) + b"u."


def tar(**replaced: bytes) -> bytes:
    members = {
        "sys_info": pickle.dumps({"protocol_version": 1000, "little_endian": True}, 2),
        "pickle": object_member(),
        "tensors": tensors_member(),
        "storages": storages_member(),
    } | replaced
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


class Tar:
    def __init__(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self.reader = FileReader(path)
        self.container = open_legacy_tar(self.reader, DEFAULT_LIMITS)

    def __enter__(self) -> LegacyTarContainer:
        return self.container

    def __exit__(self, *_: object) -> None:
        self.reader.close()


LOAD = """
import json, sys, torch
state = torch.load(sys.argv[1], weights_only=False)
json.dump([state["a"].tolist(), state["a"].dtype.__str__(), state["b"].tolist()], sys.stdout)
"""


def test_torch_itself_reads_the_tar_that_is_tested_here(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(tar())
    assert torch_process(LOAD, str(path)) == [[[2, 3], [4, 5]], "torch.float32", [7, 8, 9]]


def test_tar(tmp_path: Path) -> None:
    with Tar(tmp_path / "file", tar()) as container:
        assert container.anomalies == []
        assert container.facts == {"protocol_version": 1000}
        assert {name: container.read(name) for name in container.records} == {
            "data/11": FLOATS,
            "data/12": INTEGERS,
            "data.pkl": object_member(),
        }
        value = container.pickle_results["data.pkl"].value
        assert value["step"] == 4
        assert isinstance(value["a"], TensorValue)
        tensor = value["a"]
        assert (tensor.dtype, tensor.shape, tensor.stride, tensor.offset) == (
            "float32",
            (2, 2),
            (2, 1),
            1,
        )
        assert tensor.storage is not None
        assert (tensor.storage.key, tensor.storage.numel) == ("11", 6)
        assert value["b"].dtype == "int64"


def test_view_of_a_storage_in_a_tar(tmp_path: Path) -> None:
    storages = storages_member()[: -len(pickle.dumps([], 2))] + pickle.dumps([(13, 11, 2, 3)], 2)
    tensors = pickle.dumps(1, 2) + triple(21, integer(13), "FloatTensor")
    tensors += struct.pack("<iiqqq", 1, 0, 2, 1, 1)
    data = tar(storages=storages, tensors=tensors, pickle=b"\x80\x02" + text("21") + b"Q.")
    with Tar(tmp_path / "file", data) as container:
        tensor = container.pickle_results["data.pkl"].value
        assert (tensor.storage.key, tensor.offset, tensor.shape) == ("11", 3, (2,))


@pytest.mark.parametrize("count", [1 << 61, -1, 1 << 31])
def test_damaged_element_count_in_a_tar(count: int, tmp_path: Path) -> None:
    storages = storages_member().replace(struct.pack("<q", 6), struct.pack("<q", count), 1)
    with Tar(tmp_path / "file", tar(storages=storages)) as container:
        assert one(container.anomalies, "storage-unknown").facts["elements"] == count


def test_tensor_of_impossible_dimensions(tmp_path: Path) -> None:
    tensors = pickle.dumps(1, 2) + triple(21, integer(11), "FloatTensor")
    tensors += struct.pack("<ii", 2**31 - 1, 0)
    with Tar(tmp_path / "file", tar(tensors=tensors)) as container:
        assert "legacy-header-damaged" in codes(container.anomalies)


def test_every_cut_of_a_tar_is_found(tmp_path: Path) -> None:
    whole = tar().rstrip(b"\0")  # what follows is the tar's own padding
    for length in range(512, len(whole), 13):
        with Tar(tmp_path / "file", whole[:length]) as container:
            assert "truncated" in codes(container.anomalies), length


def test_a_call_in_a_tar_beside_the_object(tmp_path: Path) -> None:
    pytest.importorskip("ckpttool.formats.globals")
    for member in ("sys_info", "storages", "tensors"):
        with Tar(tmp_path / "file", tar(**{member: EVIL})) as container:
            found = one(container.anomalies, "hidden-pickle")
            assert found.facts["dangerous"] == ["os.system"], member


# ---- whatever happens, only what is promised is raised


@given(st.data())
@settings(max_examples=200)
def test_no_mutation_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    is_tar = data.draw(st.booleans())
    content = tar() if is_tar else STREAM[: ENDS[4] + 3000]
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, max(0, len(content) - 1)))
        if data.draw(st.booleans()) and content:
            content = corrupt.flip_byte(content, offset, data.draw(st.integers(1, 255)))
        else:
            new = data.draw(st.binary(max_size=12))
            content = content[:offset] + new + content[offset + len(new) :]
    if data.draw(st.booleans()):
        content = corrupt.keep_first(content, data.draw(st.integers(0, len(content))))
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(content)
    with FileReader(path) as reader:
        opened = (open_legacy_tar if is_tar else open_legacy)(reader, DEFAULT_LIMITS)
        list(opened.check_structure())
        for record in opened.entries:
            try:
                opened.read(record)
            except FormatError as error:
                assert error.record == record.name
