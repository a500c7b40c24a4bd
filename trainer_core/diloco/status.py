"""What a person wants to know of a Hub: gathered from listings, headers and the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainer_core.diloco.commit import FOLDER, Commit, Pointer
from trainer_core.diloco.commits import COMMIT, POINTER, CommitLog
from trainer_core.diloco.damage import (
    Deltas,
    deltas_of,
    files_of,
    foreign_in,
    lease_problems,
    looked_through,
    newest_commit,
    nodes_and_others,
    plain,
    pointer_of,
    tensor_problems,
)
from trainer_core.diloco.errors import MissingError, PermanentError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lease import FOLDER as LEASES
from trainer_core.diloco.lease import NAME as LEASE
from trainer_core.diloco.lease import Claim, newest_claim
from trainer_core.diloco.published import header_of
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError


class NodeStatus(NamedTuple):
    """One node: its newest delta on the store, and what was dealt with of it.

    `base_outer_step` and `lag` (outer steps from its base to the newest global model) are those of
    the newest delta; None where there is none, or its header can't be read (`problem` says why).
    """

    node_id: str
    deltas: int
    nbytes: int
    last_step: int | None
    base_outer_step: int | None
    lag: int | None
    dealt_with: int | None
    problem: str | None


class Status(NamedTuple):
    """A Hub as it is now. `commit` and `pointer` are None where nothing was published yet.

    `problems`: what is wrong with it, and what mends that, a sentence each. `stray`: files beside
    the global model that no commit on the store names, and their bytes together. `foreign`: names
    among commits, leases and deltas that are none.
    """

    url: str
    pointer: Pointer | None
    commit: Commit | None
    commits: int
    lease: Claim | None
    nodes: list[NodeStatus]
    global_bytes: int
    problems: list[str]
    stray: tuple[int, int]
    foreign: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether nobody has been here: a wrong URL looks the same."""
        return (
            self.pointer is None
            and self.commit is None
            and not (self.nodes or self.lease or self.problems)
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        commit, lease = self.commit, self.lease
        return {
            "url": self.url,
            "outer_step": None if commit is None else commit.outer_step,
            "pointer": None if self.pointer is None else self.pointer._asdict(),
            "commits": self.commits,
            "master": None if commit is None else commit.master,
            "fence": None if commit is None else commit.fence,
            "applied": [] if commit is None else [one._asdict() for one in commit.applied],
            "refused": [] if commit is None else [one._asdict() for one in commit.refused],
            "model": None if commit is None else commit.model._asdict(),
            "lease": None if lease is None else lease._asdict(),
            "nodes": [node._asdict() for node in self.nodes],
            "global_bytes": self.global_bytes,
            "node_bytes": sum(node.nbytes for node in self.nodes),
            "problems": self.problems,
            "stray": dict(zip(("files", "bytes"), self.stray, strict=True)),
            "foreign": self.foreign,
        }


def status_of(store: Store) -> Status:
    """Looks at a Hub. Costs listings, the commits, and headers of deltas that wait; no body.

    Raises StoreError where it can't be read, LogError for a log of another program.
    """
    log = CommitLog(store)
    steps = log.steps()
    problems: list[str] = []
    if not steps:
        log.pointer()  # raises where it is of another program, or names what nobody has
    pointer = pointer_of(log, problems)
    commit = newest_commit(log, steps, problems)
    known = looked_through(store, log, commit, pointer, steps, problems)
    problems += known.problems
    if commit is not None:
        problems += tensor_problems(store, commit, known.commits)
    claim = newest_claim(store)
    problems += lease_problems(store, claim, commit)
    folders, more, foreign = nodes_and_others(store)
    problems += more
    foreign += foreign_in(store, FOLDER, COMMIT.fullmatch)
    foreign += foreign_in(store, LEASES, LEASE.fullmatch)
    marks = {} if commit is None else commit.watermarks
    spec, nodes = _spec_of(store, commit), []
    for node_id in sorted({*folders, *marks}):
        found = deltas_of(store, node_id, marks.get(node_id), spec)
        nodes.append(_node(node_id, found, commit, marks.get(node_id)))
        problems += found.problems
        foreign += found.foreign
    named = {file.name for one in known.commits.values() for file in files_of(one)}
    entries = store.entries("global")
    strays = [entry.size for entry in entries if f"global/{entry.name}" not in {POINTER, *named}]
    return Status(
        store.url,
        pointer,
        commit,
        len(steps),
        claim,
        nodes,
        sum(entry.size for entry in entries),
        problems,
        (len(strays), sum(strays)),
        foreign,
    )


def _spec_of(store: Store, commit: Commit | None) -> Spec | None:
    """The tensors of the global model; None where they can't be told."""
    if commit is None:
        return None
    try:
        spec = Spec(header_of(store, commit.model).tensors)
    except (BadFileError, MissingError, PermanentError):
        return None
    return spec if spec.fingerprint == commit.fingerprint else None


def _node(node_id: str, found: Deltas, commit: Commit | None, mark: int | None) -> NodeStatus:
    last = max(found.sizes, default=None)
    facts = None if last is None else found.facts.get(last)
    base = None if facts is None else facts.base_outer_step
    lag = None if base is None or commit is None else commit.outer_step - max(0, base)
    nbytes = sum(found.sizes.values())
    problem = found.newest_problem
    return NodeStatus(node_id, len(found.sizes), nbytes, last, base, lag, mark, problem)


def status_lines(status: Status) -> list[str]:
    """The same for a terminal."""
    commit, lease = status.commit, status.lease
    lines = [f"Hub            {status.url}"]
    if commit is None:
        lines.append("outer step     none yet: no global model was published")
    else:
        applied = len({one.node_id for one in commit.applied})
        made = f"{len(commit.applied)} deltas of {applied} nodes, {len(commit.refused)} refused"
        lines.append(f"outer step     {commit.outer_step}, by {commit.master}: {made}")
        lines.append(f"global model   {commit.model.name}, {_size(commit.model.size)}")
        if status.pointer is not None and status.pointer.outer_step != commit.outer_step:
            where = "behind" if status.pointer.outer_step < commit.outer_step else "ahead"
            lines.append(f"pointer        {where}, at outer step {status.pointer.outer_step}")
        lines += [
            f"refused        {o.node_id}, step {o.local_step}: it {o.reason}"
            for o in commit.refused
        ]
    lines += [f"problem        {words}" for words in status.problems]
    lines.append(f"master         {_lease_words(lease)}")
    node_bytes = sum(node.nbytes for node in status.nodes)
    lines.append(
        f"sizes          global {_size(status.global_bytes)} in {status.commits} commits, "
        f"deltas {_size(node_bytes)}"
    )
    files, nbytes = status.stray
    if files:
        words = "that no commit names: of a master that died, or being written; the next cleans up"
        lines.append(f"stray          {files} files, {_size(nbytes)}, {words}")
    if status.foreign:
        names = ", ".join(plain(name) for name in status.foreign[:5])
        more = " …" if len(status.foreign) > 5 else ""
        lines.append(f"foreign        {len(status.foreign)} names that nobody reads: {names}{more}")
    return lines + _node_lines(status)


def _node_lines(status: Status) -> list[str]:
    if not status.nodes:
        return ["nodes          none yet"]
    titles = ["node", "last delta", "base", "lag", "dealt with", "deltas", "size"]
    rows = [
        [
            n.node_id,
            *(_word(v) for v in (n.last_step, n.base_outer_step, n.lag, n.dealt_with)),
            str(n.deltas),
            _size(n.nbytes),
        ]
        for n in status.nodes
    ]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    return ["", *(_row(row, widths) for row in [titles, *rows])]


def _row(row: list[str], widths: list[int]) -> str:
    cells = [
        row[0].ljust(widths[0]),
        *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
    ]
    return "  ".join(cells).rstrip()


def _lease_words(lease: Claim | None) -> str:
    if lease is None:
        return "nobody yet"
    state = "has stopped; its place is free" if lease.is_released else f"beat {lease.beat}"
    return f"{plain(lease.holder)}, fencing number {lease.number}, {state}"


def _word(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
