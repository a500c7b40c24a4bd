"""Names inside a zip: the root folder, what lies outside it, and what is odd about a name.

torch takes the first entry's first folder for the root of all, and looks for records below it only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.anomaly import Anomaly

if TYPE_CHECKING:
    from ckpttool.formats.container import Record


class Named(NamedTuple):
    """Records with their names sorted out. Fields as in `Container`, and what was odd."""

    prefix: str
    entries: list[Record]
    records: dict[str, Record]
    anomalies: list[Anomaly]


def name_records(entries: list[Record]) -> Named:
    """Settles the root folder, and decides between namesakes.

    `entries` are named below the first one's root, as torch does. Where that root holds no
    `data.pkl` and another does, they are named below the other, and an anomaly says so.
    """
    anomalies: list[Anomaly] = []
    root = entries[0].root if entries else ""
    better = _root_with_pickle(entries, root)
    if better != root:
        anomalies.append(Anomaly("several-roots", first=root, chosen=better))
        entries = [_below(record, better) for record in entries]
        root = better
    outside = [record.name for record in entries if not record.in_root]
    if outside:
        facts = {"count": len(outside), "outside": outside[:20]}
        anomalies.append(Anomaly("several-roots", None, chosen=root, **facts))
    records = {record.name: record for record in entries if record.in_root}
    for name in [name for name in records if name[-1:] in ("", "/")]:
        del records[name]  # entries for folders, which other tools write
    names = [record.name for record in entries]
    joined = "".join(names)
    if len(records) < len(entries) or joined != joined.lower():
        anomalies += _choose_twins(entries, records)
    # Names below a root can't be absolute.
    bare = names if not root else outside
    if "" in names or not _all_plain(root + joined, bare):
        anomalies += _odd_names(entries)
    return Named(root[:-1], entries, records, anomalies)


def _root_with_pickle(entries: list[Record], first: str) -> str:
    """The root whose folder holds `data.pkl`; `first` where it does, or none does."""
    if any(record.name == "data.pkl" and record.in_root for record in entries):
        return first
    full = (record.full_name for record in entries)
    roots = [name[: -len("data.pkl")] for name in full if name.endswith("data.pkl")]
    # Unpacked and zipped again on a Mac: its own folder of resource forks may come first.
    plain = [root for root in roots if root.count("/") <= 1 and root[-1:] in ("", "/")]
    return next((root for root in plain if root != "__MACOSX/"), first)


def _below(record: Record, root: str) -> Record:
    name = record.full_name
    if name.startswith(root):
        return record._replace(name=name[len(root) :], root=root, in_root=True)
    return record._replace(name=name, root="", in_root=False)


def _choose_twins(entries: list[Record], records: dict[str, Record]) -> list[Anomaly]:
    """Puts into `records` what torch would read, and reports each group of namesakes."""
    from ckpttool.formats.zip_lookup import torch_choices, twins

    names = [record.full_name for record in entries]
    groups = twins(names)
    flat = [index for group in groups.values() for index in group]
    choices = torch_choices(names, [names[index] for index in flat])
    for index, choice in zip(flat, choices, strict=True):
        if entries[index].in_root:
            records[entries[index].name] = entries[choice]
    return [_twin_anomaly([entries[index] for index in group]) for group in groups.values()]


def _twin_anomaly(group: list[Record]) -> Anomaly:
    exact = len({record.full_name for record in group}) < len(group)
    code = "duplicate-record" if exact else "case-twin-record"
    names = [record.full_name for record in group]
    offsets = [record.header_offset for record in group]
    return Anomaly(code, group[0].name, count=len(group), names=names, offsets=offsets)


def _all_plain(joined: str, bare: list[str]) -> bool:
    """Whether no name can be odd: a few looks at all of them together instead of at each."""
    suspicious = any(part in joined for part in ("..", "\\", ":"))
    if suspicious or not joined.isprintable() or joined.startswith("/"):
        return False
    return not any(name.startswith("/") for name in bare)


def _odd_names(entries: list[Record]) -> list[Anomaly]:
    found = [(record, _what_is_odd(record)) for record in entries]
    return [Anomaly("bad-record-name", r.name, problem=words) for r, words in found if words]


def _what_is_odd(record: Record) -> str | None:
    """Why a record's name could harm whoever unpacks or prints it; None if it could not."""
    name = record.full_name
    if not name:
        return "empty"
    if not name.isprintable():
        return "control characters"
    if name.startswith(("/", "\\")) or name[1:3] in (":/", ":\\"):
        return "absolute"
    if ".." in name.replace("\\", "/").split("/"):
        return "leads out of its folder"
    return "backslash" if "\\" in name else None
