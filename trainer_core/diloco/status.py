"""What a person wants to know of a Hub: gathered from listings, headers and the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainer_core.diloco.commit import FOLDER, Commit, File, LogError, Pointer, commit_name
from trainer_core.diloco.commits import POINTER, CommitLog
from trainer_core.diloco.deltas import NODES, delta_name, folder_of, step_of
from trainer_core.diloco.errors import BadNameError, MissingError, PassingError, PermanentError
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
    """A Hub as it is now. `commit` and `pointer` are None where nothing was published yet.

    `problems`: what is wrong with it, and what mends that, a sentence each. `stray`: files beside
    the global model that no commit on the store names, and their bytes together.
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
        }


def status_of(store: Store) -> Status:
    """Looks at a Hub. Costs a listing and a header for each node, and the commits; no body.

    Raises StoreError where it can't be read, LogError where the log is not one.
    """
    log = CommitLog(store)
    try:
        commit = log.latest()
    except MissingError:
        raise LogError(
            f"{POINTER} names an outer step whose commit is not in {FOLDER}. A master that is "
            "still running goes on with the next one; if none is, put it back from a copy"
        ) from None
    steps, entries = log.steps(), store.entries("global")
    problems, named = _looked_through(log, commit, steps)
    if commit is not None:
        problems += _file_problems(store, commit)
    strays = [entry.size for entry in entries if f"global/{entry.name}" not in {POINTER, *named}]
    outer_step = -1 if commit is None else commit.outer_step
    marks = {} if commit is None else commit.watermarks
    folders = [name for name in store.folders(NODES) if _is_node(name)]
    nodes = sorted({*folders, *marks})
    return Status(
        store.url,
        log.pointer(),
        commit,
        len(steps),
        newest_claim(store),
        [_node(store, node_id, outer_step, marks.get(node_id)) for node_id in nodes],
        sum(entry.size for entry in entries),
        problems,
        (len(strays), sum(strays)),
    )


def _looked_through(
    log: CommitLog, newest: Commit | None, steps: list[int]
) -> tuple[list[str], set[str]]:
    """What is wrong with the log, and every file beside it that a commit names."""
    problems: list[str] = []
    named: set[str] = set()
    last = -1 if newest is None else newest.outer_step
    for step in steps:
        if step > last:
            problems.append(_not_standing(log, step))
            continue
        try:
            commit = log.read(step)
        except MissingError:
            continue  # cleaned away since it was listed
        except (LogError, PassingError, PermanentError) as error:
            words = "it is only history, and cleaned away with time"
            problems.append(f"{_plain(str(error))}; {words}")
            continue
        named |= {file.name for file in (commit.model, commit.momentum) if file is not None}
    known = [step for step in steps if step <= last]
    gaps = sorted(set(range(known[0], last)) - set(known)) if known else []
    if gaps:
        which = ", ".join(map(str, gaps[:5])) + (" …" if len(gaps) > 5 else "")
        problems.append(
            f"the log in {FOLDER} lacks outer step {which}: what was applied there can't be looked "
            "up any more; nodes go on, since each commit says up to where all was dealt with"
        )
    return problems, named


def _not_standing(log: CommitLog, step: int) -> str:
    words = "the master replaces it when it makes this outer step"
    try:
        log.read(step)
    except (LogError, PassingError, PermanentError, MissingError):
        return f"{commit_name(step)} is half a commit: nobody takes it for one, and {words}"
    return f"{commit_name(step)} has a lower fencing number than the commit before it; {words}"


def _file_problems(store: Store, commit: Commit) -> list[str]:
    """Of the files that the newest commit names: those that are not there as it says."""
    problems = []
    for what, file in (("global model", commit.model), ("outer momentum", commit.momentum)):
        if file is None:
            continue
        found = _what_is_wrong(store, file)
        if not found:
            continue
        problems.append(f"the {what} of outer step {commit.outer_step}, {file.name}, {found}")
    if problems:
        problems.append(
            "no node can install that outer step until the master writes it again: one that is "
            "running writes both files anew with its next outer step, one that is resumed from its "
            "own checkpoint of that outer step writes these. Else put them back from a copy"
        )
    return problems


def _what_is_wrong(store: Store, file: File) -> str:
    """By size and header: the content is not read here."""
    try:
        size = store.size(file.name)
        if size is None:
            return "is missing"
        if size != file.size:
            return f"has {size:,} bytes where {file.size:,} were committed"
        read_header(store, file.name, file.size)
    except (BadFileError, MissingError) as error:
        return f"can't be read: {_plain(str(error))}"
    except PermanentError as error:
        return f"can't be read, and has to be removed first: {_plain(str(error))}"
    return ""


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
