"""`TensorRef`: what it says of a tensor and the values that it gives, against torch's, bit for bit."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.errors import FormatError
from ckpttool.formats.rebuild import storage_from_persistent_id
from ckpttool.formats.values import GlobalRef
from ckpttool.model.checkpoint import Checkpoint, open_checkpoint
from ckpttool.model.tensor import TensorRef, numpy_dtype
from tests import corrupt
from tests.ckpttool.formats.streams import PROTO_2, listed, storage, tensor
from tests.ckpttool.formats.test_torch_legacy import integer, tar, text, triple
from tests.ckpttool.model.conftest import Said

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
STRIDED = CORPUS / "torch-2.13.0" / "strided.pt"

# Files whose tensors stand in dictionaries and lists, so that both sides give them the same names.
FILES = [
    *("dtypes_all.pt", "strided.pt", "big_endian.pt", "quant.pt", "rezipped_deflated.pt"),
    *("rezipped_no_byteorder.pt", "sparse.pt", "nested_strided.pt", "small_view_of_big_storage.pt"),
    *("tensor_bare.pt", "train_legacy.pt", "train_no_crc32.pt", "cuda0_tags.pt", "lightning.ckpt"),
]
OURS = [
    *("views.pt", "views-protocol4.pt", "views-legacy.pt", "dtypes.pt", "dtypes-protocol4.pt"),
    *("built.pt", "built-protocol4.pt", "wrapped.pt", "wrapped-legacy.pt", "one.pt"),
]


def compare(ref: TensorRef, said: dict[str, Any], *, mmap: bool) -> int:
    """A tensor and its parts against what torch says; gives how many had their values compared."""
    assert (ref.dtype, ref.layout, ref.requires_grad) == (
        *(said["dtype"], said["layout"], said["requires_grad"]),
    )
    assert ref.shape == (None if said["shape"] is None else tuple(said["shape"]))
    assert ref.subclass == said["subclass"]
    if ref.layout != "wrapper":
        assert list(ref.parts) == list(said["parts"])
    compared = sum(
        compare(part, said["parts"][name], mmap=mmap) for name, part in ref.parts.items()
    )
    if said["raw"] is None:
        return compared
    assert (ref.stride, ref.offset, ref.storage_nbytes) == (
        *(tuple(said["stride"]), said["offset"], said["storage_nbytes"]),
    )
    if ref.dtype == "float4_e2m1fn_x2":
        return compared
    values = ref.numpy(mmap=mmap)
    assert values.shape == tuple(said["shape"])
    assert values.tobytes().hex() == said["raw"]
    assert ref.nbytes == values.nbytes
    return compared + 1


def compare_file(path: Path, answer: dict[str, Any], *, mmap: bool) -> int:
    assert answer["loads"], answer
    with open_checkpoint(path) as checkpoint:
        said = {item["name"]: item for item in answer["tensors"]}
        assert list(checkpoint.tensors) == list(said)
        return sum(compare(ref, said[name], mmap=mmap) for name, ref in checkpoint.tensors.items())


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("file", FILES)
def test_values_of_the_corpus(file: str, mmap: bool, torch_says: Said) -> None:
    path = CORPUS / "torch-2.13.0" / file
    assert compare_file(path, torch_says[str(path)], mmap=mmap) > 0


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("file", OURS)
def test_values_of_files_that_torch_writes_now(file: str, mmap: bool, torch_says: Said) -> None:
    assert compare_file(*torch_says.new(file), mmap=mmap) > 0


@pytest.mark.parametrize("version", ["1.6.0", "2.0.1"])
def test_values_of_older_files(version: str, torch_says: Said) -> None:
    compared = 0
    for path in sorted((CORPUS / f"torch-{version}").glob("*.pt")):
        compared += compare_file(path, torch_says[str(path)], mmap=True)
    assert compared > 100


def test_types_that_numpy_has_not() -> None:
    with pytest.raises(ValueError, match="float4_e2m1fn_x2"):
        numpy_dtype("float4_e2m1fn_x2")
    with pytest.raises(ValueError, match="quint4x2"):
        numpy_dtype("quint4x2")


@pytest.mark.parametrize(
    ("file", "name"),
    [("sparse.pt", "coo"), ("nested_strided.pt", ""), ("quint4x2", "quint4x2"), ("meta", "meta")],
)
def test_what_has_no_dense_values(file: str, name: str, torch_says: Said) -> None:
    path = CORPUS / "torch-2.13.0" / file
    if not path.exists():
        path = torch_says.new("built.pt")[0]
    with open_checkpoint(path) as checkpoint:
        refs = [ref for ref in checkpoint.tensors.values() if ref.name == name or not name]
        ref = refs[0] if refs else next(iter(checkpoint.tensors.values()))
        with pytest.raises(ValueError, match=r"no dense values|no bytes|no type"):
            ref.numpy()


def test_values_are_read_only_and_mapped_where_that_is_asked_for_and_can_be() -> None:
    """Case B16: maps of network file systems hang, so nothing is mapped unasked."""
    with open_checkpoint(STRIDED) as checkpoint:
        ref = next(iter(checkpoint.tensors.values()))
        mapped, read = ref.numpy(mmap=True), ref.numpy()
        for values in (mapped, read):
            assert not values.flags.writeable
        assert is_mapped(mapped)
        assert not is_mapped(read)
    for file in ("big_endian.pt", "rezipped_deflated.pt"):  # swapped, or compressed
        with open_checkpoint(CORPUS / "torch-2.13.0" / file) as checkpoint:
            assert not is_mapped(next(iter(checkpoint.tensors.values())).numpy(mmap=True))


def is_mapped(values: np.ndarray[Any, Any]) -> bool:
    base: Any = values
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


def test_values_stay_when_the_checkpoint_is_closed() -> None:
    with open_checkpoint(STRIDED) as checkpoint:
        refs = list(checkpoint.tensors.values())
        values = [ref.numpy(mmap=True) for ref in refs]
        expected = [ref.numpy(mmap=False).tobytes() for ref in refs]
    assert [value.tobytes() for value in values] == expected


def test_what_it_says_of_devices() -> None:
    with open_checkpoint(CORPUS / "torch-2.13.0" / "cuda0_tags.pt") as checkpoint:
        assert {ref.device for ref in checkpoint.tensors.values()} >= {"cuda:0"}
    with open_checkpoint(CORPUS / "torch-2.13.0" / "sparse.pt") as checkpoint:
        assert {ref.device for ref in checkpoint.tensors.values()} == {"cpu"}


def test_devices_of_what_has_no_storage(torch_says: Said) -> None:
    with open_checkpoint(torch_says.new("built.pt")[0]) as checkpoint:
        assert checkpoint.tensors["meta"].device == "meta"
        assert checkpoint.tensors["meta"].storage_nbytes == 0
        assert checkpoint.tensors["parameter"].is_parameter
        assert not checkpoint.tensors["csr"].is_parameter
    with open_checkpoint(torch_says.new("wrapped.pt")[0]) as checkpoint:
        wrapper = checkpoint.tensors["two"]
        assert (wrapper.device, wrapper.record, wrapper.storage) == ("cpu", None, None)
        assert sorted(checkpoint.tensors) == ["two", "two.a", "two.b"]


@pytest.mark.parametrize(
    ("kind", "code", "numbers"),
    [
        ("ComplexFloatStorage", "4f", [1.5 - 2j, 0.25 + 3j]),
        ("ComplexDoubleStorage", "4d", [1.5 - 2j, 0.25 + 3j]),
        ("ShortStorage", "2h", [258, -2]),
        ("DoubleStorage", "2d", [1.5, -0.1]),
        ("BoolStorage", "2?", [True, False]),
        ("CharStorage", "2b", [1, -3]),
    ],
)
def test_big_endian_numbers(kind: str, code: str, numbers: list[Any], tmp_path: Path) -> None:
    parts = [part for n in numbers for part in ((n.real, n.imag) if "Complex" in kind else (n,))]
    stream = PROTO_2 + listed(tensor(storage("0", 2, kind), 0, (2,))) + b"."
    records = [("a/data.pkl", stream), ("a/byteorder", b"big"), ("a/version", b"3\n")]
    records.append(("a/data/0", struct.pack(f">{code}", *parts)))
    (tmp_path / "big.pt").write_bytes(corrupt.torch_zip(records))
    with open_checkpoint(tmp_path / "big.pt") as checkpoint:
        (ref,) = checkpoint.tensors.values()
        assert [ref.numpy(mmap=mmap).tolist() for mmap in (True, False)] == [numbers] * 2


# ---- views of storages in the legacy formats: counted once


def legacy(pid: bytes, *, count: int, content: bytes) -> bytes:
    """A legacy stream of one storage and a tensor of two from its second element on."""
    start = PROTO_2 + b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + PROTO_2 + b"M\xe9\x03."
    start += PROTO_2 + b"}."
    body = PROTO_2 + listed(tensor(pid, 1, (2,), (1,)), tensor(pid, 0, (3,), (1,))) + b"."
    keys = PROTO_2 + b"](" + text("0") + b"e."
    return start + body + keys + struct.pack("<q", count) + content


ASK_LEGACY = """
import json, sys, torch
json.dump([t.tolist() for t in torch.load(sys.argv[1], weights_only=False)], sys.stdout)
"""


def torch_process(script: str, path: Path) -> Any:
    from tests.ckpttool.formats.test_torch_legacy import torch_process as ask

    return ask(script, str(path))


def test_a_view_of_a_storage_in_a_legacy_stream(tmp_path: Path) -> None:
    parts = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(8)
    view = b"(" + text("9") + integer(2) + integer(4) + b"t"
    pid = b"(" + parts + view + b"tQ"
    path = tmp_path / "view.pt"
    path.write_bytes(legacy(pid, count=8, content=np.arange(8, dtype="<f4").tobytes()))
    expected = torch_process(ASK_LEGACY, path)
    assert expected == [[3, 4], [2, 3, 4]]
    with open_checkpoint(path) as checkpoint:
        assert [a.code for a in checkpoint.anomalies] == []
        for mmap in (True, False):
            values = [ref.numpy(mmap=mmap).tolist() for ref in checkpoint.tensors.values()]
            assert values == expected
        assert [ref.offset for ref in checkpoint.tensors.values()] == [3, 2]
        assert checkpoint.used_bytes == 12


def test_a_view_of_a_storage_in_a_legacy_tar(tmp_path: Path) -> None:
    import pickle

    storages = pickle.dumps(1, 2) + triple(11, text("cpu"), "FloatStorage") + struct.pack("<q", 6)
    storages += np.arange(1, 7, dtype="<f4").tobytes() + pickle.dumps([(13, 11, 2, 3)], 2)
    tensors = pickle.dumps(1, 2) + triple(21, integer(13), "FloatTensor")
    tensors += struct.pack("<iiqqq", 1, 0, 2, 1, 1)
    path = tmp_path / "view.tar"
    content = b"\x80\x02](" + text("21") + b"Qe."
    path.write_bytes(tar(storages=storages, tensors=tensors, pickle=content))
    expected = torch_process(ASK_LEGACY, path)
    assert expected == [[4, 5]]
    with open_checkpoint(path) as checkpoint:
        (ref,) = checkpoint.tensors.values()
        assert [ref.numpy(mmap=mmap).tolist() for mmap in (True, False)] == expected * 2


# ---- bytes that are not there


def open_tensor(path: Path, **changes: Any) -> tuple[Checkpoint, TensorRef]:
    """A file of one float32 storage of six elements and one tensor in it."""
    stream = PROTO_2 + listed(tensor(storage(), **changes)) + b"."
    content = np.arange(6, dtype="<f4").tobytes()
    records = [("a/data.pkl", stream), ("a/byteorder", b"little"), ("a/data/0", content)]
    path.write_bytes(corrupt.torch_zip([*records, ("a/version", b"3\n")]))
    checkpoint = open_checkpoint(path)
    (ref,) = checkpoint.tensors.values()
    return checkpoint, ref


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_is_cut_under_it(mmap: bool, tmp_path: Path) -> None:
    checkpoint, ref = open_tensor(tmp_path / "file.pt")
    with checkpoint:
        assert ref.numpy(mmap=mmap).tolist() == [0, 1, 2, 3, 4, 5]
        os.truncate(tmp_path / "file.pt", 100)
        with pytest.raises(FormatError):
            ref.numpy(mmap=mmap)


def test_a_file_that_is_replaced_under_it(tmp_path: Path) -> None:
    checkpoint, ref = open_tensor(tmp_path / "file.pt")
    with checkpoint:
        (tmp_path / "other").write_bytes(bytes((tmp_path / "file.pt").stat().st_size))
        (tmp_path / "other").replace(tmp_path / "file.pt")
        with pytest.raises(FormatError, match="changed"):
            ref.numpy(mmap=True)
        assert ref.numpy(mmap=False).tolist() == [0, 1, 2, 3, 4, 5]  # what was opened is still open
        (tmp_path / "file.pt").unlink()
        with pytest.raises(FormatError):
            ref.numpy(mmap=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 1},
        {"shape": (7,)},
        {"shape": (3,), "stride": (3,)},
        {"shape": (2, 3), "stride": (4, 1)},
        {"offset": 1 << 62},
        {"shape": (1 << 62,), "stride": (1,)},
        {"shape": (2,), "stride": (1 << 62,)},
    ],
)
def test_a_tensor_that_reaches_past_its_storage(changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoint, ref = open_tensor(tmp_path / "file.pt", **changes)
    with checkpoint:
        assert "tensor-beyond-storage" in [anomaly.code for anomaly in checkpoint.anomalies]
        for mmap in (True, False):
            with pytest.raises(FormatError, match="past the end"):
                ref.numpy(mmap=mmap)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"shape": (), "stride": ()}, ()),
        ({"shape": (0, 5), "stride": (5, 1)}, (0, 5)),
        ({"shape": (1,), "stride": (1 << 62,)}, (1,)),
        ({"shape": (2, 1), "stride": (3, 1 << 60)}, (2, 1)),
        ({"shape": (1 << 40,), "stride": (0,)}, (1 << 40,)),  # one element, shown very often
    ],
)
def test_odd_shapes_that_can_be(
    changes: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint, ref = open_tensor(tmp_path / "file.pt", **changes)
    with checkpoint:
        assert ref.numpy().shape == shape


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (1 << 62, 0), "stride": (1, 1)},
        {"shape": (1 << 62,), "stride": (0,)},
        {"shape": (1,) * 100, "stride": (1,) * 100},
    ],
)
def test_shapes_that_numpy_cannot_hold(changes: dict[str, Any], tmp_path: Path) -> None:
    checkpoint, ref = open_tensor(tmp_path / "file.pt", **changes)
    with checkpoint, pytest.raises(FormatError, match="no array"):
        ref.numpy()


def test_a_record_that_is_missing(tmp_path: Path) -> None:
    checkpoint, _ = open_tensor(tmp_path / "file.pt")
    checkpoint.close()
    corrupt.corrupt(tmp_path / "file.pt", corrupt.drop_record, "data/0")
    with open_checkpoint(tmp_path / "file.pt") as checkpoint:
        (ref,) = checkpoint.tensors.values()
        with pytest.raises(FormatError):
            ref.numpy()


def test_a_tensor_without_a_container() -> None:
    pid = ("storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", 1)
    value = storage_from_persistent_id(pid)
    from ckpttool.formats.values import TensorValue

    ref = TensorRef("x", TensorValue(value, 0, (1,), (1,), False, "float32"), None)
    assert (ref.record, ref.storage, repr(ref)) == (None, "0", "TensorRef('x', float32, (1,))")
    with pytest.raises(FormatError, match="no container"):
        ref.numpy()
