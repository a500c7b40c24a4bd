"""Widths and names of dtypes, compared with torch's own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from ckpttool.formats.dtypes import (
    BITS,
    STORAGE_DTYPES,
    TENSOR_CLASS_DTYPES,
    byte_count,
    storage_byte_count,
)

ASK = """
import json, torch
kinds = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
widths = {str(kind)[6:]: kind.itemsize * 8 for kind in kinds.values()}
storages = {
    name: str(kind)[6:] for kind, name in torch.storage._dtype_to_storage_type_map().items()
}
# torch says itself how many bytes some elements take, also where several share a byte.
packed = {}
for kind in (torch.quint4x2, torch.quint2x4):
    quantized = torch._empty_per_channel_affine_quantized(
        [3, 5], scales=torch.ones(3), zero_points=torch.zeros(3), axis=0, dtype=kind)
    packed[str(kind)[6:]] = [15, quantized.untyped_storage().nbytes()]
print(json.dumps([widths, storages, packed]))
"""


@cache
def torch_says() -> Any:
    command = [sys.executable, "-W", "ignore", "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_dtype_of_torch_has_its_width() -> None:
    widths, _, packed = torch_says()
    for name in packed:
        del widths[name]
    assert {name: BITS.get(name) for name in widths} == widths


def test_every_storage_class_of_torch_has_its_dtype() -> None:
    _, storages, _ = torch_says()
    assert storages
    assert {name: STORAGE_DTYPES.get(name) for name in storages} == storages
    assert set(STORAGE_DTYPES) - set(storages) == {"UntypedStorage"}
    assert set(STORAGE_DTYPES.values()) <= set(BITS)


def test_tensor_classes_are_named_after_their_storages() -> None:
    assert TENSOR_CLASS_DTYPES["FloatTensor"] == "float32"
    assert TENSOR_CLASS_DTYPES["BFloat16Tensor"] == "bfloat16"
    assert "UntypedTensor" not in TENSOR_CLASS_DTYPES


@pytest.mark.parametrize(
    ("dtype", "elements", "size"),
    [
        ("float32", 3, 12),
        ("complex128", 2, 32),
        ("bool", 5, 5),
        ("quint4x2", 3, 2),
        ("quint2x4", 5, 2),
        ("float32", 0, 0),
        ("float64", 1 << 61, 1 << 64),
        ("no such dtype", 7, 0),
    ],
)
def test_bytes_of_some_elements(dtype: str, elements: int, size: int) -> None:
    assert byte_count(dtype, elements) == size


def test_elements_that_share_a_byte() -> None:
    """Tensors of them reach over less than a byte each; their storages count whole bytes."""
    _, _, packed = torch_says()
    assert len(packed) == 2
    for dtype, (elements, stored) in packed.items():
        assert byte_count(dtype, elements) <= stored < elements
        assert storage_byte_count(dtype, stored) == stored
    assert storage_byte_count("float32", 3) == 12
    assert storage_byte_count("no such dtype", 3) == 0
