"""What a program makes when it starts, and training never changes: whether it is the same again.

A split that was drawn at random (the indices of a `random_split`), random features, a shuffled list
of files: no checkpoint holds them, and a program that seeds nothing makes others after a resume. So
a checkpoint has a print of each, and a resume says which is unlike it.

Looked at are numbers in numbers: tensors, arrays, and containers of at least eight numbers or
words. Single settings are meant to change, and where something lies may change: of a path only its
last part counts. A print is the number of items, a hash, and of real numbers some, so that what
another machine has computed a bit differently is still the same. What is too big is sampled.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from trainer_core.census.marks import is_array, maps_a_file
from trainer_core.census.owners import STATE, Owner, attributes_of

_LEAST_ITEMS = 8  # of a container: fewer are a setting
_MOST_ITEMS = 1 << 21  # of one container of numbers
_MOST_MIXED = 10_000  # of containers within containers
_MOST_BYTES = 16 << 20  # of one tensor or array
_MOST_PRINTS = 500
_MOST_TOTAL = 256 << 20
_SAMPLES = 4
_NEAR = 1e-3
_NUMBERS = frozenset({int, bool})
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_PARTS = re.compile(r"[/\\]")

Print = dict[str, Any]


def prints_of(
    owners: Iterable[tuple[str, Owner]],
    more: Mapping[str, Any],
    is_covered: Callable[[torch.Tensor], bool],
) -> dict[str, Print]:
    """A print of each value of these owners, by path, and of `more`.

    `is_covered`: whether a tensor is one that a state dict has.
    """
    found: dict[str, Print] = {}
    left = _MOST_TOTAL
    values = (
        (f"{path}.{name}", value)
        for path, owner in owners
        for name, value in attributes_of(owner)
        if name != STATE
    )
    for path, value in itertools.chain(values, more.items()):
        if len(found) >= _MOST_PRINTS or left <= 0:
            break
        one = _Printer(is_covered)
        one.take(value)
        left -= one.taken
        if one.has_enough:
            found[path] = one.made()
    return found


def unlike(saved: Any, here: Mapping[str, Print]) -> Iterator[tuple[str, str]]:
    """Path and words for each print that both have, and that differs."""
    for path, print_here in here.items():
        then = saved.get(path) if isinstance(saved, Mapping) else None
        if not isinstance(then, Mapping) or then.get("hash") == print_here["hash"]:
            continue
        count, now = then.get("count"), print_here["count"]
        if count != now:
            yield path, f"had {count} items when the run was saved, it has {now} here"
        elif not _is_near(then.get("some"), print_here["some"]):
            yield path, "is not what the run was saved with: if it is drawn at random, seed that"


def _is_near(then: Any, here: list[float]) -> bool:
    """Whether both are real numbers that differ by what arithmetic may differ."""
    if not isinstance(then, (list, tuple)) or len(then) != len(here) or not here:
        return False
    return all(
        math.isclose(one, other, rel_tol=_NEAR, abs_tol=1e-6)
        or (math.isnan(one) and math.isnan(other))
        for one, other in zip(then, here, strict=True)
    )


class _Printer:
    """Takes one value, whatever of it can be told."""

    def __init__(self, is_covered: Callable[[torch.Tensor], bool]) -> None:
        self.taken = 0
        self._is_covered = is_covered
        self._hash = hashlib.blake2b(digest_size=8)
        self._count = self._left = 0
        self._some: list[float] = []
        self._has_numbers = False
        self._is_exact = False

    @property
    def has_enough(self) -> bool:
        """Whether it is more than a setting."""
        return self._count >= (2 if self._has_numbers else _LEAST_ITEMS)

    def made(self) -> Print:
        """The print."""
        return {
            "count": self._count,
            "hash": self._hash.hexdigest(),
            "some": [] if self._is_exact else self._some[:_SAMPLES],
        }

    def take(self, value: Any) -> None:
        """One value."""
        self._left = _MOST_MIXED
        self._take(value, 0)

    def _take(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._take_tensor(value)
        elif is_array(value) and value.ndim:
            self._take_array(value)
        elif is_array(value) and depth:
            self._feed(value.tobytes(), 1)
            self._is_exact = True
        elif isinstance(value, (array.array, bytearray)):
            self._feed(bytes(value[: _MOST_BYTES // 8]), len(value))
            self._is_exact = True
        elif type(value) in _CONTAINERS and depth < 4:
            self._take_container(value, depth)
        elif depth and isinstance(value, str):
            self._feed(_PARTS.split(value)[-1].encode(errors="replace"), 1)
            self._is_exact = True
        elif depth and isinstance(value, int):
            self._feed(repr(value).encode(), 1)
            self._is_exact = True
        elif depth and isinstance(value, float):
            self._feed(repr(value).encode(), 1)
            self._some.append(value)

    def _feed(self, data: Any, count: int) -> None:
        self._hash.update(data)
        self._hash.update(b"\0")
        self._count += count
        self.taken += len(data)

    def _take_container(self, value: Any, depth: int) -> None:
        if type(value) in (set, frozenset):
            try:
                value = sorted(value)
            except TypeError:
                return
        items = _items_of(value) if isinstance(value, dict) else value
        if len(items) > _LEAST_ITEMS and _NUMBERS.issuperset(map(type, items)):
            self._take_integers(items)
            return
        stride = max(1, len(items) // max(1, self._left))
        self._left -= len(items) // stride
        self._count += len(items) - len(range(0, len(items), stride))
        for item in itertools.islice(items, 0, None, stride):
            self._take(item, depth + 1)

    def _take_integers(self, items: Any) -> None:
        stride = max(1, len(items) // _MOST_ITEMS)
        some = list(itertools.islice(items, 0, None, stride))
        try:
            data = array.array("q", some).tobytes()
        except OverflowError:
            data = repr(some).encode()
        self._feed(data, len(items))
        self._is_exact = True

    def _take_tensor(self, value: torch.Tensor) -> None:
        odd = value.layout is not torch.strided or value.is_quantized or value.is_nested
        if odd or value.device.type == "meta" or self._is_covered(value):
            return
        plain, size = value.detach(), value.numel() * value.element_size()
        if type(plain) is not torch.Tensor or (size > _MOST_BYTES and not plain.is_contiguous()):
            return
        flat = plain.reshape(-1)
        stride = max(1, size // _MOST_BYTES)
        some = flat[::stride].cpu().contiguous()
        self._feed(some.view(torch.uint8).numpy() if some.numel() else b"", flat.numel())
        self._has_numbers = True
        if some.is_floating_point():
            self._some += some[:: max(1, some.numel() // _SAMPLES)][:_SAMPLES].double().tolist()
        else:
            self._is_exact = True

    def _take_array(self, value: Any) -> None:
        if value.dtype.kind not in "biufcSUmM" or maps_a_file(value):
            return
        if value.nbytes > _MOST_BYTES and not value.flags.c_contiguous:
            return
        stride = max(1, value.nbytes // _MOST_BYTES)
        some = value.reshape(-1)[::stride]
        self._feed(some.tobytes(), value.size)
        self._has_numbers = True
        if value.dtype.kind == "f":
            parts = some[:: max(1, some.size // _SAMPLES)][:_SAMPLES]
            self._some += [float(number) for number in parts]
        else:
            self._is_exact = True


def _items_of(value: dict[Any, Any]) -> list[Any]:
    """Of settings by their names only what is no single one."""
    if all(isinstance(key, str) for key in value):
        return [item for item in value.values() if not isinstance(item, (str, int, float))]
    return list(value.values())
