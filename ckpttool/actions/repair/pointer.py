"""Where the pointer belongs after a repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.actions.repair.deeds import POINTER, Deed, Kept, Left
from ckpttool.model.manifest import read_manifest
from ckpttool.model.names import POINTER_NAME

if TYPE_CHECKING:
    from ckpttool.actions.repair.look import Look
    from ckpttool.model.pointer import Pointer

# States in which the pointer says a step file's name, whether or not it can be followed now.
_SAYS_A_NAME = frozenset({"ok", "dangling", "unsafe-target"})
# States in which what is there is kept as evidence before a new pointer is written.
_KEPT_AS_EVIDENCE = frozenset({"malformed", "not-a-file", "dangling", "unsafe-target"})


class Aim(NamedTuple):
    """What a pointer is to say. `record`: with size and SHA-256 of the file, too."""

    step: int
    file: str
    record: bool


class PointerPlan(NamedTuple):
    """What is to be done about the pointer; `aim` is None where nothing is."""

    aim: Aim | None
    deeds: list[Deed]
    left: list[Left]


def plan_pointer(look: Look, newest: Kept | None, unknown: list[int]) -> PointerPlan:
    """Points at `newest`, the newest file that is valid after the repair.

    `unknown` are the steps that may be valid, but could not be checked: while one of them is above
    the newest, nobody knows where the pointer belongs, and it stays.
    """
    pointer = look.directory.pointer
    if pointer.state == "unreadable":
        words = f"could not be read, so it stays: {pointer.problem}"
        return PointerPlan(None, [], [Left(pointer.path, words, unchecked=True)])
    if newest is None:
        return PointerPlan(None, [], [])
    if is_right(look, newest):
        return PointerPlan(None, [], [])
    above = [step for step in unknown if step > newest.step]
    if above:
        words = f"stays: step {above[-1]}, which is newer than {newest.step}, could not be checked"
        return PointerPlan(None, [], [Left(pointer.path, words, unchecked=True)])
    recorded = read_manifest(look.directory.path).entries.get(newest.name)
    in_manifest = recorded is not None and recorded.sha256 is not None
    aim = Aim(newest.step, newest.name, wants_record(pointer) or in_manifest)
    return PointerPlan(aim, _deeds(look, aim), [])


def is_right(look: Look, newest: Kept) -> bool:
    """Whether the pointer will be right without being touched."""
    pointer = look.directory.pointer
    says = (pointer.step, pointer.file) == (newest.step, newest.name)
    if pointer.state not in _SAYS_A_NAME or not says:
        return False
    return record_holds(look, pointer, newest)


def record_holds(look: Look, pointer: Pointer, newest: Kept) -> bool:
    """Whether the size and SHA-256 that the pointer records will be those of its target."""
    if not wants_record(pointer):
        return True
    if newest.deed is None:
        return not any(finding.id == "PTR109" for finding in look.report.findings)
    recorded = pointer.extra.get("sha256")
    if newest.deed.mending is not None:
        # What is mended without having the known SHA-256 is not put in place at all.
        known = newest.deed.mending.known_sha256
        return known is not None and known == str(recorded).lower()
    return str(recorded).lower() == _sha256(newest.recorded_path)


def wants_record(pointer: Pointer) -> bool:
    """Whether the pointer records more of its target than a name."""
    return "sha256" in pointer.extra or "size" in pointer.extra


def _sha256(path: str) -> str | None:
    from ckpttool.errors import UnreadableError
    from ckpttool.io.checksum import sha256_of
    from ckpttool.io.reading import FileReader

    try:
        with FileReader(path) as reader:
            return sha256_of(reader)
    except UnreadableError:
        return None


def _deeds(look: Look, aim: Aim) -> list[Deed]:
    pointer = look.directory.pointer
    found = [f for f in look.report.findings if f.place.path == pointer.path and f.id != "TRU108"]
    why = tuple(f"{finding.id}: {finding.words}" for finding in found)
    deeds: list[Deed] = []
    if pointer.state in _KEPT_AS_EVIDENCE:
        words = f"set {POINTER_NAME} aside"
        deeds.append(Deed(POINTER, "set-aside", pointer.path, words, why=why))
    record = ", with its size and SHA-256" if aim.record else ""
    words = f"write {POINTER_NAME}: step {aim.step}, {aim.file}{record}"
    why = why or ("the newest valid step will be another one",)
    deeds.append(
        Deed(POINTER, "point", pointer.path, words, why=why, target=aim.file, step=aim.step)
    )
    return deeds
