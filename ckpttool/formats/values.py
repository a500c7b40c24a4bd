"""Inert values: what the static pickle reader makes of everything that is not plain data.

Nothing here can run anything: a class that a file names stays a pair of strings, a call that it
asks for stays a record of the call. Plain data (None, bool, int, float, str, bytes, list, tuple,
dict, set) stands for itself.
"""

from __future__ import annotations

from typing import Any


class GlobalRef:
    """A class or function that the pickle names: `module` and `name`, never imported.

    `rebuild` is the reader's own stand-in for a call of it, for the few globals it knows, else
    None.
    """

    __slots__ = ("module", "name", "rebuild")

    def __init__(self, module: str, name: str, rebuild: Any = None) -> None:
        self.module = module
        self.name = name
        self.rebuild = rebuild

    @property
    def path(self) -> str:
        """Module and name joined by a dot, as torch's own messages print it."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"GlobalRef({self.path!r})"


class Opaque:
    """A call that the pickle asks for and that was not made, with everything it would have got.

    `target` is what would be called (mostly a `GlobalRef`), `opcode` the way in which (`REDUCE`,
    `NEWOBJ`, `NEWOBJ_EX`, `INST`, `OBJ`, `EXT`, `PERSID`, `BUFFER`). `state` is what `BUILD` would
    set; `items` and `pairs` are what would be appended or set on the result.
    """

    __slots__ = ("args", "items", "kwargs", "opcode", "pairs", "state", "target")

    def __init__(
        self,
        target: Any,
        args: tuple[Any, ...] = (),
        *,
        opcode: str,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.opcode = opcode
        self.state: Any = None
        self.items: list[Any] | None = None
        self.pairs: list[tuple[Any, Any]] | None = None

    @property
    def path(self) -> str:
        """Dotted name of what would be called, or a description where it is not a global."""
        return self.target.path if isinstance(self.target, GlobalRef) else f"({self.opcode})"

    def __repr__(self) -> str:
        return f"Opaque({self.path!r}, {len(self.args)} args, {self.opcode})"


class OrderedMap(dict[Any, Any]):
    """A `collections.OrderedDict`; `attributes` is what the pickle sets on it (`_metadata`)."""

    __slots__ = ("_attributes",)

    @property
    def attributes(self) -> dict[Any, Any]:
        """What is set on it besides its items; mostly nothing, and then no memory is spent on
        it.
        """
        return getattr(self, "_attributes", {})

    @attributes.setter
    def attributes(self, attributes: dict[Any, Any]) -> None:
        self._attributes = attributes


class StorageRef:
    """A storage that the pickle refers to: `key` names its record (`data/<key>`).

    `numel` counts elements of `dtype`. `view` is `(key, offset, numel)` for the views that the
    legacy formats can hold, else None; the offsets of tensors have its offset in them already.
    """

    __slots__ = ("device", "dtype", "key", "numel", "view")

    def __init__(self, dtype: str, key: str, device: str, numel: int, view: Any = None) -> None:
        self.dtype = dtype
        self.key = key
        self.device = device
        self.numel = numel
        self.view = view

    def __repr__(self) -> str:
        return f"StorageRef({self.key!r}, {self.dtype}, {self.numel}, {self.device!r})"


class TensorValue:
    """A tensor as the pickle describes it. `offset`, `shape` and `stride` count elements.

    `layout` is `strided`, `quantized`, `sparse_coo`, `sparse_csr` (csc, bsr, bsc), `nested`,
    `jagged`, `wrapper`, `meta` or `numpy`. What is built from other tensors names them in `parts`.
    `storage` is None for those and for what has no bytes. `extra` holds the rest: `subclass` (a
    dotted path) with its `class`, `parameter`, `quantizer`, `state`, `metadata`, `coalesced`,
    `wrapper` (offset, layout and device), and what else it takes to write the tensor again.
    """

    __slots__ = (
        "dtype",
        "extra",
        "layout",
        "offset",
        "parts",
        "requires_grad",
        "shape",
        "storage",
        "stride",
    )

    def __init__(
        self,
        storage: StorageRef | None,
        offset: int,
        shape: tuple[int, ...] | None,
        stride: tuple[int, ...] | None,
        requires_grad: bool,
        dtype: str,
        layout: str = "strided",
        parts: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.storage = storage
        self.offset = offset
        self.shape = shape
        self.stride = stride
        self.requires_grad = requires_grad
        self.dtype = dtype
        self.layout = layout
        self.parts = parts
        self.extra = extra

    def with_extra(self, **facts: Any) -> TensorValue:
        """A copy that also carries `facts`; the original may be shared through the memo.

        `layers` then says that one `state` has been put in place of another.
        """
        if "state" in facts and self.extra and "state" in self.extra:
            facts["layers"] = True
        return TensorValue(
            self.storage,
            self.offset,
            self.shape,
            self.stride,
            self.requires_grad,
            self.dtype,
            self.layout,
            self.parts,
            {**(self.extra or {}), **facts},
        )

    def __repr__(self) -> str:
        return f"TensorValue({self.layout}, {self.dtype}, {self.shape})"


class NumpyDtype:
    """A `numpy.dtype`: `spec` as numpy spells it (`<f8`), with its names and fields if
    structured.
    """

    __slots__ = ("spec", "state")

    def __init__(self, spec: str, state: tuple[Any, ...] | None = None) -> None:
        self.spec = spec
        self.state = state

    def __repr__(self) -> str:
        return f"NumpyDtype({self.spec!r})"


# Where numpy 1 has the functions that its pickles name; numpy 2 still finds them there.
_NUMPY_MODULE = "numpy.core.multiarray"


class NumpyArray:
    """A `numpy.ndarray` stored in the pickle: its raw `data`, or a list for dtype `object`.

    `module` is where the file says that numpy's function for it lies.
    """

    __slots__ = ("data", "dtype", "fortran_order", "module", "shape", "subclass")

    def __init__(self, subclass: str | None = None, module: str = _NUMPY_MODULE) -> None:
        self.subclass = subclass
        self.module = module
        self.shape: tuple[int, ...] = ()
        self.dtype: Any = None
        self.fortran_order = False
        self.data: Any = None

    def __repr__(self) -> str:
        return f"NumpyArray({self.dtype!r}, {self.shape})"


class NumpyScalar:
    """A numpy scalar: `dtype` and raw `data`; `value` is the Python number where there is one.

    `module` is where the file says that numpy's function for it lies.
    """

    __slots__ = ("data", "dtype", "module", "value")

    def __init__(self, dtype: Any, data: Any, value: Any, module: str = _NUMPY_MODULE) -> None:
        self.module = module
        self.dtype = dtype
        self.data = data
        self.value = value

    def __repr__(self) -> str:
        return f"NumpyScalar({self.dtype!r}, {self.value!r})"
