"""What is wrong with the files of a Hub, and what mends it: a sentence each.

By names, sizes, headers and the log; no body of tensors is read. Each function raises StoreError
where the store itself can't be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainer_core.diloco.commit import (
    FOLDER,
    Commit,
    File,
    HalfWrittenError,
    LogError,
    Pointer,
    commit_name,
)
from trainer_core.diloco.commits import COMMIT, POINTER, CommitLog
from trainer_core.diloco.deltas import (
    NODES,
    DeltaFacts,
    delta_name,
    facts_of,
    folder_of,
    judge_header,
    step_of,
)
from trainer_core.diloco.errors import MissingError, PermanentError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lease import FOLDER as LEASES
from trainer_core.diloco.lease import NAME as LEASE
from trainer_core.diloco.lease import Claim, lease_name
from trainer_core.diloco.names import is_node_id
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError, read_header

_MOST_NAMED = 5
_HISTORY = "only history: nodes go on, and it is cleaned away with time"
_UNREADABLE = (HalfWrittenError, LogError, MissingError, PermanentError)
"""What a file of the log may raise that is damaged, and not only out of reach for now."""


def pointer_of(log: CommitLog, problems: list[str]) -> Pointer | None:
    """What the pointer says, None where it says nothing; `problems` gets why."""
    try:
        pointer = log.pointer()
    except (LogError, PermanentError) as error:
        problems.append(
            f"{plain(error)}; until it is removed no master can go on, and no node gets a newer "
            "global model. A master then writes it anew"
        )
        return None
    if pointer is None and log.steps():
        problems.append(
            f"{POINTER} is missing or no JSON: no node gets a newer global model until a master "
            "that runs writes it anew, which it does at once"
        )
    return pointer


def newest_commit(log: CommitLog, steps: list[int], problems: list[str]) -> Commit | None:
    """The newest commit that stands; where that can't be told, the newest that can be read."""
    try:
        return log.latest()
    except MissingError:
        words = f"{POINTER} names an outer step whose commit is not in {FOLDER}"
    except (HalfWrittenError, LogError, PermanentError) as error:
        words = plain(error)
    # The pointer has its own sentence, and the log is not to blame for it.
    if not any(words in known for known in problems):
        problems.append(
            f"{words}. A master that is running goes on with the next outer step; none can start "
            "until it is put back from a copy"
        )
    for step in reversed(steps):
        try:
            return log.read(step)
        except _UNREADABLE:
            continue
    return None


class Log(NamedTuple):
    """The commits on a store that can be read, by outer step, and what is wrong with the others."""

    commits: dict[int, Commit]
    problems: list[str]


def looked_through(
    store: Store,
    log: CommitLog,
    newest: Commit | None,
    pointer: Pointer | None,
    steps: list[int],
    said: list[str],
) -> Log:
    """Reads each commit that is listed. `said`: problems of which there is a sentence already."""
    commits: dict[int, Commit] = {}
    problems: list[str] = []
    last = -1 if newest is None else newest.outer_step
    for step in steps:
        try:
            commits[step] = log.read(step)
        except MissingError:
            continue  # cleaned away since it was listed
        except _UNREADABLE as error:
            if step <= last:
                problems.append(f"{plain(error)}; it is {_HISTORY}")
        if step > last and not any(commit_name(step) in words for words in said):
            problems.append(_not_standing(step, step in commits, pointer))
    hinders = "no master can commit that outer step, nor read it"
    problems += _not_files(store, FOLDER, COMMIT.fullmatch, hinders, commit_name(last + 1))
    known = [step for step in steps if step <= last]
    gaps = sorted(set(range(known[0], last)) - set(known)) if known else []
    if gaps:
        which = ", ".join(map(str, gaps[:_MOST_NAMED])) + (" …" if len(gaps) > _MOST_NAMED else "")
        problems.append(
            f"the log in {FOLDER} lacks outer step {which}: what was applied there can't be looked "
            "up any more; nodes go on, since each commit says up to where all was dealt with"
        )
    return Log(commits, problems)


def _not_standing(step: int, is_whole: bool, pointer: Pointer | None) -> str:
    words = "the master replaces it when it makes this outer step"
    if is_whole:
        return f"{commit_name(step)} has a lower fencing number than the commit before it; {words}"
    if pointer is not None and pointer.outer_step >= step:
        return (
            f"{commit_name(step)} was committed, as {POINTER} says, and is damaged since: put it "
            "back from a copy; else a master that starts makes this outer step anew, of the same "
            "deltas"
        )
    return f"{commit_name(step)} is half a commit: nobody takes it for one, and {words}"


def tensor_problems(store: Store, newest: Commit, commits: Mapping[int, Commit]) -> list[str]:
    """Of the files that commits name: those that are not there as these say."""
    problems = []
    for what, file in (("global model", newest.model), ("outer momentum", newest.momentum)):
        if file is not None and (found := _what_is_wrong(store, file)):
            problems.append(f"the {what} of outer step {newest.outer_step}, {file.name}, {found}")
    if problems:
        problems.append(
            "no node can install that outer step until the master writes it again: one that is "
            "running writes both files anew with its next outer step, one that is resumed from its "
            "own checkpoint of that outer step writes these. Else put them back from a copy"
        )
    return problems + _older_problems(store, newest, commits)


def _older_problems(store: Store, newest: Commit, commits: Mapping[int, Commit]) -> list[str]:
    """By their sizes. The oldest may just be cleaned away: its files go before it does."""
    sizes = {f"global/{entry.name}": entry.size for entry in store.entries("global")}
    wrong: list[str] = []
    for step in sorted(commits)[1:]:
        names = [f.name for f in files_of(commits[step]) if sizes.get(f.name) != f.size]
        if names and step < newest.outer_step and store.size(commit_name(step)) is not None:
            wrong += names
    if not wrong:
        return []
    named = ", ".join(wrong[:_MOST_NAMED]) + (" …" if len(wrong) > _MOST_NAMED else "")
    words = f"{len(wrong)} files of older outer steps are missing or of another size"
    return [f"{words}: {named}; they are {_HISTORY}"]


def files_of(commit: Commit) -> list[File]:
    """The weights and the momentum that it names."""
    return [file for file in (commit.model, commit.momentum) if file is not None]


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
        return f"can't be read: {plain(error)}"
    except PermanentError as error:
        return f"can't be read, and has to be removed first: {plain(error)}"
    return ""


def lease_problems(store: Store, claim: Claim | None, newest: Commit | None) -> list[str]:
    """Of the files that say who is master."""
    fence = 0 if newest is None else newest.fence
    number = 0 if claim is None else claim.number
    hinders = "no master can take that number, nor get past it"
    then = lease_name(max(number, fence) + 1)
    problems = _not_files(store, LEASES, LEASE.fullmatch, hinders, then)
    if claim is not None and not claim.is_readable:
        problems.append(
            f"{lease_name(number)} can't be read, so that nobody knows who is master: one that "
            "lives writes it anew within lease_seconds; after them the next one takes its place"
        )
    if number < fence:
        problems.append(
            f"{LEASES} lacks the lease with the fencing number {fence} of the newest commit: "
            "somebody removed it. The next master takes a number above it"
        )
    return problems


class Deltas(NamedTuple):
    """A node's deltas: sizes by local step, the facts of those that were looked at, and problems.

    `newest_problem`: why the facts of the newest one can't be told.
    """

    sizes: dict[int, int]
    facts: dict[int, DeltaFacts]
    newest_problem: str | None
    problems: list[str]
    foreign: list[str]


def deltas_of(store: Store, node_id: str, mark: int | None, spec: Spec | None) -> Deltas:
    """Looks at the headers of the newest delta and of those that wait to be applied.

    `mark`: up to where all was dealt with. `spec`: of the global model, None if that is not known.
    """
    folder, dealt_with = folder_of(node_id), -1 if mark is None else mark
    sizes: dict[int, int] = {}
    foreign: list[str] = []
    for name, size in store.entries(folder):
        step = step_of(name)
        if step is None:
            foreign.append(f"{folder}/{name}")
        else:
            sizes[step] = size
    hinders = "the node can't deliver that step, nor the master read it"
    problems = _not_files(store, folder, lambda name: step_of(name) is not None, hinders)
    facts: dict[int, DeltaFacts] = {}
    newest_problem = None
    for step in [step for step in sizes if step > dealt_with or step == max(sizes)]:
        found = _facts_or_words(store, node_id, step, sizes[step], spec)
        if isinstance(found, DeltaFacts):
            facts[step] = found
            continue
        becomes = "it was dealt with, and is " + _HISTORY
        if step > dealt_with:
            becomes = "the master refuses it with its next outer step; its steps are lost"
        problems.append(f"{delta_name(node_id, step)} {found}; {becomes}")
        newest_problem = found if step == max(sizes) else newest_problem
    for step, known in facts.items():
        before = known.previous_step
        if before is not None and before > dealt_with and before not in sizes:
            problems.append(
                f"{delta_name(node_id, before)} is missing, though {delta_name(node_id, step)} "
                "was sent after it: the master waits some rounds for it, then goes on without"
            )
    return Deltas(sizes, facts, newest_problem, problems, foreign)


def _facts_or_words(
    store: Store, node_id: str, step: int, size: int, spec: Spec | None
) -> DeltaFacts | str:
    try:
        header = read_header(store, delta_name(node_id, step), size)
        if spec is None:
            return facts_of(header, node_id, step)
        return judge_header(header, node_id, step, spec)
    except BadFileError as error:
        return plain(error)
    except MissingError:
        return "is gone since it was listed"
    except PermanentError as error:
        return f"can't be read: {plain(error)}"


def nodes_and_others(store: Store) -> tuple[list[str], list[str], list[str]]:
    """The folders of nodes; problems; and names where nodes are that belong to none."""
    folders, files = store.folders(NODES), [entry.name for entry in store.entries(NODES)]
    problems = [
        f"{NODES}/{name} is a file where that node's folder would be: it can't deliver anything "
        "until the file is removed"
        for name in files
        if is_node_id(name)
    ]
    foreign = [f"{NODES}/{name}" for name in [*folders, *files] if not is_node_id(name)]
    return [name for name in folders if is_node_id(name)], problems, foreign


def foreign_in(store: Store, folder: str, is_name: Callable[[str], object]) -> list[str]:
    """The names in a folder that are none of ours."""
    names = [*store.folders(folder), *(entry.name for entry in store.entries(folder))]
    return [f"{folder}/{name}" for name in names if not is_name(name)]


def _not_files(
    store: Store, folder: str, is_name: Callable[[str], object], hinders: str, then: str = ""
) -> list[str]:
    """Of names that are to be files: those of directories, and `then` if it is no file either."""
    names = {f"{folder}/{name}" for name in store.folders(folder) if is_name(name)}
    try:
        if then:
            store.size(then)
    except PermanentError:
        names.add(then)
    return [f"{name} is no file: {hinders} until it is removed" for name in sorted(names)]


def plain(text: object) -> str:
    """Names in files are anybody's: nothing in them may move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
