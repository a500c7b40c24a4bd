"""The undoable action that gives files of sharded steps the places that are recorded of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.actions.journal.undoable import (
    AFTER,
    BEFORE,
    BETWEEN,
    FOREIGN,
    Identity,
    Places,
    UndoableAction,
    alike,
    own_name,
    text,
)
from ckpttool.errors import FormatError
from ckpttool.io.folder import Folder, plain_name

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress


class Spot(NamedTuple):
    """A name in a folder of the directory; the folder "" is the operation's own."""

    folder: str
    name: str


class Move(NamedTuple):
    """One file, where it lies and where it belongs; `rest` is where it may lie in between.

    What has no place any more has its end at `rest`, in the operation's folder.
    """

    identity: Identity
    start: Spot
    end: Spot
    rest: Spot

    @classmethod
    def of(cls, status: os.stat_result, start: Spot, end: Spot | None) -> Move:
        """The move of a file, of which `lstat` says `status`, to its end; None is out of the way.

        Its name in the operation's folder is that of its folder and its own.
        """
        rest = Spot("", f"{start.folder}-{start.name}")
        return cls(Identity.of(status), start, end or rest, rest)


class ArrangeFiles(UndoableAction):
    """Moves files between folders of the directory, all of them or, taken back, none.

    Two files may have each other's places. `name` is the folder that the first one belongs to.
    Files are told apart by size and time, as a copy of the directory keeps them, and where that
    does not do by their numbers, too.
    """

    __slots__ = ("_by_number", "moves")
    kind = "arrange-files"

    def __init__(
        self, directory: str | os.PathLike[str], moves: Sequence[Move], why: str = ""
    ) -> None:
        if not moves:
            raise FormatError("there is nothing to arrange")
        self.moves = list(moves)
        self._by_number = alike(move.identity for move in moves)
        folders = [spot.folder for move in moves for spot in (move.end, move.start) if spot.folder]
        super().__init__(directory, own_name(folders[0] if folders else ""), why)

    def describe(self) -> str:
        """`put 2 files of step_000000000004 in their places: why`."""
        count = sum(move.end != move.rest for move in self.moves)
        files = "1 file" if count == 1 else f"{count:,} files"
        place = "its place" if count == 1 else "their places"
        return f"put {files} of {self.name} in {place}" + (f": {self.why}" if self.why else "")

    def facts(self) -> dict[str, Any]:
        """What goes where, and why."""
        return {"why": self.why, "moves": [_in_words(move) for move in self.moves]}

    def note(self) -> dict[str, Any]:
        """The same for people: what lies in the operation's folder is out of the way."""
        return {**super().note(), "moves": [_in_words(move) for move in self.moves]}

    def prepare(self, folder: str, taken: set[str]) -> None:
        """RefusedError where a file is not the one that was looked at."""
        super().prepare(folder, taken)
        taken.update(move.rest.name for move in self.moves)
        with self.places() as places, self._spots(places) as spots:
            for move in self.moves:
                if not spots.holds(move.start, move.identity):
                    words = f"{'/'.join(move.start)} has changed since it was looked at"
                    raise self.refuse(f"{words}; run it again")

    def to_record(self) -> dict[str, Any]:
        """The moves."""
        return {**super().to_record(), "moves": [_record(move) for move in self.moves]}

    @classmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record."""
        moves = record.get("moves")
        if not isinstance(moves, list):
            raise FormatError("an action in the journal has no moves")
        action = cls(directory, [_move(one) for one in moves], text(record, "why"))
        action.folder = operation_folder
        return action

    def state_in(self, places: Places) -> str:
        """By where each file is: `foreign` where one of them is in none of its places."""
        with self._spots(places) as spots:
            found = [(_places_of(spots, move), move) for move in self.moves]
        if not all(now for now, _ in found):
            return FOREIGN
        if all(now == [move.start] for now, move in found):
            return BEFORE
        return AFTER if all(now == [move.end] for now, move in found) else BETWEEN

    def apply(self, progress: Progress | None = None) -> None:
        """Takes out of the way what lies where another belongs, then moves each to its place."""
        self._go([(move, move.start, move.end) for move in self.moves])

    def revert(self) -> None:
        """The other way round."""
        self._go([(move, move.end, move.start) for move in self.moves])

    def _go(self, ways: list[tuple[Move, Spot, Spot]]) -> None:
        ends = {end for _, _, end in ways}
        with self.places() as places, self._spots(places) as spots:
            for move, start, end in ways:
                found = _places_of(spots, move)
                if not found:
                    raise self.refuse(f"{'/'.join(start)} is gone, or is another file by now")
                if start in found and start != end and start in ends:
                    spots.move(start, move.rest)
            for move, _, end in ways:
                for now in _places_of(spots, move):
                    if now != end:
                        spots.move(now, end)

    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """A file that is gone or was changed, or another one in its old place."""
        ours = [move.identity for move in self.moves]
        with self._spots(places) as spots:
            for move in self.moves:
                if not _places_of(spots, move):
                    return f"{'/'.join(move.end)} is gone, or is another file by now"
                there = spots.at(move.start)
                if there is not None and not any(spots.is_it(one, there) for one in ours):
                    return f"another file is at {'/'.join(move.start)} by now"
                coming = ahead.get(move.start.folder) is not None
                if not coming and spots.folder(move.start.folder) is None:
                    return f"{move.start.folder} is gone"
        return None

    @contextmanager
    def _spots(self, places: Places) -> Iterator[_Spots]:
        with ExitStack() as stack:
            yield _Spots(places, stack, self._by_number)


class _Spots:
    """The folders of the places, each opened once; `by_number` has to agree in that as well."""

    def __init__(self, places: Places, stack: ExitStack, by_number: set[Identity]) -> None:
        self._home = places.home
        self._stack = stack
        self._by_number = by_number
        self._open: dict[str, Folder | None] = {"": places.aside}

    def folder(self, name: str) -> Folder | None:
        """A folder of the directory, or None where there is none."""
        if name not in self._open:
            try:
                self._open[name] = self._stack.enter_context(self._home.enter(own_name(name)))
            except (FileNotFoundError, NotADirectoryError):
                self._open[name] = None
        return self._open[name]

    def at(self, spot: Spot) -> os.stat_result | None:
        """What lies there."""
        folder = self.folder(spot.folder)
        return None if folder is None else folder.status(spot.name)

    def holds(self, spot: Spot, identity: Identity) -> bool:
        """Whether this very file lies there."""
        there = self.at(spot)
        return there is not None and self.is_it(identity, there)

    def is_it(self, identity: Identity, status: os.stat_result) -> bool:
        """Whether `lstat` says `status` of this very file."""
        found = Identity.of(status)
        same_number = found.ino == identity.ino
        return identity.is_that_of(found) and (same_number or identity not in self._by_number)

    def move(self, start: Spot, end: Spot) -> None:
        """Moves durably, never over another."""
        source, into = self.folder(start.folder), self.folder(end.folder)
        if source is None or into is None:
            raise FileNotFoundError(f"{start.folder if source is None else end.folder} is gone")
        source.move(start.name, into, end.name)


def _places_of(spots: _Spots, move: Move) -> list[Spot]:
    """Where a file is. A move that was killed half-way leaves it under two names."""
    places = dict.fromkeys((move.start, move.rest, move.end))
    return [spot for spot in places if spots.holds(spot, move.identity)]


def _record(move: Move) -> dict[str, Any]:
    """A move as `_move` takes it."""
    spots = {"start": list(move.start), "end": list(move.end), "rest": list(move.rest)}
    return {"identity": move.identity._asdict(), **spots}


def _move(record: object) -> Move:
    """The move in a journal. Raises FormatError."""
    if not isinstance(record, dict):
        raise FormatError("a move in the journal is malformed")
    identity = Identity.from_record(record.get("identity"))
    start, end, rest = (_spot(record.get(key)) for key in ("start", "end", "rest"))
    if rest.folder or not start.folder:
        raise FormatError("a move in the journal is malformed")
    return Move(identity, start, end, rest)


def _spot(record: object) -> Spot:
    if not isinstance(record, list) or len(record) != 2:
        raise FormatError("a place in the journal is malformed")
    folder, name = record
    return Spot(own_name(folder) if folder else "", plain_name(name))


def _in_words(move: Move) -> dict[str, str]:
    end = "/".join(move.end) if move.end.folder else move.end.name
    return {"from": "/".join(move.start), "to": end}
