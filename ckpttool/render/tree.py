"""The inert content of a file as JSON and as an indented listing.

A file decides how deep and how often its objects are nested and shared. So depth is bounded, and a
container that was written once is only referred to afterwards, unless it is small and flat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    StorageRef,
    TensorValue,
)
from ckpttool.render.jsondoc import dumps, plain_scalar
from ckpttool.render.text import escape, shorten_middle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckpttool.model.tensor import TensorRef

MAX_DEPTH = 100
_SMALL = 16  # items of a flat container that is written out each time it is met
_INLINE = 8  # items of a flat list that the listing shows
_INTEGER_BITS = 256  # longer ones are only described
_TEXT = 100  # characters of a text that the listing shows
_SCALARS = (int, float, str, bytes, bytearray, type(None))


def is_small(value: Any) -> bool:
    """Whether a container is so small and flat that repeating it costs nothing."""
    items = value.values() if isinstance(value, dict) else value
    return len(value) <= _SMALL and all(
        isinstance(item, _SCALARS) and (not isinstance(item, (str, bytes)) or len(item) < 100)
        for item in items
    )


def join(path: str, key: Any) -> str:
    """The dotted path of an entry: `optimizer.state` and 0 give `optimizer.state.0`."""
    if isinstance(key, int) and key.bit_length() > _INTEGER_BITS:
        key = f"(int of {key.bit_length()} bits)"  # Python refuses to spell the largest
    elif not isinstance(key, (str, int, float, type(None))):
        key = f"({type(key).__name__})"
    return f"{path}.{key}" if path else str(key)


class JsonTree:
    """Writes a tree as JSON through `write`.

    Dictionaries whose keys are all text or whole numbers become objects, other ones
    `{"$dict": [[key, value], …]}`; tuples and lists become lists; `{"$set": […]}`,
    `{"$tensor": name}`, `{"$opaque": "module.name", …}`, `{"$global": "module.name"}`,
    `{"$ref": path}` for what was written at `path`, `{"$truncated": "depth"}` below `MAX_DEPTH`.
    Values of keys for which `hide` holds are not shown.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        tensors: Mapping[str, TensorRef],
        hide: Callable[[Any], bool] | None = None,
    ) -> None:
        self._write = write
        self._hide = hide
        self._tensors = tensors
        self._names: dict[int, str] | None = None
        self._seen: dict[int, str] = {}

    def value(self, value: Any, path: str = "", depth: int = 0) -> None:
        """Writes one value, which stands at `path`."""
        if value is None or isinstance(value, bool):
            self._write(dumps(value))
        elif isinstance(value, (int, float, str, bytes, bytearray)):
            self._write(dumps(plain_scalar(value)))
        elif isinstance(value, TensorValue):
            self._write(dumps({"$tensor": self._name(value, path)}))
        elif isinstance(value, (dict, list, tuple, set, frozenset, Opaque)):
            self._container(value, path, depth)
        else:
            self._write(dumps(leaf(value)))

    def _name(self, value: TensorValue, path: str) -> str:
        """The name under which `tensors` lists a tensor: its path, or else found by identity."""
        listed = self._tensors.get(path)
        if listed is not None and listed.value is value:
            return path
        if self._names is None:
            self._names = {id(ref.value): name for name, ref in self._tensors.items()}
        return self._names.get(id(value), path)

    def _container(self, value: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._write('{"$truncated": "depth"}')
            return
        if isinstance(value, Opaque) or not is_small(value):
            first = self._seen.setdefault(id(value), path)
            if first is not path:
                self._write(dumps({"$ref": first}))
                return
        if isinstance(value, dict):
            self._dict(value, path, depth)
        elif isinstance(value, Opaque):
            self._opaque(value, path, depth)
        elif isinstance(value, (set, frozenset)):
            self._write('{"$set": ')
            self._list(sorted(value, key=_set_order), path, depth + 1)
            self._write("}")
        else:
            self._list(value, path, depth)

    def _list(self, value: Any, path: str, depth: int) -> None:
        self._write("[")
        for index, item in enumerate(value):
            if index:
                self._write(", ")
            self.value(item, join(path, index), depth + 1)
        self._write("]")

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> None:
        names = [join("", key) if type(key) is int else key for key in value]
        if all(isinstance(name, str) and name[:1] != "$" for name in names):
            fields = dict(zip(names, value.values(), strict=True))
            if len(fields) == len(value):  # no 1 beside "1"
                self._fields(fields, path, depth)
                return
        self._pairs("$dict", value.items(), path, depth)

    def _fields(self, fields: dict[str, Any], path: str, depth: int) -> None:
        separator = "{"
        for name, item in fields.items():
            self._write(f"{separator}{dumps(name)}: ")
            if self._hide is not None and item is not None and self._hide(name):
                self._write('"(hidden)"')
            else:
                self.value(item, join(path, name), depth + 1)
            separator = ", "
        self._write("}" if fields else "{}")

    def _pairs(self, tag: str, pairs: Iterable[tuple[Any, Any]], path: str, depth: int) -> None:
        separator = f'{{"{tag}": ['
        for key, item in pairs:
            place = join(path, key)
            self._write(separator + "[")
            self.value(key, join(place, "(key)"), depth + 2)
            self._write(", ")
            self.value(item, place, depth + 2)
            self._write("]")
            separator = ", "
        self._write("]}" if separator == ", " else f'{{"{tag}": []}}')

    def _opaque(self, value: Opaque, path: str, depth: int) -> None:
        self._write(f'{{"$opaque": {dumps(value.path)}, "opcode": {dumps(value.opcode)}')
        for name, part in opaque_parts(value):
            self._write(f', "{name}": ')
            # Tensors below an object go by its own names, not by how it is pickled.
            own = name in ("args", "target") or (name == "state" and not isinstance(part, dict))
            self.value(part, join(path, name) if own else path, depth + 1)
        self._write("}")


def _set_order(item: Any) -> tuple[str, str]:
    """Any fixed order, so that a document is the same each time."""
    return type(item).__name__, hex(item) if isinstance(item, int) else repr(item)


def opaque_parts(value: Opaque) -> Iterator[tuple[str, Any]]:
    """What a call would have got, by name, without what is empty."""
    if not isinstance(value.target, GlobalRef):
        yield "target", value.target
    for name in ("args", "kwargs", "state", "items", "pairs"):
        part = getattr(value, name)
        if part is not None and part != ():
            yield name, part


def leaf(value: Any) -> Any:
    """An inert value without children as plain JSON data."""
    if isinstance(value, GlobalRef):
        return {"$global": value.path}
    if isinstance(value, StorageRef):
        return {"$storage": value.key, "dtype": value.dtype, "numel": value.numel}
    if isinstance(value, NumpyArray):
        return {"$ndarray": _spec(value.dtype), "shape": list(value.shape)}
    if isinstance(value, NumpyScalar):
        number = None if value.value is None else plain_scalar(value.value)
        return {"$scalar": number, "dtype": _spec(value.dtype)}
    if isinstance(value, NumpyDtype):
        return {"$dtype": value.spec}
    if isinstance(value, complex):
        return {"$complex": [plain_scalar(value.real), plain_scalar(value.imag)]}
    return {"$other": type(value).__name__}


def _spec(dtype: Any) -> str | None:
    return dtype.spec if isinstance(dtype, NumpyDtype) else None


class TextTree:
    """Lists a tree, one value to a line, indented by its depth."""

    def __init__(self, line: Callable[[str], object]) -> None:
        self._line = line
        self._seen: dict[int, str] = {}

    def show(self, label: str, value: Any, path: str = "", depth: int = 0) -> None:
        """Writes `label: value`, and below it what the value contains."""
        indent = "  " * depth
        children = None
        words = brief(value)
        if words is None:
            children = list(_children(value))
            words = _summary(value)
            first = self._seen.setdefault(id(value), path or "(root)")
            if first is not path and depth:
                words, children = f"{words}, the same object as {escape(first)}", None
            elif depth > MAX_DEPTH:
                words, children = f"{words}, not shown: nested too deep", None
        self._line(f"{indent}{escape(label)}: {words}" if label else f"{indent}{words}")
        for key, item in children or ():
            self.show(key, item, join(path, key), depth + 1)


def brief(value: Any) -> str | None:
    """A value in a few escaped words, or None for a container that needs lines of its own."""
    if isinstance(value, (str, bytes, bytearray)):
        return _brief_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            str(value)
            if value.bit_length() <= _INTEGER_BITS
            else f"int of {value.bit_length()} bits"
        )
    if value is None or isinstance(value, (bool, float, complex)):
        return repr(value)
    if isinstance(value, TensorValue):
        return tensor_words(value)
    if isinstance(value, Opaque):
        return None if any(opaque_parts(value)) else f"{escape(value.path)}()"
    if isinstance(value, (list, tuple, set, frozenset)) and is_small(value):
        shown = ", ".join(str(brief(item)) for item in list(value)[:_INLINE])
        more = f", … {len(value)} items" if len(value) > _INLINE else ""
        left, right = _BRACKETS.get(type(value), ("[", "]"))
        return f"{left}{shown}{more}{right}"
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return None if value else "empty " + _kind(value)
    return _brief_leaf(value)


_BRACKETS = {tuple: ("(", ")"), set: ("{", "}"), frozenset: ("{", "}")}


def _brief_text(value: str | bytes | bytearray) -> str:
    if isinstance(value, str):
        return f"'{escape(shorten_middle(value, _TEXT))}'"
    return f"{len(value):,} bytes"


def _brief_leaf(value: Any) -> str:
    if isinstance(value, GlobalRef):
        return escape(value.path)
    if isinstance(value, StorageRef):
        return f"storage {escape(value.key)}, {value.numel:,} of {value.dtype}"
    if isinstance(value, NumpyArray):
        return f"numpy array {escape(_spec(value.dtype) or '?')} {list(value.shape)}"
    if isinstance(value, NumpyScalar):
        return f"numpy scalar {escape(_spec(value.dtype) or '?')} {value.value!r}"
    if isinstance(value, NumpyDtype):
        return f"numpy dtype {escape(value.spec)}"
    return escape(type(value).__name__)


def tensor_words(value: TensorValue) -> str:
    """`tensor float32 [8, 4]`, with its layout where it is not the ordinary one."""
    shape = "ragged" if value.shape is None else str(list(value.shape))
    layout = "" if value.layout == "strided" else f"{value.layout} "
    return f"{layout}tensor {value.dtype} {shape}"


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "dict"
    if isinstance(value, tuple):
        return "tuple"
    return type(value).__name__


def _summary(value: Any) -> str:
    if isinstance(value, Opaque):
        return escape(value.path)
    return f"{_kind(value)} of {len(value):,}"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Opaque):
        yield from opaque_parts(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (key if isinstance(key, str) else brief(key) or _summary(key)), item
    else:
        for index, item in enumerate(value):
            yield str(index), item
