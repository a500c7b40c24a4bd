"""A tensor of a checkpoint: what the file says of it, and its values when they are asked for."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import byte_count
from ckpttool.model.extents import count_and_reach

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.formats.container import Container
    from ckpttool.formats.values import TensorValue

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
        first = next(iter((self.value.parts or {}).values()), None)
        extra = self.value.extra or {}
        return str(extra.get("device", "cpu")) if first is None else first.storage.device

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
        return 0 if storage is None else byte_count(storage.dtype, storage.numel)

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

    def numpy(self, *, mmap: bool = True) -> np.ndarray[Any, Any]:
        """The values as an array of `shape`, read-only.

        bfloat16 and float8 come as the types of `ml_dtypes`, quantized tensors as their integers.
        With `mmap` the array maps the file where its layout allows it (stored plainly, this
        machine's byte order), and nothing is read before it is used; a file that is cut meanwhile
        then ends the process (SIGBUS), so pass False for files that others write to.

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
        if mmap and span is not None and span[1] and not swap:
            path, (offset, _) = container.reader.path, span
            raw = np.memmap(path, np.uint8, "r", offset, (count * dtype.itemsize,))
            # The file of this name can have been replaced since it was opened.
            if container.reader.changed():
                raise FormatError(f"{path} changed while it was read", record=record)
        else:
            raw = np.frombuffer(container.read(record), np.uint8, count * dtype.itemsize)
        if swap:
            width = np.dtype(f"u{_swap_width(dtype)}")
            raw = raw.view(width).byteswap().view(np.uint8)
        return raw.view(dtype)

    def __repr__(self) -> str:
        return f"TensorRef({self.name!r}, {self.dtype}, {self.shape})"


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

    value = tensor.value
    # Legacy files hold views of storages, which begin somewhere inside.
    view = value.storage.view if value.storage is not None else None
    start = view[1] if isinstance(view, tuple) and len(view) == 3 else 0
    if (
        not isinstance(start, int)
        or start < 0
        or start + value.offset + count_and_reach(value.shape, value.stride)[1] > storage.size
    ):
        raise FormatError(f"{tensor.name} reaches past the end of its storage")
    step = storage.itemsize
    array = np.lib.stride_tricks.as_strided(
        storage[start + value.offset :],
        value.shape,
        tuple(stride * step for stride in value.stride or ()),
        writeable=False,
    )
    bits = (value.extra or {}).get("metadata")
    return _resolve(array, bits) if isinstance(bits, dict) else array


def _resolve(array: np.ndarray[Any, Any], bits: dict[Any, Any]) -> np.ndarray[Any, Any]:
    """Apply torch's lazy conjugation and negation."""
    if bits.get("conj"):
        array = array.conj()
    return -array if bits.get("neg") else array
