"""Which record is which, where the copies of a name differ or are gone.

Names that the pickle refers to, and those that torch's writers use, win over others; and no name is
given twice. What has no name left takes the one that is missing at its place, if size and order
leave no choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.mending.found import Found

MAIN_PICKLE = "data.pkl"
HOUSEKEEPING = (
    ".format_version",
    ".storage_alignment",
    "byteorder",
    "version",
    ".data/serialization_id",
)
_MOST_DIFFERING = 2


class Named:
    """`names` has each record's name below the `root` folder (no slash), None for what has none.

    `outside` holds the indices of records that lie outside the root, by their full names.
    """

    __slots__ = ("names", "outside", "root")

    def __init__(self, root: str, names: list[str | None], outside: set[int]) -> None:
        self.root = root
        self.names = names
        self.outside = outside


def name_records(records: Sequence[Found], sizes: dict[str, int] | None) -> Named:
    """Names for `records`; `sizes` are those by record name that the pickle declares, if any."""
    root = _root(records)
    wanted = {MAIN_PICKLE, *HOUSEKEEPING, *(sizes or ())}
    choices = [_choices(record, root) for record in records]
    names: list[str | None] = [None] * len(records)
    used: set[str] = set()
    # First those about which nobody disagrees, so that they are not given away.
    # And first what is proven: without that, a name may be all that a record has.
    order = sorted(range(len(records)), key=lambda index: not records[index].matches)
    for index in order:
        options = choices[index]
        if len(options) == 1 and options[0] in wanted:
            names[index] = options[0]
            used.add(options[0])
    for index in order:
        options = choices[index]
        if names[index] is None and options:
            names[index] = _best(records[index], options, wanted, used, sizes or {})
            used.add(names[index] or "")
    _fill(records, names, wanted - used, sizes or {})
    outside = {
        index for index, record in enumerate(records) if _is_outside(record, names[index], root)
    }
    return Named(root.rstrip("/"), names, outside)


def _root(records: Sequence[Found]) -> str:
    """The folder, with its slash, that most copies of names have: of those with a pickle, if any.

    The pickle's own copies may be the damaged ones.
    """
    roots: Counter[bytes] = Counter()
    pickles: set[bytes] = set()
    for record in records:
        for raw in record.names:
            root = raw[: raw.find(b"/") + 1]
            roots[root] += 1
            if raw == root + MAIN_PICKLE.encode():
                pickles.add(root)
    with_pickle = {root for root in roots if any(_alike(root, other) for other in pickles)}
    best = max(with_pickle or roots, key=lambda root: roots[root], default=b"")
    return best.decode("utf-8", "backslashreplace")


def _choices(record: Found, root: str) -> list[str]:
    """The names below the root that a record's copies give, each once."""
    found, own = [], root.encode()
    for raw in record.names:
        below = raw[len(own) :]
        if raw[: len(own)] == own or (below and _alike(raw[: len(own)], own)):
            found.append(_text(below))  # perhaps the damage is in the root
        else:
            found.append(_text(raw))
    return list(dict.fromkeys(found))


def _best(
    record: Found, options: list[str], wanted: set[str], used: set[str], sizes: dict[str, int]
) -> str | None:
    free = [name for name in options if name in wanted and name not in used]
    fitting = [name for name in free if sizes.get(name) == record.size]
    for names in (fitting, free):
        if names:
            return names[0]
    unused = [name for name in options if name not in used]
    if record.names and not unused:
        return options[0]  # a namesake in the file itself
    # Every copy is damaged. What is nearly one of the names that are missing is that one.
    missing = [n for n, size in sizes.items() if n not in used and size == record.size]
    missing += [n for n in (MAIN_PICKLE, *HOUSEKEEPING) if n not in used]
    ends = [raw[-len(name.encode()) :] for raw in record.names for name in missing]
    close = [n for n in missing if any(_alike(n.encode(), end) for end in ends)]
    return close[0] if len(close) == 1 else unused[0]


def _fill(
    records: Sequence[Found], names: list[str | None], missing: set[str], sizes: dict[str, int]
) -> None:
    """Gives names to those without any: what is missing between their neighbours, if clear."""
    for index, name in enumerate(names):
        if name is not None:
            continue
        if index == 0 and MAIN_PICKLE in missing:
            names[index] = MAIN_PICKLE
        else:
            names[index] = _only(records[index], index, names, missing, sizes)
        missing.discard(names[index] or "")


def _only(
    record: Found,
    index: int,
    names: list[str | None],
    missing: set[str],
    sizes: dict[str, int],
) -> str | None:
    fitting = [name for name in missing if sizes.get(name, record.size) == record.size]
    data = [name for name in fitting if name in sizes]
    if len(data) <= 1:
        return data[0] if data else _housekeeping(index, names, fitting)
    before = next((n for n in reversed(names[:index]) if n in sizes), None)
    after = next((n for n in names[index + 1 :] if n in sizes), None)
    orders: list[list[str]] = [list(sizes), sorted(sizes), sorted(sizes, key=_number)]
    for order in orders:
        low = order.index(before) if before else -1
        high = order.index(after) if after else len(order)
        between = [name for name in order[low + 1 : high] if name in fitting]
        if len(between) == 1:
            return between[0]
    return None


def _housekeeping(index: int, names: list[str | None], fitting: list[str]) -> str | None:
    """What torch writes at this place: first the pickle's companions, then storages, then these."""
    behind = any(name is not None and name.startswith("data/") for name in names[:index])
    ours = [n for n in (HOUSEKEEPING[3:] if behind else HOUSEKEEPING[:3]) if n in fitting]
    return ours[0] if ours else None


def _is_outside(record: Found, name: str | None, root: str) -> bool:
    """Whether all that names a record puts it outside the root."""
    return bool(
        name is not None
        and record.names
        and root
        and name == _text(record.names[0])
        and not _text(record.names[0]).startswith(root)
    )


def _number(name: str) -> tuple[int, str]:
    key = name.rpartition("/")[2]
    return (int(key) if key.isascii() and key.isdigit() and len(key) < 19 else -1, key)


def _alike(a: bytes, b: bytes) -> bool:
    if len(a) != len(b):
        return False
    return sum(x != y for x, y in zip(a, b, strict=True)) <= _MOST_DIFFERING


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
