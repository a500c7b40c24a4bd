"""`repair`: looks, plans, and carries the plan out under a journal, then looks again.

Nothing is deleted. What goes out of the way is kept in `.quarantine`, and `undo` brings it back.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.actions.journal.file import remove_if_bare
from ckpttool.actions.journal.operations import carry_out, finish, open_operation, unfinished
from ckpttool.actions.repair.actions import MendedFiles, actions_for
from ckpttool.actions.repair.look import look, still_the_same
from ckpttool.actions.repair.plan import Mender, RepairPlan, decide
from ckpttool.checks.base import command
from ckpttool.checks.verify import Report, verify
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.io.lock import WriterLock, refuse_if_held
from ckpttool.io.lock_holder import read_holder

if TYPE_CHECKING:
    from ckpttool.actions.journal.operations import Operation
    from ckpttool.actions.repair.deeds import Options
    from ckpttool.io.durable import Progress

PROGRAM = "ckpttool repair"


class Repair:
    """The repair of one directory, step by step: `finish_earlier`, `make_plan`, `carry_out`.

    `earlier` are the operations that were found half-way, `plan` is what is to be done,
    `operation` what was done, `after` the report of the second look. `replanned` says that a file
    which was to be mended turned out not to be valid then, so that the plan is another one than
    `make_plan` gave. `dead_lock` is the lock that a dead writer left, `cleared` that it is gone.
    """

    __slots__ = (
        "after",
        "cleared",
        "dead_lock",
        "earlier",
        "finished",
        "operation",
        "options",
        "path",
        "plan",
        "replanned",
    )

    def __init__(self, path: str, options: Options) -> None:
        """UnreadableError for what is no directory, LockedError where a writer is at work."""
        if not os.path.isdir(path):
            what = "is not a directory" if os.path.lexists(path) else "does not exist"
            raise UnreadableError(path, what)
        refuse_if_held(path)
        self.path = path
        self.options = options
        self.earlier = unfinished(path)
        holder = read_holder(path)
        self.dead_lock = None if holder is None or holder.is_held else holder
        self.cleared = False
        self.finished: list[Operation] = []
        self.plan: RepairPlan | None = None
        self.operation: Operation | None = None
        self.after: Report | None = None
        self.replanned = False

    def finish_earlier(self, progress: Progress | None = None) -> None:
        """Clears the lock of a dead writer, and finishes the operations that were killed half-way.

        Each is finished in the direction in which it was going.
        """
        if not self.earlier and self.dead_lock is None:
            return
        with WriterLock.acquire(self.path, program=PROGRAM) as lock:
            for operation in self.earlier:
                taking_back = operation.state == "taking-back"
                try:
                    self.finished.append(finish(operation, lock.keeping(progress)))
                except RefusedError as error:
                    if taking_back:
                        raise
                    undo = command("undo", self.path, operation.id)
                    raise RefusedError(f"{error} (`{undo}` may take it back)") from error
        self.cleared = self.dead_lock is not None

    def make_plan(self, progress: Progress | None = None) -> RepairPlan:
        """Verifies the directory and decides. Nothing is changed."""
        seen = look(self.path, progress)
        mender = Mender(seen, self.options, progress)
        try:
            self.plan = decide(seen, self.options, mender)
        finally:
            mender.close(but=self.plan)
        self.plan.finishing = frozenset(operation.id for operation in self.earlier)
        return self.plan

    @property
    def needs_permission(self) -> bool:
        """Whether the plan gives something up that nobody allowed to be given up."""
        return self.plan is not None and self.plan.loses and not self.options.allow_loss

    def carry_out(self, progress: Progress | None = None) -> None:
        """Does what was planned, and looks again.

        Raises RefusedError where the directory has changed meanwhile, where a writer came, or
        where something would be lost that nobody allowed; WriteError where the system refuses. In
        each case nothing is left half-done.
        """
        assert self.plan is not None, "no plan was made"
        self.refuse_loss()
        with WriterLock.acquire(self.path, program=PROGRAM) as lock:
            still_the_same(self.plan.look)
            self._carry_out(lock.keeping(progress))
        self.after = verify(self.path, progress=progress)

    def refuse_loss(self) -> None:
        """RefusedError where the plan gives something up that nobody allowed to be given up."""
        if self.needs_permission:
            words = "no step comes back whole: --allow-loss gives up what the plan says is lost"
            raise RefusedError(f"{self.path}: {words}; nothing was changed")

    def _carry_out(self, progress: Progress) -> None:
        plan = self.plan
        assert plan is not None
        operation = open_operation(self.path, "repair") if plan.mends else None
        mended = MendedFiles(operation.folder if operation else "", self.options, plan.source)
        try:
            if operation is not None:
                plan = self._mend(plan, mended, progress)
            actions = actions_for(plan, mended)
            if actions or operation is not None:
                self.operation = carry_out(
                    self.path,
                    "repair",
                    actions,
                    progress=progress,
                    operation=operation,
                )
        except BaseException:
            self._tidy(operation, mended)
            raise

    def _tidy(self, operation: Operation | None, mended: MendedFiles) -> None:
        """Removes what was made for an operation that did not come to be, or was taken back."""
        if operation is None or any(one.id == operation.id for one in unfinished(self.path)):
            return
        mended.discard()
        remove_if_bare(self.path, operation.id)

    def _mend(self, plan: RepairPlan, mended: MendedFiles, progress: Progress) -> RepairPlan:
        """Writes the mended files; plans anew without those that turn out not to be valid."""
        mender = Mender(plan.look, self.options, progress)
        while hopeless := mended.write(plan, progress):
            mender.hopeless |= hopeless
            self.plan = plan = decide(plan.look, self.options, mender)
            self.replanned = True
            self.refuse_loss()
        return plan

    @property
    def last_report(self) -> Report:
        """The report of the second look, or else of the first."""
        assert self.plan is not None
        return self.after or self.plan.look.report

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        assert self.plan is not None
        return {
            "path": self.path,
            "unfinished": [operation.as_dict() for operation in self.earlier],
            "finished": [operation.id for operation in self.finished],
            "dead_lock_cleared": self.cleared,
            **self.plan.as_dict(),
            "needs_allow_loss": self.needs_permission,
            "replanned": self.replanned,
            "applied": self.after is not None,
            "id": None if self.operation is None else self.operation.id,
            "before": self.plan.look.report.as_dict(),
            "after": None if self.after is None else self.after.as_dict(),
        }
