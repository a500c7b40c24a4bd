"""Run by itself, with torch: compares what torch loads from a new file with what it loads from the old.

    python torch_compares.py JOBS.json OUT.json

A job is {"kind", "old", "new", …}; the answer is a list of complaints for each. Nothing here is the
tool's own.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import warnings
from typing import Any

import numpy as np
import safetensors.torch
import torch

from tests.ckpttool.converting.torch_makes import (  # noqa: F401 - as do those made for these tests
    Color,
    Config,
    Level,
    Pair,
    Tied,
)
from tests.ckpttool.model.torch_says import (  # noqa: F401 - files of the corpus name them here
    DC,
    IE,
    NT,
    E,
    Slot,
    Sub,
    load,
    raw,
    walk,
)

FACTS = ("dtype", "shape", "layout", "requires_grad", "stride", "raw", "parts")


def tensors_of(root: Any) -> dict[str, torch.Tensor]:
    """Tensors themselves, by the names that `walk` gives; and numpy arrays as tensors."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, torch.Tensor):
            found[name] = value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        children: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            children = list(value.items())
        elif isinstance(value, (list, tuple)):
            children = list(enumerate(value))
        prefix = f"{name}." if name else ""
        todo.extend((f"{prefix}{key}", child) for key, child in reversed(children))
    return found


def arrays_of(root: Any, name: str = "", depth: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """numpy arrays of numbers in dictionaries, lists, tuples and namespaces, by name."""
    if isinstance(root, np.ndarray) and root.dtype.kind in "biufc" and root.ndim:
        return {name: root}
    children: list[tuple[Any, Any]] = []
    if isinstance(root, argparse.Namespace):
        root = vars(root)
    if isinstance(root, dict):
        children = list(root.items())
    elif isinstance(root, (list, tuple)):
        children = list(enumerate(root))
    found = {}
    for key, child in children if depth < 8 else []:
        found.update(arrays_of(child, f"{name}.{key}" if name else str(key), depth + 1))
    return found


def leaves_of(root: Any) -> dict[str, str]:
    """Plain values by name, as text that tells their types apart."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, (bool, int, float, str, bytes, bytearray, complex, type(None))):
            if type(value) in (bool, int, float, str, bytes, bytearray, complex, type(None)):
                found[name] = repr(value)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        children: list[tuple[Any, Any]] = []
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if isinstance(value, dict):
            children = list(value.items())
        elif isinstance(value, (list, tuple)):
            children = list(enumerate(value))
        prefix = f"{name}." if name else ""
        todo.extend((f"{prefix}{key}", child) for key, child in reversed(children))
    return found


def sharing(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of the tensors on each storage that has several."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if raw(tensor) is not None and tensor.untyped_storage().nbytes():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def same_tensors(old: Any, new: Any, complain: Any, *, facts: tuple[str, ...] = FACTS) -> None:
    before = {one["name"]: one for one in walk(old)}
    after = {one["name"]: one for one in walk(new)}
    for name, one in before.items():
        other = after.get(name)
        if other is None:
            complain(f"{name} is missing")
            continue
        for fact in facts:
            mine, theirs = without_places(one[fact]), without_places(other[fact])
            if mine != theirs:
                complain(f"{name}: {fact} was {str(mine)[:60]}, is {str(theirs)[:60]}")


def without_places(fact: Any) -> Any:
    """Parts of tensors without where they lie in their storages."""
    if not isinstance(fact, dict):
        return fact
    return {
        k: {f: v for f, v in part.items() if f not in ("offset", "storage_nbytes")}
        for k, part in fact.items()
    }


def compare_hardened(job: dict[str, Any], complain: Any) -> None:
    new = torch.load(job["new"], map_location="cpu", weights_only=True)
    torch.load(job["new"], map_location="cpu", weights_only=True, mmap=True)
    if job.get("only"):
        return
    old = load(job["old"])
    if isinstance(old, torch.nn.Module) and not isinstance(old, torch.jit.ScriptModule):
        old = collections.OrderedDict(old.state_dict())
    same_tensors(old, new, complain)
    if any(one["subclass"] for one in walk(new) if one["layout"] != "wrapper"):
        complain("a subclass is left")
    if sharing(tensors_of(old)) != sharing(tensors_of(new)):
        complain(f"sharing: {sharing(tensors_of(old))} became {sharing(tensors_of(new))}")
    tensors = tensors_of(new)
    for name, array in arrays_of(old).items():
        if name not in tensors:
            complain(f"array {name} is no tensor")
            continue
        ours = tensors[name].numpy()
        native = array.astype(array.dtype.newbyteorder("="))
        if ours.dtype != native.dtype or ours.shape != array.shape:
            complain(f"array {name}: {array.dtype} {array.shape} became {ours.dtype} {ours.shape}")
        elif ours.tobytes() != native.tobytes():
            complain(f"array {name} has other bytes")
    after = leaves_of(new)
    for name, text in leaves_of(old).items():
        if after.get(name) != text:
            complain(f"{name}: {text[:60]} became {after.get(name)}")


def compare_slim(job: dict[str, Any], complain: Any) -> None:
    old, new = load(job["old"]), torch.load(job["new"], map_location="cpu", weights_only=False)
    for key in job.get("dropped", ()):
        del old[key]
    if isinstance(old, dict) and list(old) != list(new):
        complain(f"keys: {list(old)} became {list(new)}")
    same_tensors(old, new, complain, facts=(*FACTS, "subclass"))
    before, after = tensors_of(old), tensors_of(new)
    for group in sharing(before):
        for one in group:
            for other in group:
                if overlap(before[one], before[other]) and distance(
                    before[one], before[other]
                ) != distance(after[one], after[other]):
                    complain(f"{one} and {other} no longer lie as they did")


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (a, b), (c, d) = extent(one), extent(other)
    return a < d and c < b and a < b and c < d


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def distance(one: torch.Tensor, other: torch.Tensor) -> int:
    return one.data_ptr() - other.data_ptr()


def compare_export(job: dict[str, Any], complain: Any) -> None:
    old = load(job["old"])
    if isinstance(old, torch.nn.Module):
        old = old.state_dict()
    if job["section"] is not None:
        old = old[job["section"]]
    if isinstance(old, torch.Tensor):
        old = {"tensor": old}
    wanted = {
        job["names"].get(name, name): torch.Tensor.detach(tensor)
        .as_subclass(torch.Tensor)
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .clone()
        for name, tensor in tensors_of(old).items()
        if name not in job["without"]
    }
    theirs = job["new"] + ".theirs"
    safetensors.torch.save_file(wanted, theirs, metadata={"format": "pt"})
    with safetensors.safe_open(job["new"], "pt") as file:
        found = {name: file.get_tensor(name) for name in file.offset_keys()}
        metadata = file.metadata()
    with safetensors.safe_open(theirs, "pt") as file:
        for name in file.offset_keys():
            same_tensor(name, file.get_tensor(name), found.pop(name, None), complain)
    if found:
        complain(f"more tensors than there should be: {list(found)}")
    if metadata.pop("format", None) != "pt":
        complain("the metadata does not say pt")
    if metadata != job["aliases"]:
        complain(f"metadata {metadata}")


def same_tensor(name: str, wanted: torch.Tensor, found: torch.Tensor | None, complain: Any) -> None:
    if found is None:
        complain(f"{name} is missing")
    elif (wanted.dtype, wanted.shape, raw(wanted)) != (found.dtype, found.shape, raw(found)):
        complain(f"{name} differs")


def compare_value(job: dict[str, Any], complain: Any) -> None:
    """What torch loads is exactly what the job spells out."""
    found = torch.load(job["new"], map_location="cpu", weights_only=True)
    for step in job.get("path", ()):
        found = found[step]
    names = {"torch": torch, "np": np, "inf": float("inf"), "collections": collections}
    if "look" in job:
        found = eval(job["look"], {**names, "found": found})
    differences(eval(job["value"], names), found, "", complain)


def differences(wanted: Any, found: Any, name: str, complain: Any) -> None:
    if type(wanted) is not type(found):
        complain(f"{name}: {type(wanted).__name__} is {type(found).__name__}: {str(found)[:80]}")
    elif isinstance(wanted, dict):
        if list(wanted) != list(found):
            complain(f"{name}: keys {list(wanted)} are {list(found)}")
        for key in wanted.keys() & found.keys():
            differences(wanted[key], found[key], f"{name}.{key}", complain)
    elif isinstance(wanted, (list, tuple)):
        if len(wanted) != len(found):
            complain(f"{name}: {len(wanted)} items are {len(found)}")
        for index, (one, other) in enumerate(zip(wanted, found, strict=False)):
            differences(one, other, f"{name}.{index}", complain)
    elif isinstance(wanted, torch.Tensor):
        facts = [(t.dtype, t.shape, t.stride(), raw(t)) for t in (wanted, found)]
        if facts[0] != facts[1]:
            complain(f"{name}: {wanted} is {found}")
    elif wanted != found and repr(wanted) != repr(found):
        complain(f"{name}: {wanted!r} is {found!r}")


def use_export(job: dict[str, Any], complain: Any) -> None:
    """A fresh module takes the file through safetensors' own `load_model`."""
    model, wanted = Tied(), torch.load(job["old"], weights_only=False)
    safetensors.torch.load_model(model, job["new"])
    for name, tensor in wanted.state_dict().items():
        if not torch.equal(tensor, model.state_dict()[name]):
            complain(f"{name} differs")
    theirs = job["new"] + ".model"
    safetensors.torch.save_model(wanted, theirs, metadata={"format": "pt"})
    with safetensors.safe_open(job["new"], "pt") as a, safetensors.safe_open(theirs, "pt") as b:
        if (sorted(a.keys()), a.metadata()) != (sorted(b.keys()), b.metadata()):
            complain(
                f"{a.metadata()} {sorted(a.keys())} where save_model has {b.metadata()} {sorted(b.keys())}"
            )


KINDS = {
    "value": compare_value,
    "load_model": use_export,
    "harden": compare_hardened,
    "slim": compare_slim,
    "export": compare_export,
}


def main(jobs_path: str, out: str) -> None:
    warnings.simplefilter("ignore")
    answers = []
    for job in json.loads(pathlib.Path(jobs_path).read_text(encoding="utf-8")):
        complaints: list[str] = []
        try:
            KINDS[job["kind"]](job, complaints.append)
        except Exception as error:
            complaints.append(f"{type(error).__name__}: {error}"[:400])
        answers.append(complaints)
    pathlib.Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
