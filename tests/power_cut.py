"""What a file system may hold after a power cut, worked out from a log of operations.

    with CrashRig("package.module:function") as rig:
        log = rig.run(directory, record=True).ops
    for state in after_power_cuts(log, directory, STRICT):
        state.put(somewhere)            # a directory as the cut may have left it
        ...                             # state.marks: what the program had been told is safe

A killed process leaves all that it did; a power cut only what was synced, and of the rest whatever
happened to reach the disk. What that can be follows Pillai et al., "All File Systems Are Not
Created Equal" (OSDI 2014), whose two ends are the presets here:

STRICT  is the weakest that POSIX lets a file system be, their "default" persistence model. The data
        of a file is safe only after an fsync of that file, a name (made, renamed, linked, removed)
        only after an fsync of its folder. Until then any subset of the names has changed, whatever
        their order. Any part of a file's unsynced bytes is there, page by page; where it has grown
        the size may be any up to the new one, and what is not there reads as zeros. Only a rename
        is atomic: within a folder wholly; from one folder to another in so far as both names may
        be there, but the old one is never gone before the new one is.
ORDERED is a journal as ext4's with `data=ordered` (and XFS's): names change in the order in which
        they were changed, and any fsync makes all changes before it safe. Data that was appended is
        there before the size says so, so nothing reads as zeros; what was written over may be old
        or new. Blocks are allocated late, so a file may still be as short as at its last fsync,
        though it was renamed since.

Modes and times are data of their file. Every cut is looked at. Of it all states are tried, as long
as they are not more than `most`; above that a sample with a seed.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import random
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash import Op

STRICT = "strict"
ORDERED = "ordered"
PRESETS = (STRICT, ORDERED)

PAGE = 4096
_MOST_PAGES = 4  # of a file's changed pages, so many are lost or kept one by one

Key = tuple[int, str]  # a folder's number, and a name in it
Attributes = tuple[int, int]  # mode, and the time of the last change in nanoseconds


class Content:
    """Bytes with their hash, which is taken once."""

    __slots__ = ("data", "digest")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = hashlib.blake2b(data, digest_size=16).digest()


class Node:
    """A file, a folder or a link. Of a file `base` is what is safe, `writes` came after that."""

    def __init__(self, kind: str, text: str = "", data: bytes = b"") -> None:
        self.kind = kind
        self.text = text
        self.base = self.now = Content(data)
        self.base_attributes = self.attributes = (0o644, 0)
        self.writes: list[tuple[int, bytes | None]] = []  # None cuts, or fills with zeros, there

    @property
    def is_dirty(self) -> bool:
        return bool(self.writes) or self.attributes != self.base_attributes

    def change(self, at: int, data: bytes | None) -> None:
        self.writes.append((at, data))
        self.now = Content(_applied(self.now.data, [(at, data)]))

    def sync(self) -> None:
        self.base, self.base_attributes, self.writes = self.now, self.attributes, []


class Unit(NamedTuple):
    """Changes of names in one folder that happen together; `after` must have happened, too."""

    number: int
    folder: int
    changes: tuple[tuple[Key, int | None], ...]
    after: int | None = None


class Entry(NamedTuple):
    """What is at one path of a state. `node` is the same for all names of a file."""

    kind: str
    content: Content
    text: str
    attributes: Attributes
    node: int


class State(NamedTuple):
    """One thing that a cut may leave: entries by path, and what had been acknowledged before."""

    cut: int
    entries: dict[str, Entry]
    marks: tuple[str, ...]

    def key(self) -> bytes:
        """The same for all states that are alike."""
        summary = hashlib.blake2b(repr(self.marks).encode(), digest_size=16)
        for path, entry in sorted(self.entries.items()):
            summary.update(repr((path, entry.kind, entry.text, entry.attributes)).encode())
            summary.update(entry.content.digest)
        return summary.digest()

    def put(self, directory: str | os.PathLike[str]) -> None:
        """Makes the directory. It must not exist; what the cut left may be that it does not."""
        made: dict[int, str] = {}
        for path, entry in sorted(self.entries.items()):
            where = os.path.normpath(os.path.join(directory, path))
            if entry.kind == "folder":
                os.mkdir(where)
            elif entry.node in made:
                os.link(made[entry.node], where, follow_symlinks=False)
            else:
                made[entry.node] = where
                _put(where, entry)

    def told(self, word: str) -> bool:
        """Whether the program had been told `word`."""
        return word in self.marks


def _put(where: str, entry: Entry) -> None:
    mode, mtime = entry.attributes
    if entry.kind == "link":
        os.symlink(entry.text, where)
    else:
        with open(where, "wb") as file:
            file.write(entry.content.data)
        os.chmod(where, mode)
    os.utime(where, ns=(mtime, mtime), follow_symlinks=False)


class Disk:
    """A file system below one root, as the program sees it and as the disk has it for sure."""

    def __init__(self, root: str, preset: str) -> None:
        self.root = root
        self.preset = preset
        self.nodes: dict[int, Node] = {}
        self.live: dict[Key, int] = {}
        self.safe: dict[Key, int] = {}
        self.pending: list[Unit] = []
        self.top = self._add(Node("folder"))
        self._numbers = itertools.count()

    # ---- what happened

    def load(self, before: dict[str, Entry]) -> None:
        """Begins with a directory that is safe on disk: see `snapshot`."""
        numbers: dict[int, int] = {}
        for path, entry in sorted(before.items()):
            if entry.node not in numbers:
                node = Node(entry.kind, entry.text, entry.content.data)
                node.attributes = node.base_attributes = entry.attributes
                numbers[entry.node] = self._add(node)
            self.live[self._key(os.path.join(self.root, path))] = numbers[entry.node]
        self.safe = dict(self.live)

    def do(self, op: Op) -> None:
        """Takes one operation of the log into account."""
        detail = op.detail
        path = detail.get("path")
        if op.kind in ("fsync", "sync"):
            self._sync(path)
        elif op.kind in ("rename", "link"):
            self._move(self._key(path), self._key(detail["to"]), keep=op.kind == "link")
        elif op.kind in ("unlink", "rmdir"):
            self._note((self._key(path), None))
        elif op.kind == "mkdir":
            self._note((self._key(path), self._add(Node("folder"))))
        elif op.kind == "symlink":
            self._note((self._key(path), self._add(Node("link", detail["text"]))))
        elif path is not None:
            self._change_file(op.kind, path, detail)

    def _change_file(self, kind: str, path: str, detail: dict[str, object]) -> None:
        number = self.live.get(self._key(path)) if path != self.root else self.top
        if number is None:
            assert kind == "open", f"{path} is not known"
            number = self._add(Node("file"))
            self._note((self._key(path), number))
            mode, mtime = _attributes(detail)
            self.nodes[number].base_attributes = mode, mtime
        node = self.nodes[number]
        if kind == "write":
            node.change(_int(detail["at"]), base64.b64decode(str(detail["data"])))
        elif kind in ("truncate", "allocate"):
            node.change(_int(detail["size"]), None)
        elif kind == "open" and detail["truncated"] and node.now.data:
            node.change(0, None)
        if node.kind == "file" and "mode" in detail:
            node.attributes = _attributes(detail)

    def _move(self, source: Key, target: Key, *, keep: bool) -> None:
        number = self.live[source]
        if keep:
            self._note((target, number))
        elif source[0] == target[0] or self.preset == ORDERED:
            self._note((source, None), (target, number))
        else:
            first = self._note((target, number))
            self._note((source, None), after=first)

    def _note(self, *changes: tuple[Key, int | None], after: int | None = None) -> int:
        unit = Unit(next(self._numbers), changes[0][0][0], changes, after)
        self.pending.append(unit)
        _change(self.live, unit)
        return unit.number

    def _sync(self, path: str | None) -> None:
        number = self.top if path == self.root else path and self.live.get(self._key(path))
        if number is None:
            return  # a file that has no name any more
        self.nodes[number].sync()
        if self.preset == ORDERED:
            done = set(self.pending)
            for node in self.nodes.values():
                if not node.writes:
                    node.sync()
        else:
            done = {unit for unit in self.pending if unit.folder == number}
            needed = {unit.after for unit in done}
            done |= {unit for unit in self.pending if unit.number in needed}
        for unit in self.pending:
            if unit in done:
                _change(self.safe, unit)
        self.pending = [unit for unit in self.pending if unit not in done]

    def _key(self, path: str) -> Key:
        """Where a path leads, by the names as the program sees them."""
        *folders, name = os.path.relpath(path, self.root).split(os.sep)
        number = self.top
        for folder in folders:
            number = self.live[number, folder]
        return number, name

    def _add(self, node: Node) -> int:
        self.nodes[len(self.nodes) + 1] = node
        return len(self.nodes)

    # ---- what a cut may leave

    def namings(self, most: int, chance: random.Random) -> tuple[list[list[Unit]], bool]:
        """Which changes of names may have reached the disk; and whether these are all."""
        units = self.pending
        if self.preset == ORDERED:
            return [units[:count] for count in range(len(units) + 1)], True
        if 2 ** len(units) <= most:
            picks: Iterable[tuple[bool, ...]] = itertools.product((False, True), repeat=len(units))
            return list(_legal(units, picks)), True
        return list(_legal(units, _sampled(len(units), most, chance))), False

    def entries(self, naming: list[Unit]) -> dict[str, int]:
        """The nodes by path, where those changes of names have happened."""
        names = dict(self.safe)
        for unit in naming:
            _change(names, unit)
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in names.items():
            inside.setdefault(folder, []).append((name, number))
        found = {}
        waiting = [("", self.top)]
        while waiting:
            path, folder = waiting.pop()
            for name, number in inside.get(folder, ()):
                found[os.path.join(path, name)] = number
                if self.nodes[number].kind == "folder":
                    waiting.append((os.path.join(path, name), number))
        return found


def _change(names: dict[Key, int], unit: Unit) -> None:
    for key, number in unit.changes:
        if number is None:
            names.pop(key, None)
        else:
            names[key] = number


def _legal(units: list[Unit], picks: Iterable[tuple[bool, ...]]) -> Iterator[list[Unit]]:
    known = {unit.number for unit in units}
    for pick in picks:
        chosen = [unit for unit, is_in in zip(units, pick, strict=True) if is_in]
        numbers = {unit.number for unit in chosen}
        if all(unit.after not in known or unit.after in numbers for unit in chosen):
            yield chosen


def _sampled(count: int, most: int, chance: random.Random) -> Iterator[tuple[bool, ...]]:
    """None, all, all but one, one alone, each beginning; then by chance."""
    yield from (tuple(at < stop for at in range(count)) for stop in range(count + 1))
    yield from (tuple(at != left_out for at in range(count)) for left_out in range(count))
    yield from (tuple(at == alone for at in range(count)) for alone in range(count))
    for _ in range(max(0, most - 3 * count)):
        yield tuple(chance.random() < 0.5 for _ in range(count))


def contents(node: Node, preset: str, chance: random.Random) -> list[tuple[Content, Attributes]]:
    """What a file may hold: as it was safe, as it is, and what lies between."""
    old, new = node.base.data, node.now.data
    found = [(node.base, node.base_attributes), (node.now, node.attributes)]
    if node.attributes[0] != node.base_attributes[0]:
        found.append((node.now, node.base_attributes))
    if node.writes:
        between = dict.fromkeys(_between(old, new, node.writes, preset, chance))
        found += [(Content(data), node.attributes) for data in between if data not in (old, new)]
    return found


def _between(
    old: bytes,
    new: bytes,
    writes: list[tuple[int, bytes | None]],
    preset: str,
    chance: random.Random,
) -> Iterator[bytes]:
    under = old[: len(new)]
    grown = len(new) - len(under)
    half = len(under) + grown // 2
    yield under  # what was cut off is gone, and nothing else has happened
    yield new[: len(under)]
    yield under + new[len(under) :]
    stops = [stop for stop in range(0, len(new), PAGE) if stop > len(under)]
    yield from (new[:stop] for stop in _few(stops, chance))
    if preset == ORDERED:
        return
    zeros = under + bytes(grown)
    yield zeros
    yield new[:half]
    yield new[:-1]
    yield new[:half] + zeros[half:]
    yield zeros[:half] + new[half:]
    for start in _few(list(range(0, len(new), PAGE)), chance):
        stop = start + PAGE
        yield new[:start] + zeros[start:stop] + new[stop:]
        yield zeros[:start] + new[start:stop] + zeros[stop:]
        yield zeros[:start] + new[start:stop]
    for missing in _few(list(range(len(writes))), chance):
        made = _applied(old, writes[:missing] + writes[missing + 1 :])[: len(new)]
        yield made
        yield made + bytes(len(new) - len(made))


def _few(items: list[int], chance: random.Random) -> list[int]:
    if len(items) <= _MOST_PAGES:
        return items
    return [items[0], *sorted(chance.sample(items[1:-1], _MOST_PAGES - 2)), items[-1]]


def _applied(data: bytes, writes: list[tuple[int, bytes | None]]) -> bytes:
    made = bytearray(data)
    for at, piece in writes:
        if len(made) < at:
            made += bytes(at - len(made))
        if piece is None:
            del made[at:]
        else:
            made[at : at + len(piece)] = piece
    return bytes(made)


class Counted:
    """How many there were: operations, cuts, states in all and different ones, and sampled cuts.

    `looked_at` are the states that were put on disk, `lossy` those in which a fault was found.
    """

    def __init__(self) -> None:
        self.operations = self.cuts = self.states = self.distinct = self.sampled = 0
        self.most_names = self.most_files = self.looked_at = self.lossy = 0
        self.faults: list[str] = []


def after_power_cuts(
    log: list[Op],
    directory: str | os.PathLike[str],
    preset: str,
    *,
    before: dict[str, Entry] | None = None,
    acks: str | os.PathLike[str] | None = None,
    most: int = 256,
    seed: int = 0,
    counted: Counted | None = None,
) -> Iterator[State]:
    """Every different state that a cut at any moment of the log may leave of `directory`.

    The log is that of a run which began with `before` (see `snapshot`; nothing by default). What
    the program wrote to `acks`, in words, had been acknowledged. `most` bounds the states of one
    cut that are tried. The root is the parent of `directory`, so that its own name counts.
    """
    counted = counted if counted is not None else Counted()
    home, base = os.path.split(os.path.abspath(directory))
    disk = Disk(home, preset)
    disk.load({os.path.join(base, path): entry for path, entry in (before or {}).items()})
    chance = random.Random(seed)
    marks: tuple[str, ...] = ()
    seen: set[bytes] = set()
    counted.operations = len(log)
    for cut, op in enumerate([Op("begin", ""), *log]):
        path = str(op.detail.get("path"))
        if acks is not None and path == os.fspath(acks):
            if op.kind == "write":
                marks += tuple(base64.b64decode(op.detail["data"]).decode().split())
        elif op.detail and path != home and not path.startswith(os.path.join(home, base)):
            continue  # elsewhere
        elif op.detail:
            disk.do(op)
        counted.cuts += 1
        for state in _after_one(disk, cut, marks, most, chance, counted):
            inner = {
                os.path.relpath(path, base): entry
                for path, entry in state.entries.items()
                if path == base or path.startswith(base + os.sep)
            }
            state = state._replace(entries=inner)
            counted.states += 1
            if (key := state.key()) not in seen:
                seen.add(key)
                counted.distinct += 1
                yield state


def look_at_states(
    log: list[Op],
    directory: str | os.PathLike[str],
    preset: str,
    check: Callable[[Path, State], list[str]],
    *,
    every: int = 1,
    most_faults: int | None = None,
    **options: Any,
) -> Counted:
    """Puts each state, or one of `every`, on a RAM-backed disk, and collects what `check` finds.

    `check` gets the directory, which is not there if nothing was left, and may change it. After
    `most_faults` no more are looked for. `options` are those of `after_power_cuts`.
    """
    counted = Counted()
    ram = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for number, state in enumerate(
        after_power_cuts(log, directory, preset, counted=counted, **options)
    ):
        if number % every:
            continue
        with tempfile.TemporaryDirectory(prefix="power-cut-", dir=ram) as folder:
            where = Path(folder, os.path.basename(directory))
            if state.entries:
                state.put(where)
            found = check(where, state)
        counted.looked_at += 1
        counted.lossy += bool(found)
        op = log[state.cut - 1] if state.cut else None
        words = f"{op.kind} {op.target}" if op else "the beginning"
        counted.faults += [f"{fault} (cut {state.cut}, after {words})" for fault in found]
        if most_faults is not None and len(counted.faults) >= most_faults:
            break
    return counted


def _after_one(
    disk: Disk,
    cut: int,
    marks: tuple[str, ...],
    most: int,
    chance: random.Random,
    counted: Counted,
) -> Iterator[State]:
    namings, all_of_them = disk.namings(most, chance)
    counted.most_names = max(counted.most_names, len(disk.pending))
    for naming in namings:
        paths = disk.entries(naming)
        dirty = sorted({n for n in paths.values() if disk.nodes[n].is_dirty})
        counted.most_files = max(counted.most_files, len(dirty))
        choices = [contents(disk.nodes[number], disk.preset, chance) for number in dirty]
        picks, all_picks = _picks([len(choice) for choice in choices], most, chance)
        all_of_them &= all_picks
        for pick in picks:
            held = {n: c[at] for n, c, at in zip(dirty, choices, pick, strict=True)}
            yield State(cut, {path: _entry(disk, n, held) for path, n in paths.items()}, marks)
    counted.sampled += not all_of_them


def _picks(
    sizes: list[int], most: int, chance: random.Random
) -> tuple[Iterable[tuple[int, ...]], bool]:
    total = 1
    for size in sizes:
        total *= size
    if total <= most:
        return itertools.product(*map(range, sizes)), True
    return [tuple(chance.randrange(size) for size in sizes) for _ in range(most)], False


def _entry(disk: Disk, number: int, held: dict[int, tuple[Content, Attributes]]) -> Entry:
    node = disk.nodes[number]
    content, attributes = held.get(number, (node.base, node.base_attributes))
    return Entry(node.kind, content, node.text, attributes, number)


def snapshot(directory: str | os.PathLike[str]) -> dict[str, Entry]:
    """A directory as it is, with all of it taken for safe."""
    found = {".": Entry("folder", Content(b""), "", (0o755, 0), 0)}
    top = os.fspath(directory)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, top)] = _looked_at(path)
    return {os.path.normpath(path): entry for path, entry in found.items()}


def _looked_at(path: str) -> Entry:
    status = os.lstat(path)
    attributes = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    if stat.S_ISLNK(status.st_mode):
        return Entry("link", Content(b""), os.readlink(path), attributes, status.st_ino)
    if stat.S_ISDIR(status.st_mode):
        return Entry("folder", Content(b""), "", attributes, status.st_ino)
    with open(path, "rb") as file:
        return Entry("file", Content(file.read()), "", attributes, status.st_ino)


def _attributes(detail: dict[str, object]) -> Attributes:
    return _int(detail.get("mode", 0o644)), _int(detail.get("mtime", 0))


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
