"""A tensor of a checkpoint: what the file says of it, and its values when they are asked for."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import byte_count, storage_byte_count
from ckpttool.model.storages import count_and_reach

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.formats.container import Container
    from ckpttool.formats.values import TensorValue
    from ckpttool.io.reading import FileReader

# torch's names that numpy has under the same name; ml_dtypes and integers stand in for others.
_NUMPY = frozenset(
    (
        *("float64", "float32", "float16", "int64", "int32", "int16", "int8"),
        *("uint64", "uint32", "uint16", "uint8", "bool", "complex128", "complex64"),
    )
)
_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32", "bits8": "uint8"}
_INTEGERS |= {"bits16": "uint16", "bits1x8": "uint8", "bits2x4": "uint8", "bits4x2": "uint8"}
_INTEGERS |= {f"int{bits}": "int8" for bits in range(1, 8)}
_INTEGERS |= {f"uint{bits}": "uint8" for bits in range(1, 8)}


def nbytes_of(value: TensorValue) -> int:
    """Bytes that the tensor's elements take: of its parts together where it is built from
    others.
    """
    if value.parts and value.layout != "quantized":
        return sum(nbytes_of(part) for part in value.parts.values())
    return byte_count(value.dtype, prod(value.shape or ()))


class TensorRef:
    """A tensor by its dotted `name`, as the file describes it.

    `dtype` is torch's short name (`float32`, `bfloat16`). `shape`, `stride` and `offset` count
    elements; `stride` is None for what has no storage of its own, `shape` too for a nested tensor.
    `storage` is the storage's key and `record` the container's record that holds it. `nbytes` is
    what the elements take, `storage_nbytes` what the whole storage does. `layout` is `strided`,
    `quantized`, `sparse_coo`, `sparse_csr` (csc, bsr, bsc), `nested`, `wrapper`, `meta` or `numpy`.
    `parts` are the tensors that a sparse, nested or per-channel quantized one is built from, by
    their names. `subclass` names the class of a tensor subclass; it is never imported.
    """

    __slots__ = ("_container", "name", "value")

    def __init__(self, name: str, value: TensorValue, container: Container | None) -> None:
        self.name = name
        self.value = value
        self._container = container

    @property
    def dtype(self) -> str:
        """torch's short name of the element type."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Extents in elements; None for a nested tensor."""
        return self.value.shape

    @property
    def stride(self) -> tuple[int, ...] | None:
        """Steps in elements; None for what has no storage of its own."""
        return self.value.stride

    @property
    def offset(self) -> int:
        """Where in its storage it begins, in elements."""
        return self.value.offset

    @property
    def requires_grad(self) -> bool:
        """Whether it takes gradients once loaded."""
        return self.value.requires_grad

    @property
    def layout(self) -> str:
        """How it is stored; see the class."""
        return self.value.layout

    @property
    def device(self) -> str:
        """The device tag that the file carries (`cpu`, `cuda:0`)."""
        storage = self.value.storage
        if storage is not None:
            return storage.device
        if self.value.layout == "meta":
            return "meta"
        parts = (self.value.parts or {}).values()
        first = next((part.storage for part in parts if part.storage is not None), None)
        extra = self.value.extra or {}
        return str(extra.get("device", "cpu")) if first is None else first.device

    @property
    def storage(self) -> str | None:
        """Key of the storage that it lies in, None if it has none of its own."""
        return None if self.value.storage is None else self.value.storage.key

    @property
    def record(self) -> str | None:
        """Name of the record with the storage's bytes."""
        storage = self.value.storage
        if storage is None or self._container is None:
            return None
        return self._container.storage_record(storage.key)

    @property
    def nbytes(self) -> int:
        """Bytes that its elements take."""
        return nbytes_of(self.value)

    @property
    def storage_nbytes(self) -> int:
        """Bytes of the whole storage that it lies in."""
        storage = self.value.storage
        return 0 if storage is None else storage_byte_count(storage.dtype, storage.numel)

    @property
    def subclass(self) -> str | None:
        """Dotted path of its class if that is not `torch.Tensor`."""
        subclass = (self.value.extra or {}).get("subclass")
        return None if subclass is None else str(subclass)

    @property
    def is_parameter(self) -> bool:
        """Whether the file rebuilds it as a `torch.nn.Parameter`."""
        return bool((self.value.extra or {}).get("parameter"))

    @property
    def parts(self) -> dict[str, TensorRef]:
        """The tensors that it is built from, each named `<name>.<part>`."""
        parts = self.value.parts or {}
        return {
            name: TensorRef(f"{self.name}.{name}", part, self._container)
            for name, part in parts.items()
        }

    def numpy(self, *, mmap: bool = False) -> np.ndarray[Any, Any]:
        """The values as an array of `shape`, read-only.

        bfloat16 and float8 come as the types of `ml_dtypes`, quantized tensors as their integers.
        Reads the tensor's whole storage, and no more. With `mmap` the array maps the file where its
        layout allows it (stored plainly, this machine's byte order), and nothing is read before it
        is used; but a file that is cut meanwhile ends the process (SIGBUS), and maps of network
        file systems have hung jobs.

        Raises ValueError for what has no dense values (sparse and nested tensors: see `parts`) or
        no numpy type, FormatError if the bytes are not there.
        """
        value = self.value
        if value.layout in ("strided", "quantized") and value.storage is not None:
            return _strided(self, self._storage_array(mmap))
        what = f"{self.name}: a tensor of layout {value.layout}"
        if value.parts:
            raise ValueError(f"{what} has no dense values; see its parts: {', '.join(value.parts)}")
        raise ValueError(f"{what} has no bytes of its own in the file")

    def _storage_array(self, mmap: bool) -> np.ndarray[Any, Any]:
        """The whole storage as an array of this tensor's dtype."""
        import numpy as np

        container, storage = self._container, self.value.storage
        if container is None or storage is None:
            raise FormatError(f"{self.name}: there is no container to read from")
        record = container.storage_record(storage.key)
        dtype = numpy_dtype(self.dtype)
        span, swap = container.span(record), container.byteorder == "big"
        count = (span[1] if span else container.record(record).size) // dtype.itemsize
        raw: np.ndarray[Any, Any]
        if mmap and span is not None and count and not swap and container.reader.is_whole_file:
            raw = _mapped(container.reader, span[0], count * dtype.itemsize, record)
        else:
            content = container.read(record)
            if len(content) < count * dtype.itemsize:
                raise FormatError(f"record {record!r} was cut while it was read", record=record)
            raw = np.frombuffer(content, np.uint8, count * dtype.itemsize)
        if swap:
            width = np.dtype(f"u{_swap_width(dtype)}")
            raw = raw.view(width).byteswap().view(np.uint8)
        return raw.view(dtype)

    def __repr__(self) -> str:
        return f"TensorRef({self.name!r}, {self.dtype}, {self.shape})"


def _mapped(reader: FileReader, offset: int, length: int, record: str) -> np.ndarray[Any, Any]:
    """Bytes of the file mapped into memory; FormatError if it is not what was opened any more."""
    import numpy as np

    try:
        raw = np.memmap(reader.path, np.uint8, "r", offset, (length,))
    except (OSError, ValueError) as error:
        raise FormatError(f"{reader.path} cannot be mapped: {error}", record=record) from error
    # The file of this name can have been replaced or cut since it was opened.
    if reader.changed():
        raise FormatError(f"{reader.path} changed while it was read", record=record)
    return raw


def _swap_width(dtype: np.dtype[Any]) -> int:
    """A complex number is two words, each of them swapped by itself."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type for torch's dtype `name`. Raises ValueError where there is none."""
    import numpy as np

    if name in _NUMPY:
        return np.dtype(name)
    if name in _INTEGERS:
        return np.dtype(_INTEGERS[name])
    import ml_dtypes

    kind = getattr(ml_dtypes, name, None)
    if kind is None:
        raise ValueError(f"numpy has no type for torch.{name}")
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


def _strided(tensor: TensorRef, storage: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The view of `storage` that the tensor is; FormatError if it reaches past the end."""
    import numpy as np

    value, dtype, step = tensor.value, storage.dtype, storage.itemsize
    shape, stride = value.shape or (), value.stride or ()
    if value.offset + count_and_reach(shape, stride)[1] > storage.size:
        raise FormatError(f"{tensor.name} reaches past the end of its storage")
    try:
        array = np.lib.stride_tricks.as_strided(
            # As plain bytes: numpy cannot spell the types of ml_dtypes in its array interface.
            storage.view(f"V{step}")[value.offset :],
            shape,
            # Where there is nothing to step over, the stride can be any number.
            tuple(n * step if extent > 1 else 0 for extent, n in zip(shape, stride, strict=True)),
            writeable=False,
        ).view(dtype)
    except (ValueError, OverflowError) as error:  # too many dimensions or elements for numpy
        raise FormatError(f"{tensor.name} is no array that can be: {error}") from error
    bits = (value.extra or {}).get("metadata")
    return _resolve(array, bits) if isinstance(bits, dict) else array


def _resolve(array: np.ndarray[Any, Any], bits: dict[Any, Any]) -> np.ndarray[Any, Any]:
    """Apply torch's lazy conjugation and negation."""
    if bits.get("conj"):
        array = array.conj()
    return -array if bits.get("neg") else array
