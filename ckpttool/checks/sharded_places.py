"""Files of sharded steps that lie elsewhere, found by what is recorded of them.

The files of the ranks record size and SHA-256 of each shard, the pointer and the manifest those of
`.metadata`. So a file under another name (`.metadata.bak`, two shards exchanged, one in a writer's
leftover, or in another step) is known for what it is. Only where a step is damaged or incomplete is
anything looked for, and only files of a recorded size are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checks.base import Check, few, plural, quoted
from ckpttool.checks.sharded_check import RESUME_EARLIER
from ckpttool.errors import UnreadableError
from ckpttool.findings import Finding, Place
from ckpttool.model.sharded_listing import METADATA_NAME, bare, list_sharded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.checks.examine import Depth, Result
    from ckpttool.checks.measure import Workers
    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.model.records import Records

# What may be put right by giving files their own names back.
_LOOKED_FOR = frozenset({"damaged", "incomplete", "dangerous", "not-as-recorded"})

Digests = set[tuple[int, str]]
"""Sizes in bytes with SHA-256 in lower case; a file has to have one such pair."""


class FileElsewhere(Check):
    id = "SHD114"
    title = "A file of a sharded step is not in its place"
    meaning = (
        "Size and SHA-256 that the pointer, the manifest or a rank's file records of `.metadata`"
        " or a shard are those of a file under another name: two shards are exchanged, `.metadata`"
        " lies beside as `.metadata.tmp`, a shard is in a writer's leftover or in another step."
    )
    why = "The step does not load as it is, or loads wrong; nothing of it is lost."
    mends = "`ckpttool repair` moves the files back where that makes the step valid."


class Need(NamedTuple):
    """A step that is not whole: its path, and what is recorded of its files, by name.

    `lacking` are the names whose own file is missing, or is not the recorded one. `spare` are paths
    in the step, and in its leftovers, of what is in no place of its own; the nearest first.
    """

    path: str
    files: dict[str, Digests]
    lacking: frozenset[str]
    spare: list[str]


class Look(NamedTuple):
    """A step after its first look; `leftovers` are the folders that dead writers of it left."""

    step: int
    first: Result
    leftovers: Sequence[str] = ()


def find_files(
    looks: Sequence[Look], records: Records, depth: Depth, workers: Workers
) -> list[Result]:
    """The results of the looks; anew where files that a step lacks were found.

    The findings are those that would be left with all in place, and that it is not; the state stays
    what it was. `verdict.places` is set where the step would be valid.
    """
    results = [look.first for look in looks]
    if depth.quick:
        return results
    search = Search()
    needs = [search.needs(look, records, depth.limits) for look in looks]
    for place, (look, need) in enumerate(zip(looks, needs, strict=True)):
        if need is not None and (found := search.find(need)):
            results[place] = _look_again(look, need, found, depth, workers)
    return results


class Pool:
    """Files by size and SHA-256. Only those are hashed that have a size which is asked for."""

    def __init__(self, hashed: Callable[[str], str | None]) -> None:
        self._hashed = hashed
        self._by_size: dict[int | None, list[str]] = {}
        self._known: dict[int, dict[str | None, list[str]]] = {}

    def add(self, paths: Iterable[str]) -> None:
        """Adds files, before anything is asked."""
        for path in paths:
            self._by_size.setdefault(_size(path), []).append(path)

    def having(self, size: int, sha256: str) -> list[str]:
        """The paths of the files with this size and SHA-256, in the order in which they came."""
        if size not in self._known:
            known = self._known[size] = {}
            for path in self._by_size.get(size, ()):
                known.setdefault(self._hashed(path), []).append(path)
        return self._known[size].get(sha256, [])


class Search:
    """Looks for the files of steps; each file is hashed once at most, and given to one step.

    First come `needs` of all steps: what is in the wrong place in one may belong to another.
    """

    def __init__(self) -> None:
        self._sha256: dict[str, str | None] = {}
        self._elsewhere = Pool(self._hash)
        self._given: set[str] = set()

    def needs(self, look: Look, records: Records, limits: ReaderLimits) -> Need | None:
        """What a step lacks that something records; None where that is nothing."""
        verdict = look.first.verdict
        if verdict.state not in _LOOKED_FOR:
            return None
        files = _recorded_shards(verdict.path, limits)
        name = os.path.basename(bare(verdict.path))
        if of_metadata := set(_recorded_metadata(records, name)):
            files[METADATA_NAME] = of_metadata
        wrong, there = _wrong_names(look.first.findings), _files(verdict.path)
        lacking = frozenset(
            name
            for name, digests in files.items()
            if name not in there
            or ((wrong is None or name in wrong) and not self._is_one_of(there[name], digests))
        )
        if not lacking:
            return None
        # Of another step nothing is taken but what is proven not to be its own.
        self._elsewhere.add(there[name] for name in sorted(lacking & there.keys()))
        in_place = files.keys() - lacking
        spare = [path for name, path in there.items() if name not in in_place]
        spare += [path for folder in look.leftovers for path in _files(folder).values()]
        return Need(verdict.path, files, lacking, spare)

    def find(self, need: Need) -> dict[str, str]:
        """The path of each lacking file that is found: in the step, a leftover, another step."""
        near = Pool(self._hash)
        near.add(need.spare)
        found: dict[str, str] = {}
        for name in sorted(need.lacking):
            digests = sorted(need.files[name])
            pools = (near, self._elsewhere)
            paths = (path for pool in pools for one in digests for path in pool.having(*one))
            free = next((path for path in paths if path not in self._given), None)
            if free is not None:
                found[name] = free
                self._given.add(free)
        return found

    def _is_one_of(self, path: str, digests: Digests) -> bool:
        size = _size(path)
        return any(size == one for one, _ in digests) and (size, self._hash(path)) in digests

    def _hash(self, path: str) -> str | None:
        from ckpttool.io.checksum import sha256_of
        from ckpttool.io.reading import FileReader

        if path not in self._sha256:
            try:
                with FileReader(path) as reader:
                    self._sha256[path] = sha256_of(reader)
            except UnreadableError:
                self._sha256[path] = None
        return self._sha256[path]


def _size(path: str) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _wrong_names(findings: Iterable[Finding]) -> set[str] | None:
    """The names of files of which something is said, or could be; None where not all are named."""
    if any("more" in finding.facts for finding in findings):
        return None
    return {METADATA_NAME, *(os.path.basename(finding.place.path) for finding in findings)}


def _recorded_metadata(records: Records, name: str) -> Iterator[tuple[int, str]]:
    for _, entry in records.of(name):
        if entry.size is not None and entry.sha256 is not None:
            yield entry.size, entry.sha256


def _files(folder: str) -> dict[str, str]:
    """Paths of the regular files in a folder, by name; none where it cannot be listed."""
    home = bare(folder)
    try:
        return {name: os.path.join(home, name) for name in list_sharded(folder).sizes}
    except UnreadableError:
        return {}


def _recorded_shards(path: str, limits: ReaderLimits) -> dict[str, Digests]:
    """What the files of the ranks record of the shards."""
    from ckpttool.checks.sharded_digests import recorded_by
    from ckpttool.model.checkpoint import open_checkpoint
    from ckpttool.model.sharded import TRAINER_NAME, is_plain, rank_of

    found: dict[str, Digests] = {}
    for by, file in _files(path).items():
        if rank_of(by) is None:
            continue
        try:
            with open_checkpoint(file, limits=limits) as checkpoint:
                records = recorded_by(checkpoint.tree if checkpoint.readable else None, by) or []
        except UnreadableError:
            continue
        for one in records:
            if is_plain(one.shard) and one.shard not in (METADATA_NAME, TRAINER_NAME):
                found.setdefault(one.shard, set()).add((one.size, one.sha256))
    return found


def _look_again(
    look: Look, need: Need, found: dict[str, str], depth: Depth, workers: Workers
) -> Result:
    from ckpttool.checks.sharded_examine import examine_sharded

    first, verdict = look.first, look.first.verdict
    try:
        again = examine_sharded(need.path, look.step, depth, workers, found)
    except UnreadableError:  # it is being changed
        return first
    proven = METADATA_NAME not in need.lacking - found.keys()
    if again.verdict.is_valid and proven:
        verdict.places = found
    kept = first.findings if verdict.state == "dangerous" else again.findings
    return first._replace(findings=[*kept, *_elsewhere(need.path, found)])


def _elsewhere(path: str, found: Mapping[str, str]) -> list[Finding]:
    """The files that have each other's names as one finding, the others by where they lie."""
    exchanged = {name: file for name, file in found.items() if _has_its_place(path, found, file)}
    groups: dict[str, list[str]] = {}
    for name, file in found.items():
        if name not in exchanged:
            groups.setdefault(os.path.dirname(file), []).append(name)
    findings = [_exchanged(path, exchanged)] if exchanged else []
    return findings + [_lie_in(path, found, folder, names) for folder, names in groups.items()]


def _has_its_place(path: str, found: Mapping[str, str], file: str) -> bool:
    """Whether a file of the step has the name of another one that is found as well."""
    name = os.path.basename(file)
    return _lies_in(path, file) and name in found and _lies_in(path, found[name])


def _lies_in(folder: str, file: str) -> bool:
    return os.path.dirname(file) == bare(folder)


def _exchanged(path: str, found: Mapping[str, str]) -> Finding:
    names = sorted(found)
    words = f"{names[0]} and {names[-1]} are exchanged: each is, by size and SHA-256, the other"
    if len(names) > 2:
        count = plural(len(names), "file")
        words = f"{count} have each other's names, by size and SHA-256: {few(names)}"
    place = Place(os.path.join(path, names[0]))
    files = {name: os.path.basename(found[name]) for name in names}
    return FileElsewhere.finding(place, words, RESUME_EARLIER, files=files)


def _lie_in(path: str, found: Mapping[str, str], folder: str, names: list[str]) -> Finding:
    where = "here" if folder == bare(path) else f"in {os.path.basename(folder)}"
    name, file = names[0], os.path.basename(found[names[0]])
    under = "" if file == name else f" as {file}"
    words = f"it lies {where}{under}, by the size and SHA-256 that are recorded of it"
    place = os.path.join(path, name)
    if len(names) > 1:
        words = f"{plural(len(names), 'file')} of the step lie {where}, by size and SHA-256"
        words, place = f"{words}: {few(names)}", path
    files = {name: os.path.relpath(found[name], path) for name in names}
    remedy = RESUME_EARLIER
    if len(names) == 1 and not os.path.lexists(place):
        remedy = f"mv -n -- {quoted(found[name])} {quoted(place)}"
    return FileElsewhere.finding(Place(place), words, remedy, files=files)


CHECKS: tuple[type[Check], ...] = (FileElsewhere,)
