"""What `repair` will do about a directory. Nothing is touched to decide it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.actions.repair.deeds import (
    MEND,
    RENAME,
    SET_ASIDE,
    TEMPORARIES,
    Deed,
    Kept,
    Left,
    Options,
    in_order,
)
from ckpttool.actions.repair.misnamed import with_renames
from ckpttool.actions.repair.modes import plan_modes
from ckpttool.actions.repair.pointer import Aim, plan_pointer
from ckpttool.actions.repair.steps import Settled, settle
from ckpttool.checks.books import OperationHalfDone
from ckpttool.errors import CkptToolError, RefusedError
from ckpttool.model.names import LOCK_NAME

if TYPE_CHECKING:
    from ckpttool.actions.repair.look import Entry, Leftover, Look
    from ckpttool.findings import Finding
    from ckpttool.io.durable import Progress
    from ckpttool.mending.plan import Mending

_STAYS = "stays where it is, as no step here would be valid without it either"


class RepairPlan:
    """The deeds of a repair in their order, and what it leaves alone.

    `kept` are the files that are valid afterwards, ascending, `newest` the last of them, `aim` what
    the pointer will be made to say (None where it stays). `unknown` are the steps that could not be
    checked. `source` is the file from which lost tensors are taken. `finishing` are the ids of the
    operations that are finished before anything of this is done.
    """

    __slots__ = (
        "aim",
        "deeds",
        "finishing",
        "kept",
        "left",
        "look",
        "newest",
        "options",
        "source",
        "unknown",
    )

    def __init__(self, look: Look, options: Options) -> None:
        self.look = look
        self.options = options
        self.source: str | None = None
        self.finishing: frozenset[str] = frozenset()
        self.deeds: list[Deed] = []
        self.left: list[Left] = []
        self.kept: list[Kept] = []
        self.unknown: list[int] = []
        self.aim: Aim | None = None
        self.newest: Kept | None = None

    @property
    def loses(self) -> bool:
        """Whether something is given up by it."""
        return any(deed.loses for deed in self.deeds)

    @property
    def mends(self) -> bool:
        """Whether a file is mended, which has to be written first."""
        return any(deed.verb == "mend" for deed in self.deeds)

    def unaddressed(self) -> list[Finding]:
        """The errors of which the plan takes no notice: nothing here mends them."""
        told = {deed.path for deed in self.deeds} | {left.path for left in self.left}
        here = self.look.directory.path
        told |= {os.path.join(here, deed.target) for deed in self.deeds if deed.target is not None}
        if self.newest is not None:
            told.add(self.look.directory.pointer.path)
        of_directory = {"DIR106", "DIR109"} if self.deeds or self.left else set()
        return [
            finding
            for finding in self.look.report.findings
            if finding.severity.value == "error"
            and told.isdisjoint((finding.place.path, os.path.dirname(finding.place.path)))
            and finding.id not in of_directory
            and not self._is_finished(finding)
        ]

    def _is_finished(self, finding: Finding) -> bool:
        half_done = finding.id == OperationHalfDone.id
        return half_done and finding.facts.get("operation") in self.finishing

    @property
    def goes_back_from(self) -> int | None:
        """The step that was the newest by name, where the newest valid one will be before it."""
        if self.newest is None or not self.deeds or self.newest.step < max(self.unknown, default=0):
            return None
        pointer = self.look.directory.pointer
        named = [file.step for file in self.look.files if file.state != "wrong-step"]
        if pointer.state in ("ok", "dangling") and pointer.file_step is not None:
            named.append(pointer.file_step)
        highest = max(named, default=0)
        return highest if highest > self.newest.step else None

    @property
    def could_not_check(self) -> bool:
        """Whether something stays because nobody could look at it."""
        return any(left.unchecked for left in self.left)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        pointer = self.look.directory.pointer
        newest = self.newest
        return {
            "plan": [deed.as_dict() for deed in self.deeds],
            "left": [left.as_dict() for left in self.left],
            "loses_data": self.loses,
            "newest_valid_after": None if newest is None else newest.step,
            "goes_back_from": self.goes_back_from,
            "pointer_before": pointer.as_dict(),
            "pointer_after": self.aim and {"step": self.aim.step, "file": self.aim.file},
        }


class Mender:
    """Plans the mending of files of one directory, each at most once."""

    def __init__(self, look: Look, options: Options, progress: Progress | None = None) -> None:
        self._look = look
        self._odds = options.bit_odds
        self._progress = progress
        self._known: dict[str, Mending | None] = {}
        self.hopeless: set[str] = set()

    def __call__(self, entry: Entry) -> Mending | None:
        """What can be got back of a file, or None where nothing can, or nothing should.

        A dangerous pickle is not made harmless here: whoever wrote it chose the rest, too.
        """
        if entry.path in self.hopeless:
            return None
        if entry.path not in self._known:
            self._known[entry.path] = self._plan(entry)
        mending = self._known[entry.path]
        if mending is None or mending.healthy or mending.hopeless is not None:
            return None
        return None if entry.state == "dangerous" and mending.dangers else mending

    def close(self, *, but: RepairPlan | None = None) -> None:
        """Closes the damaged files, but for those that a plan is going to mend."""
        mended = [] if but is None else [deed for deed in but.deeds if deed.verb == "mend"]
        kept = [deed.mending for deed in mended]
        for mending in self._known.values():
            if mending is not None and mending not in kept:
                mending.close()

    def _plan(self, entry: Entry) -> Mending | None:
        try:
            mending = self._plan_archive(entry, None)
            if len(mending.archives) < 2 or _step_in(mending) == entry.step:
                return mending
            # Of several archives in a file the one of its own step is meant, the last of these.
            for archive in reversed(mending.archives):
                other = self._plan_archive(entry, archive.number)
                if _step_in(other) == entry.step:
                    mending.close()
                    return other
                other.close()
            return mending
        except CkptToolError:
            return None

    def _plan_archive(self, entry: Entry, archive: int | None) -> Mending:
        from ckpttool.mending.plan import plan_mend
        from ckpttool.model.manifest import known_sha256

        target = os.path.join(self._look.directory.path, entry.target)
        return plan_mend(
            entry.path,
            siblings=self._siblings(entry),
            bit_odds=self._odds,
            known_sha256=known_sha256(target),
            archive=archive,
            progress=self._progress,
        )

    def _siblings(self, entry: Entry) -> list[str]:
        """The other step files, the nearest first: what is frozen changes least between them."""
        files = [file for file in self._look.files if not file.is_sharded]
        others = [file for file in files if file.path != entry.path]
        readable = [file for file in others if file.state not in ("not-opened", "unreadable")]
        readable.sort(key=lambda file: (abs(file.step - entry.step), file.name))
        return [file.path for file in readable]


def _step_in(mending: Mending) -> object:
    """The step that the content states, None where it states none."""
    tree = None if mending.skeleton is None else mending.skeleton.tree
    return tree.get("step") if isinstance(tree, dict) else None


def decide(look: Look, options: Options, mender: Mender) -> RepairPlan:
    """Decides what to do. Raises RefusedError where the step to take tensors from is not there."""
    plan = RepairPlan(look, options)
    settled = _settle_all(look, options, mender)
    if {RENAME, SET_ASIDE} <= options.only:  # a name may have to be freed first
        settled = with_renames(look, settled)
    if MEND in options.only and not any(one.kept or one.unknown for one in settled):
        settled = _with_last_resort(look, options, mender, settled)
    plan.kept = [one.kept for one in settled if one.kept is not None]
    plan.kept.sort(key=lambda kept: kept.step)
    plan.unknown = sorted(one.step for one in settled if one.unknown)
    plan.newest = plan.kept[-1] if plan.kept else None
    deeds, plan.left = _of_steps(settled, withhold=plan.newest is None)
    more, left = _of_other_leftovers(look)
    deeds += more
    plan.left += left
    more, left = plan_modes(look, plan.kept)
    deeds += more
    plan.left += left
    pointer = plan_pointer(look, plan.newest, plan.unknown)
    deeds += pointer.deeds
    plan.left += pointer.left
    plan.aim = pointer.aim
    plan.deeds = in_order(deed for deed in deeds if deed.kind in options.only)
    if plan.loses:  # else nothing is taken from anywhere
        plan.source = _source(look, options)
    return plan


def _source(look: Look, options: Options) -> str | None:
    """The file to take from what is lost elsewhere."""
    if options.source_step is None:
        return None
    all_of = look.directory.all_of(options.source_step)
    found = next((file for file in all_of if file.is_regular), None)
    if found is None:
        path = look.directory.path
        raise RefusedError(f"{path}: there is no step file for step {options.source_step}")
    return found.path


def _settle_all(look: Look, options: Options, mender: Mender) -> list[Settled]:
    files: dict[int, list[Entry]] = {}
    leftovers: dict[int, list[Leftover]] = {}
    for file in look.files:
        files.setdefault(file.step, []).append(file)
    for leftover in look.leftovers:
        if leftover.entry is not None:
            leftovers.setdefault(leftover.entry.step, []).append(leftover)
    steps = sorted(files.keys() | leftovers.keys())
    return [
        settle(step, files.get(step, []), leftovers.get(step, []), options, mender)
        for step in steps
    ]


def _with_last_resort(
    look: Look, options: Options, mender: Mender, settled: list[Settled]
) -> list[Settled]:
    """Where nothing comes back whole: the newest file of which anything does."""
    candidates = list(look.files)
    if TEMPORARIES in options.only:
        candidates += [leftover.entry for leftover in look.leftovers if leftover.entry is not None]
    for entry in sorted(candidates, key=lambda entry: entry.rank(), reverse=True):
        if entry.can_be_mended and _is_worth_it(mender(entry)):
            files = [file for file in look.files if file.step == entry.step]
            here = [one for one in look.leftovers if one.entry and one.entry.step == entry.step]
            again = settle(entry.step, files, here, options, mender, accept=entry.path)
            return [again if one.step == entry.step else one for one in settled]
    return settled


def _is_worth_it(mending: Mending | None) -> bool:
    """Whether anything but the pickle, which every file has, comes back."""
    if mending is None:
        return False
    storages = [record for record in mending.records if record.name.startswith("data/")]
    return not storages or any(record.state != "lost" for record in storages)


def _of_steps(settled: list[Settled], *, withhold: bool) -> tuple[list[Deed], list[Left]]:
    """The deeds for all steps. With `withhold`, nothing is set aside.

    A directory without any step file looks as if training had not begun: a trainer would start
    from nothing, without a word. So damaged files stay until there is something valid beside them.
    """
    deeds = [deed for one in settled for deed in one.deeds]
    left = [left for one in settled for left in one.left]
    if withhold:
        aside = [deed for deed in deeds if deed.verb == "set-aside"]
        left += [Left(deed.path, _stays(deed)) for deed in aside]
        deeds = [deed for deed in deeds if deed.verb != "set-aside"]
    return deeds, left


def _stays(deed: Deed) -> str:
    advice = f" ({'; '.join(deed.notes)})" if deed.notes and deed.kind == SET_ASIDE else ""
    if any(why.startswith("TRU") for why in deed.why):
        advice += "; it is dangerous, so let nothing load it, not even by the pointer"
    return f"{'; '.join(deed.why)}; {_STAYS}{advice}"


def _of_other_leftovers(look: Look) -> tuple[list[Deed], list[Left]]:
    """Temporaries that were not to become step files, and those whose writer may be at work."""
    deeds: list[Deed] = []
    left: list[Left] = []
    for leftover in look.leftovers:
        pid = leftover.temporary.pid
        # What a process left that died while it took the lock; nobody holds the lock now.
        claim = leftover.temporary.target == LOCK_NAME and pid == 0
        if leftover.alive is False or claim:
            if leftover.entry is None:
                deeds.append(_aside(leftover))
        elif leftover.alive:
            words = f"stays: its writer may be process {pid}, which is alive on this host"
            left.append(Left(leftover.path, words))
        else:
            left.append(Left(leftover.path, "stays: nobody knows whether its writer is at work"))
    return deeds, left


def _aside(leftover: Leftover) -> Deed:
    return Deed(
        *(TEMPORARIES, "set-aside", leftover.path, f"set {leftover.name} aside"),
        why=("DIR101: a writer died and left it",),
        status=leftover.status,
    )
