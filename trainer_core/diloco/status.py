"""What a person wants to know of a Hub: gathered from listings, headers and the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainer_core.diloco.commits import Commit, CommitLog, Pointer
from trainer_core.diloco.deltas import NODES, delta_name, folder_of, step_of
from trainer_core.diloco.errors import BadNameError, MissingError
from trainer_core.diloco.lease import Claim, newest_claim
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError, read_header


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
    """A Hub as it is now. `commit` and `pointer` are None where nothing was published yet."""

    url: str
    pointer: Pointer | None
    commit: Commit | None
    commits: int
    lease: Claim | None
    nodes: list[NodeStatus]
    global_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether nobody has been here: a wrong URL looks the same."""
        return self.pointer is None and self.commit is None and not self.nodes and not self.lease

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
        }


def status_of(store: Store) -> Status:
    """Looks at a Hub. Costs a listing and a header for each node, no body.

    Raises StoreError where it can't be read, LogError where the log is not one.
    """
    log = CommitLog(store)
    commit = log.latest()
    outer_step = -1 if commit is None else commit.outer_step
    marks = {} if commit is None else commit.watermarks
    folders = [name for name in store.folders(NODES) if _is_node(name)]
    nodes = sorted({*folders, *marks})
    return Status(
        store.url,
        log.pointer(),
        commit,
        len(log.steps()),
        newest_claim(store),
        [_node(store, node_id, outer_step, marks.get(node_id)) for node_id in nodes],
        sum(entry.size for entry in store.entries("global")),
    )


def _node(store: Store, node_id: str, outer_step: int, mark: int | None) -> NodeStatus:
    entries = store.entries(folder_of(node_id))
    sizes = {step: size for name, size in entries if (step := step_of(name)) is not None}
    last = max(sizes) if sizes else None
    base, problem = None, None
    if last is not None:
        try:
            header = read_header(store, delta_name(node_id, last), sizes[last])
            base = int(header.metadata["base_outer_step"])
        except (BadFileError, MissingError, KeyError, ValueError) as error:
            problem = f"the header of its newest delta can't be read: {error}"
    lag = None if base is None else outer_step - max(0, base)
    nbytes = sum(sizes.values())
    return NodeStatus(node_id, len(sizes), nbytes, last, base, lag, mark, problem)


def _is_node(name: str) -> bool:
    try:
        check_node_id(name)
    except BadNameError:
        return False
    return True


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
            lines.append(f"pointer        behind, at outer step {status.pointer.outer_step}")
        lines += [
            f"refused        {o.node_id}, step {o.local_step}: it {o.reason}"
            for o in commit.refused
        ]
    lines.append(f"master         {_lease_words(lease)}")
    node_bytes = sum(node.nbytes for node in status.nodes)
    lines.append(
        f"sizes          global {_size(status.global_bytes)} in {status.commits} commits, "
        f"deltas {_size(node_bytes)}"
    )
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
    lines = ["", *(_row(row, widths) for row in [titles, *rows])]
    return lines + [f"{n.node_id}: {_plain(n.problem)}" for n in status.nodes if n.problem]


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
    return f"{_plain(lease.holder)}, fencing number {lease.number}, {state}"


def _word(value: int | None) -> str:
    return "-" if value is None else str(value)


def _plain(text: str) -> str:
    """Names in files are anybody's: nothing in them may move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
