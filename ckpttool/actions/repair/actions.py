"""From deeds to undoable actions, and the mended files that they put in place."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ckpttool.actions.journal.arrange_files import ArrangeFiles, Move, Spot
from ckpttool.actions.journal.moves import (
    ChangeMode,
    InstallMended,
    MovePointer,
    PublishTemporary,
    SetAside,
)
from ckpttool.actions.journal.rename_step import RenameStep
from ckpttool.actions.repair.deeds import frees_names
from ckpttool.checks.verify import verify_as
from ckpttool.errors import FormatError, RefusedError, UnreadableError, WriteError
from ckpttool.model.manifest import read_manifest
from ckpttool.model.names import LOCK_NAME, POINTER_NAME

if TYPE_CHECKING:
    from ckpttool.actions.journal.undoable import UndoableAction
    from ckpttool.actions.repair.deeds import Deed, Kept, Options
    from ckpttool.actions.repair.plan import RepairPlan
    from ckpttool.io.durable import Progress
    from ckpttool.mending.write import Written


class MendedFiles:
    """The mended files of one operation, written into its folder and verified there."""

    def __init__(self, folder: str, options: Options, source: str | None) -> None:
        self._folder = folder
        self._options = options
        self._source = source
        self._written: dict[str, Written] = {}

    def write(self, plan: RepairPlan, progress: Progress | None = None) -> set[str]:
        """Writes what the plan mends and verifies it; the paths that did not come out valid.

        Raises WriteError where the system refuses.
        """
        for deed in plan.deeds:
            if deed.verb != "mend" or deed.path in self._written:
                continue
            made = self._write_one(deed, progress)
            if made is None:
                return {deed.path}
            self._written[deed.path] = made
            # Its bytes were verified by whoever wrote it; that it is what its name says was not.
            if not verify_as(made.path, deed.step or 0, quick=True).files[0].is_valid:
                os.unlink(self._written.pop(deed.path).path)
                return {deed.path}
        return set()

    def _write_one(self, deed: Deed, progress: Progress | None) -> Written | None:
        """Writes one; None where what comes out is not what it should be."""
        from ckpttool.mending.write import write_mended

        assert deed.mending is not None
        made = os.path.join(self._folder, f"{deed.target}.mended")
        try:
            return write_mended(
                deed.mending,
                made,
                allow_loss=bool(deed.loses) and self._options.allow_loss,
                missing=self._options.missing,
                source=self._source,
                progress=progress,
            )
        except (RefusedError, FormatError):
            return None
        except WriteError as error:
            if error.errno is not None:
                raise  # the system's word, not that of the verification
            return None

    def of(self, path: str) -> Written:
        """The mended file that was made of `path`."""
        return self._written[path]

    def discard(self) -> None:
        """Removes what was made and is not in place yet. Raises nothing."""
        for written in self._written.values():
            try:
                os.unlink(written.path)
            except OSError:
                pass


def actions_for(plan: RepairPlan, mended: MendedFiles) -> list[UndoableAction]:
    """The actions that carry out a plan, in its order."""
    home = plan.look.directory.path
    others = [deed for deed in plan.deeds if deed.verb != "arrange" and not _is_swept(deed)]
    return [*_arranging(home, plan.deeds), *(_action(home, one, plan, mended) for one in others)]


def _arranging(home: str, deeds: list[Deed]) -> list[UndoableAction]:
    """One action for all files that are put in their places: they may be in each other's."""
    arranged = [deed for deed in deeds if deed.verb == "arrange"]
    ends = {
        file: Spot(os.path.basename(deed.path), name)
        for deed in arranged
        for name, file in deed.places.items()
    }
    if not ends:
        return []
    replaced = [os.path.join(deed.path, name) for deed in arranged for name in deed.places]
    moves = []
    for path in dict.fromkeys([*ends, *replaced]):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue  # nothing has the place yet
        except OSError as error:
            raise UnreadableError(path, error.strerror or str(error)) from error
        folder, name = os.path.split(path)
        start = Spot(os.path.basename(folder), name)
        moves.append(Move.of(status, start, ends.get(path)))
    return [ArrangeFiles(home, moves, "; ".join(why for deed in arranged for why in deed.why))]


def _is_swept(deed: Deed) -> bool:
    """Whether it is a claim on the lock, which was swept when we took the lock over."""
    return LOCK_NAME in os.path.basename(deed.path) and not os.path.lexists(deed.path)


def _action(home: str, deed: Deed, plan: RepairPlan, mended: MendedFiles) -> UndoableAction:
    name, why = os.path.basename(deed.path), "; ".join(deed.why)
    if deed.verb == "set-aside":
        return SetAside(home, name, why, deed.status)
    if deed.verb == "publish":
        return PublishTemporary(home, name, _target(deed), why)
    if deed.verb == "rename":
        return RenameStep(home, name, _target(deed), why)
    if deed.verb == "mend":
        return _install(home, deed, why, mended, plan)
    if deed.verb == "chmod":
        assert deed.status is not None
        assert deed.mode is not None
        return ChangeMode(home, name, stat.S_IMODE(deed.status.st_mode) & 0o777, deed.mode, why)
    return _move_pointer(home, plan, why, mended)


def _target(deed: Deed) -> str:
    assert deed.target is not None
    return deed.target


def _install(
    home: str, deed: Deed, why: str, mended: MendedFiles, plan: RepairPlan
) -> UndoableAction:
    target = _target(deed)
    if target in frees_names(plan.deeds):
        return InstallMended(home, target, mended.of(deed.path).path, why, freed=True)
    try:
        seen = os.lstat(os.path.join(home, target))
    except FileNotFoundError:
        seen = None
    in_place = os.path.basename(deed.path) == target
    made = mended.of(deed.path).path
    return InstallMended(home, target, made, why, deed.status if in_place else seen)


def _move_pointer(home: str, plan: RepairPlan, why: str, mended: MendedFiles) -> UndoableAction:
    aside = any(d.verb == "set-aside" and d.path.endswith(POINTER_NAME) for d in plan.deeds)
    old = None if aside else _content(os.path.join(home, POINTER_NAME))
    return MovePointer(home, old, _new_pointer(home, plan, mended), why)


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(path, error.strerror or str(error)) from error


def _new_pointer(home: str, plan: RepairPlan, mended: MendedFiles) -> bytes:
    """The pointer's content: where a size or hash is recorded at all, those of the target."""
    import json

    assert plan.aim is not None
    assert plan.newest is not None
    content: dict[str, object] = {"step": plan.aim.step, "file": plan.aim.file}
    if plan.aim.record:
        content["size"], content["sha256"] = _measure(plan.newest, mended)
        recorded = read_manifest(home).entries.get(plan.aim.file)
        if recorded is not None and recorded.run_id is not None:
            content["run_id"] = recorded.run_id
    return json.dumps(content, indent=2).encode("ascii")


def _measure(newest: Kept, mended: MendedFiles) -> tuple[int, str]:
    """Size and SHA-256 of the file that will be the newest valid one."""
    from ckpttool.io.checksum import sha256_of
    from ckpttool.io.reading import FileReader

    if newest.deed is not None and newest.deed.verb == "mend":
        made = mended.of(newest.entry.path)
        return made.size, made.sha256
    with FileReader(newest.recorded_path) as reader:
        return reader.size, sha256_of(reader)
