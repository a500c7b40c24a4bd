"""What all checks share: the class that describes a finding, and what they look at.

A check looks at a subject, made by `verify`, and yields findings. It never reads a file itself,
except where its class says so, never prints, and never raises for what it sees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.records import Records

if TYPE_CHECKING:
    from ckpttool.model.books import Books
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.directory import CheckpointDirectory, StepFile
    from ckpttool.model.records import Precedence
    from ckpttool.model.schema import TrainingFacts
    from ckpttool.model.tensor import TensorRef


class Check:
    """One kind of finding; subclasses are never instantiated.

    `id` never changes. `severity` is what it mostly has (a finding may carry another, as `meaning`
    then says). `title`, `meaning`, `why` (it matters) and `mends` make up its catalogue entry.
    """

    id = ""
    severity = Severity.ERROR
    title = ""
    meaning = ""
    why = ""
    mends = ""

    @classmethod
    def finding(
        cls,
        place: Place,
        words: str,
        remedy: str | None = None,
        *,
        severity: Severity | None = None,
        **facts: Any,
    ) -> Finding:
        """A finding of this kind. `facts` must be plain data, fit for JSON."""
        return Finding(cls.id, severity or cls.severity, place, words, remedy, facts)


class FileVerdict:
    """What is to be said of one file as a whole.

    `state`: `valid` (intact, and a training checkpoint for the step in its name), `intact` (judged
    by its container alone), `not-as-recorded` (whole, but its own record says another size or
    SHA-256), `wrong-step`, `not-a-checkpoint`, `damaged`, `dangerous`, `changing`, `unreadable`,
    `incomplete` (files of a sharded step are missing) or `not-opened` (a link or the like).
    `checksums`: `checked`, `none stored`, `skipped` (quick) or `not reached`. `size` is in bytes.
    `recorded_size` and `sha256` are those of what the pointer and the manifest record of it: the
    file called `recorded_name`, for a sharded step its metadata. The hash is None where nothing
    records one. `too_large` says that reading it stopped at a limit, and nothing else is known.
    `places` are the paths, by name, of files of a sharded step that lie elsewhere: moved back, they
    make it valid.
    """

    __slots__ = (
        *("checksums", "name", "path", "places", "recorded_name", "recorded_size"),
        *("sha256", "size", "state", "step", "too_large"),
    )

    def __init__(
        self, step: int | None, name: str, path: str, size: int, state: str, checksums: str
    ) -> None:
        self.step = step
        self.name = name
        self.path = path
        self.size = size
        self.state = state
        self.checksums = checksums
        self.recorded_name = name
        self.recorded_size: int | None = size
        self.sha256: str | None = None
        self.too_large = False
        self.places: dict[str, str] = {}

    @property
    def is_valid(self) -> bool:
        """Whether training may resume from it."""
        return self.state == "valid"

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain data."""
        names = set(self.__slots__) - _NOT_TOLD
        return {name: getattr(self, name) for name in sorted(names)}

    def __repr__(self) -> str:
        return f"FileVerdict({self.path!r}, {self.state})"


_NOT_TOLD = frozenset(("places", "recorded_name", "recorded_size", "too_large"))


class FileSubject:
    """One opened file and all that was seen of it.

    `step` is the number in the name of a step file, None for any other file, which is judged by
    its container and trust alone. `anomalies` gathers what the formats noticed and what `verify`
    measured. `facts` are those of the training schema, `mode` is the file's own.
    """

    __slots__ = (
        "_by_code",
        "_by_record",
        "anomalies",
        "checkpoint",
        "facts",
        "mode",
        "path",
        "step",
    )

    def __init__(
        self, path: str, checkpoint: Checkpoint, facts: TrainingFacts, step: int | None, mode: int
    ) -> None:
        self.path = path
        self.checkpoint = checkpoint
        self.facts = facts
        self.step = step
        self.mode = mode
        self.anomalies: list[Anomaly] = []
        self._by_code: dict[str, list[Anomaly]] | None = None
        self._by_record: dict[str, tuple[str, ...]] | None = None

    @property
    def unpickled_by(self) -> str | None:
        """What unpickles it without an allow-list, whoever asks; None where that can be chosen."""
        return None

    @property
    def all_must_be_known(self) -> bool:
        """Whether its writer names nothing but what is known here, so that the rest is an attack.

        Only where `unpickled_by` is not None.
        """
        return False

    def seen(self, *codes: str) -> Iterator[Anomaly]:
        """The anomalies with these codes, in the order in which they were noticed."""
        if self._by_code is None:
            self._by_code = {}
            for anomaly in self.anomalies:
                self._by_code.setdefault(anomaly.code, []).append(anomaly)
        for code in codes:
            yield from self._by_code.get(code, ())

    def place(self, record: str | None = None, *, key: str | None = None) -> Place:
        """A place in this file; for a record, with the names of the tensors that lie in it."""
        tensors = () if record is None else self.tensors_in(record)
        return Place(self.path, record=record, tensors=tensors, key=key)

    def tensors_in(self, record: str) -> tuple[str, ...]:
        """Dotted names of the tensors whose storage the record holds."""
        if self._by_record is None:
            names: dict[str, list[str]] = {}
            for tensor in self.checkpoint.tensors.values():
                for holder in _records_of(tensor):
                    names.setdefault(holder, []).append(tensor.name)
            self._by_record = {name: tuple(tensors) for name, tensors in names.items()}
        return self._by_record.get(record, ())


def _records_of(tensor: TensorRef) -> Iterator[str]:
    """The records that hold the tensor's bytes, or those of what it is built from."""
    if tensor.record is not None:
        yield tensor.record
    for part in tensor.parts.values():
        yield from _records_of(part)


class FileCheck(Check):
    """A check of one opened file."""

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        """The findings of this kind in a file."""
        raise NotImplementedError  # each check's own


class Examined:
    """A step file after its examination: verdict, findings, and facts to compare with others."""

    __slots__ = ("entry", "facts", "findings", "verdict")

    def __init__(
        self,
        entry: StepFile,
        verdict: FileVerdict,
        findings: list[Finding],
        facts: TrainingFacts | None = None,
    ) -> None:
        self.entry = entry
        self.verdict = verdict
        self.findings = findings
        self.facts = facts


class DirectorySubject:
    """A directory whose step files have been examined.

    `newest` is the verdict of the highest valid step or None. `whole_temporaries` names leftovers
    that a quick look finds to be whole checkpoints. `quick` says that checksums were not looked at.
    `books` is what the directory records about itself, `records` what it records of its steps.
    """

    __slots__ = (
        *("_verdicts", "books", "directory", "examined"),
        *("newest", "quick", "records", "whole_temporaries"),
    )

    def __init__(
        self,
        directory: CheckpointDirectory,
        examined: list[Examined],
        whole_temporaries: set[str],
        *,
        quick: bool,
        books: Books,
    ) -> None:
        self.directory = directory
        self.books = books
        self.examined = examined
        self.whole_temporaries = whole_temporaries
        self.quick = quick
        self.records = Records(directory.pointer, books.manifest)
        valid = [item.verdict for item in examined if item.verdict.is_valid]
        self.newest = max(valid, key=self._rank, default=None)
        self._verdicts = {item.entry.name: item.verdict for item in examined}

    def _rank(self, file: FileVerdict) -> tuple[int, Precedence]:
        assert file.step is not None  # a step file's name has one
        return file.step, self.records.precedence(file.name)

    def verdict(self, name: str) -> FileVerdict | None:
        """The verdict on the step file with this name."""
        return self._verdicts.get(name)

    @property
    def repair_helps(self) -> bool:
        """Whether `repair` may leave a valid step here, by a step that is valid, or can become so.

        A sharded step is not mended: it is renamed, or a whole leftover takes its place.
        """
        files = any(it.entry.is_regular for it in self.examined)
        return self.newest is not None or files or self.comes_back

    @property
    def comes_back(self) -> bool:
        """Whether `repair` makes a valid step of one that, or whose files, have wrong names."""
        misnamed = any(
            it.verdict.state == "wrong-step" or it.verdict.places for it in self.examined
        )
        return misnamed or bool(self.whole_temporaries)

    def go_back(self, name: str) -> str:
        """What to do about a step that nobody can check: nothing mends it without being asked."""
        words = f"make {name} readable"
        if self.newest is None or self.newest.name == name:
            return f"{words}; nothing here mends it"
        return f"{words}, or do without it: {self.command('rollback')} --to {self.newest.step}"

    def command(self, verb: str) -> str:
        """The command line `ckpttool VERB DIRECTORY`, quoted for a shell."""
        return command(verb, self.directory.path)


class DirectoryCheck(Check):
    """A check of a directory whose files have been examined."""

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        """The findings of this kind in a directory."""
        raise NotImplementedError  # each check's own


_OPTION = re.compile(r"--?[a-z][a-z-]*\Z")


def command(verb: str, *arguments: str | os.PathLike[str]) -> str:
    """A command line of this tool that can be pasted into a shell, whatever the paths hold."""
    words = [os.fspath(argument) for argument in arguments]
    return " ".join(["ckpttool", verb, *(_argument(word, at) for at, word in enumerate(words))])


def _argument(word: str, at: int) -> str:
    """The first one is a path; what begins with a dash further on is an option of this tool."""
    return word if at and _OPTION.match(word) else quoted(word)


def quoted(path: str) -> str:
    r"""A path quoted for a shell: `./-x` where it would look like an option, `$'a\nb'` in need.

    The latter is for what does not print, and for bytes that are not UTF-8: the words of a finding
    are escaped before they are shown, and have to be fit to be pasted all the same.
    """
    from shlex import quote

    if path.startswith("-"):
        path = f"./{path}"
    if path.isprintable():
        return quote(path)
    return "$'" + "".join(map(_in_ansi_c, path)) + "'"


_ANSI_C = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "'": "\\'", "\\": "\\\\"}


def _in_ansi_c(char: str) -> str:
    """A character within `$'…'`, in which bash and POSIX.1-2024 take octal digits for a byte."""
    if char in _ANSI_C:
        return _ANSI_C[char]
    if char.isprintable():
        return char
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(char))


def few(names: list[str] | tuple[str, ...], most: int = 3) -> str:
    """The first names, each at most 80 characters, and how many more there are."""
    shown = ", ".join(name[:80] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def plural(count: int, noun: str, many: str | None = None) -> str:
    """`1 record`, `3,000 records`."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"
