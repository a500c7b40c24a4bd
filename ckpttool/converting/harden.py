"""`harden`: the same content in a form that `torch.load(weights_only=True)` takes.

What becomes what is said in `converting.plain` and the modules beside it. Tensors keep their bits,
dtypes, shapes, strides and the storages that they share; the container becomes torch's zip, the
pickle one of protocol 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checks.base import plural
from ckpttool.converting.checked import (
    Written,
    open_verified,
    write_torch_file,
)
from ckpttool.converting.extents import lay_out
from ckpttool.converting.plain import Plainer
from ckpttool.converting.storages import NewStorages, StorageBytes
from ckpttool.converting.terms import LEFT_OUT, Change, Refusal
from ckpttool.errors import RefusedError
from ckpttool.io.output import refuse_output
from ckpttool.model.mended import MARK_NAME

if TYPE_CHECKING:
    from ckpttool.converting.extents import Piece
    from ckpttool.io.durable import Progress
    from ckpttool.model.checkpoint import Checkpoint

_MOST_NAMED = 3
_HINT = "--allow-loss leaves that out"


class Hardening:
    """What `harden` is about to write; a context manager, which keeps the source open.

    `changes` are what became something else, those of the file as a whole first. `refused` has no
    plain form: it is left out with `allow_loss`, and without it nothing is written.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.container is not None
        self.path = checkpoint.path
        self.size = checkpoint.size
        self._checkpoint = checkpoint
        self._new = NewStorages(checkpoint.storages.keys(), checkpoint.container.byteorder)
        plainer = Plainer(self._new)
        self._tree = plainer.plain(checkpoint.tree)
        self.changes = [*_whole_file(checkpoint), *plainer.changes]
        self.refused = [*_code(checkpoint), *plainer.refused]
        self._pieces: list[Piece] | None = None

    def problem(self, *, allow_loss: bool) -> RefusedError | None:
        """What stands against writing: content that would be lost and was not given up."""
        if self._tree is LEFT_OUT:
            what = self.refused[-1].what
            return RefusedError(f"{self.path}: the whole content has no plain form: {what}")
        if not self.refused or allow_loss:
            return None
        names = [f"{one.path} ({one.what})" for one in self.refused[:_MOST_NAMED]]
        more = len(self.refused) - len(names)
        listed = ", ".join(names) + (f" and {more:,} more" if more else "")
        return RefusedError(f"{self.path}: without a plain form: {listed}; {_HINT}")

    def write(
        self,
        out: str,
        *,
        allow_loss: bool = False,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Written:
        """Writes `out`. Raises RefusedError, WriteError, UnreadableError, UnwritableError."""
        problem = self.problem(allow_loss=allow_loss)
        if problem is not None:
            raise problem
        refuse_output(out, self.path, force=force)
        if self._pieces is None:
            storages = StorageBytes(self._checkpoint.container, self._new.added)
            self._pieces = lay_out(self._tree, storages, cut=False)
        return write_torch_file(
            self._checkpoint,
            out,
            self._tree,
            self._pieces,
            self._new.added,
            weights_only=True,
            force=force,
            progress=progress,
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "path": self.path,
            "changes": [change._asdict() for change in self.changes],
            "refused": [refusal._asdict() for refusal in self.refused],
        }

    def __enter__(self) -> Hardening:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoint.close()


def plan_harden(path: str, *, progress: Progress | None = None) -> Hardening:
    """Verifies a file and finds the plain form of its content. Errors as for `open_verified`."""
    return Hardening(open_verified(path, progress))


def _whole_file(checkpoint: Checkpoint) -> list[Change]:
    """What becomes something else besides the content."""
    changes = []
    if checkpoint.kind != "torch-zip":
        changes.append(Change("", checkpoint.words, "zip of torch's"))
    unused = sum(
        one.code == "unreferenced-record" and one.record != MARK_NAME
        for one in checkpoint.anomalies
    )
    if unused and checkpoint.kind != "torchscript":
        changes.append(Change("", f"{plural(unused, 'record')} that nothing refers to", "left out"))
    protocol = checkpoint.protocol
    if protocol != 2:
        changes.append(Change("", f"pickle protocol {protocol}", "pickle protocol 2"))
    return changes


def _code(checkpoint: Checkpoint) -> list[Refusal]:
    """The program in a TorchScript archive."""
    if checkpoint.kind != "torchscript":
        return []
    return [Refusal("code", "a TorchScript program", "plain data holds no code")]
