"""Which of several records with one name torch reads.

torch looks names up through miniz: names are compared without regard to ASCII case, the directory
is sorted by a heap sort (which does not keep the order of equals), and then searched by halving. So
which twin is found depends on all the other names. This does the same steps and finds the same one
(miniz.c: `mz_zip_reader_sort_central_dir_offsets_by_filename`, `mz_zip_locate_file_binary_search`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Sorting in Python takes seconds for more; a file with so many records and twins is not honest.
_MOST_SORTED = 50_000


def torch_choices(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """For each wanted name, the index in `names` of the record that torch would read under it.

    Every wanted name must be among `names`. Beyond 50,000 names it is the last with that name.
    """
    keys = [_key(name) for name in names]
    if len(keys) > _MOST_SORTED:
        last = {key: index for index, key in enumerate(keys)}
        return [last[_key(name)] for name in wanted]
    order = _heap_sorted(keys)
    return [_search(keys, order, _key(name)) for name in wanted]


def twins(names: Sequence[str]) -> dict[str, list[int]]:
    """The names that torch can't tell apart: the name as torch compares it, and their indices."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(_lower(name), []).append(index)
    return {name: indices for name, indices in groups.items() if len(indices) > 1}


def _lower(name: str) -> str:
    return name.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")


def _key(name: str) -> bytes:
    # bytes.lower() changes ASCII letters only, as miniz does.
    return name.encode("utf-8", "surrogatepass").lower()


def _heap_sorted(keys: list[bytes]) -> list[int]:
    order = list(range(len(keys)))
    for start in range((len(keys) - 2) // 2, -1, -1):
        _sift(keys, order, start, len(keys))
    for end in range(len(keys) - 1, 0, -1):
        order[end], order[0] = order[0], order[end]
        _sift(keys, order, 0, end)
    return order


def _sift(keys: list[bytes], order: list[int], root: int, end: int) -> None:
    while (child := 2 * root + 1) < end:
        if child + 1 < end and keys[order[child]] < keys[order[child + 1]]:
            child += 1
        if not keys[order[root]] < keys[order[child]]:
            return
        order[root], order[child] = order[child], order[root]
        root = child


def _search(keys: list[bytes], order: list[int], wanted: bytes) -> int:
    low, high = 0, len(order) - 1
    while low <= high:
        middle = low + (high - low) // 2
        index = order[middle]
        if keys[index] == wanted:
            return index
        if keys[index] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    raise KeyError(wanted)
