"""Whole modules (`torch.save(model)`): their state dict, as the module itself would give it.

Source: torch/nn/modules/module.py, `Module.state_dict`: parameters and buffers by dotted name, own
ones first, then those of each submodule in order; buffers that are not persistent, and parameters
that are None, are not in it. What a class adds by `get_extra_state` only its code could tell, and
so it is with `_version`, which the dictionary's `_metadata` has: only those of torch's own layers
are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.converting.objects import attributes_of
from ckpttool.converting.terms import LEFT_OUT, NoPlainFormError, Steps, canonical, copy_tensor
from ckpttool.formats.values import Opaque, OrderedMap, TensorValue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.converting.plain import Plainer

_TABLES = ("_parameters", "_buffers", "_modules")
_LAYERS = "torch.nn.modules."
_VERSION_2 = (f"{_LAYERS}batchnorm.", f"{_LAYERS}instancenorm.")  # since num_batches_tracked
_MOST_ENTRIES = 1_000_000  # submodules can be shared: their names double with each level


def is_module(value: Opaque) -> bool:
    """Whether an object keeps the tables of a `torch.nn.Module`."""
    state = attributes_of(value)
    return state is not None and all(isinstance(state.get(name), dict) for name in _TABLES)


def state_dict(plainer: Plainer, module: Opaque) -> Steps:
    """The module's state dict: an ordered dictionary of plain tensors."""
    result = plainer.begin(module, OrderedMap())
    versions = OrderedMap()
    for name, tensor in _entries(module, versions):
        plain = yield name, tensor
        if plain is LEFT_OUT:
            continue
        if not isinstance(plain, TensorValue):
            raise NoPlainFormError(f"its parameter or buffer {name} is no tensor")
        result[name] = _detached(plain)
        if len(result) > _MOST_ENTRIES:
            raise NoPlainFormError("it has too many parameters")
    if versions:
        result.attributes = {"_metadata": versions}
    plainer.note(f"module {canonical(module)}", f"its state dict of {len(result):,} tensors")
    return result


def _entries(module: Opaque, versions: OrderedMap) -> Iterator[tuple[str, Any]]:
    """Names and tensors, before any is made plain. Fills `versions`, the metadata by prefix."""
    todo: list[tuple[str, Opaque]] = [("", module)]
    visited = 0
    while todo:
        prefix, one = todo.pop()
        visited += 1
        state = attributes_of(one) or {}
        kind = canonical(one)
        if kind.startswith(_LAYERS):
            versions[prefix[:-1]] = {"version": 2 if kind.startswith(_VERSION_2) else 1}
        kept_out = state.get("_non_persistent_buffers_set") or ()
        for table in _TABLES[:2]:
            for name, tensor in state[table].items():
                skipped = table == "_buffers" and name in kept_out
                if tensor is not None and not skipped:
                    yield f"{prefix}{name}", tensor
        below = [(f"{prefix}{k}.", v) for k, v in state["_modules"].items() if v is not None]
        if any(not isinstance(v, Opaque) or not is_module(v) for _, v in below):
            raise NoPlainFormError("one of its submodules is no module")
        if visited + len(todo) > _MOST_ENTRIES:
            raise NoPlainFormError("it has too many submodules")
        todo.extend(reversed(below))


def _detached(tensor: TensorValue) -> TensorValue:
    """The tensor itself, of a parameter too: a state dict takes no gradients."""
    extra = {k: v for k, v in (tensor.extra or {}).items() if k not in ("parameter", "state")}
    if tensor.extra is None and not tensor.requires_grad:
        return tensor
    detached = copy_tensor(tensor, tensor.parts, extra)
    detached.requires_grad = False
    return detached
