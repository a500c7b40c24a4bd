"""torch's dtypes by their short names: widths, and the storage classes that stood for them.

Source: torch/storage.py (`_dtype_to_storage_type_map`) and torch/csrc/jit/serialization. The names
are frozen: newer dtypes are stored as an untyped storage beside the dtype itself.
"""

from __future__ import annotations

# Width of one element in bits; several dtypes pack more than one element in a byte.
BITS: dict[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 64),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 32),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 16),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "bits8"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 8),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 8),
    # torch stores its sub-byte integers one to a byte, whatever their names say.
    **{f"{sign}int{bits}": 8 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2"), 8),
    "complex128": 128,
    "quint4x2": 4,
    "quint2x4": 2,
}

STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    # Numbers of elements of an untyped storage are bytes.
    "UntypedStorage": "uint8",
}

# Legacy tensor classes (`torch.FloatTensor`), as found in files of torch 0.x.
TENSOR_CLASS_DTYPES: dict[str, str] = {
    name.replace("Storage", "Tensor"): dtype
    for name, dtype in STORAGE_DTYPES.items()
    if name != "UntypedStorage"
}


# Storages count no less than bytes, even where several elements share one.
STORAGE_BITS: dict[str, int] = {name: max(8, bits) for name, bits in BITS.items()}


def storage_byte_count(dtype: str, numel: int) -> int:
    """Bytes of a storage of `numel` elements, as torch counts them; 0 for an unknown dtype."""
    return numel * STORAGE_BITS.get(dtype, 0) // 8


def byte_count(dtype: str, elements: int) -> int:
    """Bytes that `elements` consecutive elements of `dtype` take; 0 for an unknown dtype."""
    return -(-elements * BITS.get(dtype, 0) // 8)
