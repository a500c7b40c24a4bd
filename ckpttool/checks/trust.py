"""TRU: what loading the file would run, and what tries to hide it.

`verify` reads statically: whatever is named here was not imported and not called.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

from ckpttool.checks.base import DirectorySubject, FileCheck, FileSubject, few, plural, quoted
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly

_FIND_OUT = "find out where it came from"
_MOST = 1000  # names in the facts of one finding; a hostile file can have any number


def _do_not_load(subject: FileSubject) -> str:
    how = "" if subject.unpickled_by else " with weights_only=False"
    return f"do not load it{how}; {_FIND_OUT}"


def _loading(subject: FileSubject, without: str = "") -> str:
    """The beginning of a sentence about what loading does; `without` is the way to do it at all."""
    if subject.unpickled_by:
        return f"{subject.unpickled_by} unpickles it without an allow-list, which"
    return f"loading it{without}"


def _paths(subject: FileSubject, trust: str) -> list[str]:
    uses = subject.checkpoint.globals
    # The classes of a script are in the archive itself; that it holds code is said as such.
    is_script = subject.checkpoint.kind == "torchscript"
    return [
        f"{use.module}.{use.name}"
        for use in uses
        if use.trust.value == trust and not (is_script and use.module.startswith("__torch__"))
    ]


class DangerousGlobal(FileCheck):
    id = "TRU101"
    title = "Loading it can run code"
    meaning = (
        "The pickle names something that leads to running code: a shell, `exec`, an import, a file"
        " opened for writing, a call of something that it computes itself."
    )
    why = (
        "`torch.load(weights_only=False)` would run whatever the file's author chose; so would"
        " `torch.distributed.checkpoint`, which has no other way to load `.metadata`."
    )
    mends = "Do not load it. Find out where the file came from; resume from another step."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        paths = _paths(subject, "dangerous")
        if paths:
            how = _loading(subject, " with weights_only=False")
            words = f"{how} can run code: {few(paths)}"
            yield cls.finding(subject.place(), words, _do_not_load(subject), globals=paths[:_MOST])
        for anomaly in subject.seen("computed-calls", "dangerous-calls"):
            words = "loading it would call something that the file computes itself"
            yield cls.finding(subject.place(anomaly.record), words, _do_not_load(subject))


class UnknownGlobal(FileCheck):
    id = "TRU102"
    severity = Severity.WARNING
    title = "It needs classes that are not known"
    meaning = (
        "The pickle names classes or functions that this tool knows nothing about. An error in the"
        " `.metadata` of a sharded step, in which torch writes no classes but its own and plain"
        " ones."
    )
    why = (
        "`torch.load` refuses them, and with `weights_only=False` imports them and runs what they"
        " say: code that the file chooses among what is installed. `torch.distributed.checkpoint`"
        " does so unasked."
    )
    mends = (
        "If you know them, allow just these (`torch.serialization.safe_globals`). A sharded step"
        " can only be left alone until you do."
    )

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        paths = _paths(subject, "unknown")
        if paths:
            words = f"{_loading(subject)} imports {plural(len(paths), 'unknown name')}"
            remedy = "if you know them, allow just these with torch.serialization.safe_globals"
            if subject.unpickled_by:
                remedy = f"do not load it before you know what they are; {_FIND_OUT}"
            yield cls.finding(
                subject.place(),
                f"{words}: {few(paths)}",
                remedy,
                severity=Severity.ERROR if subject.all_must_be_known else None,
                globals=paths[:_MOST],
            )


class BenignGlobals(FileCheck):
    id = "TRU103"
    severity = Severity.INFO
    title = "It needs an allow-list to load"
    meaning = "The pickle names harmless classes that `torch.load` does not take by itself."
    why = "Loading fails by default; with these names allowed it is safe."
    mends = "Load it under `torch.serialization.safe_globals`; nothing has to be done to the file."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        paths = _paths(subject, "benign")
        if paths:
            words = f"torch.load takes it only with an allow-list: {few(paths)}"
            yield cls.finding(subject.place(), words, globals=paths[:_MOST])


class RefusedProtocol(FileCheck):
    id = "TRU104"
    severity = Severity.INFO
    title = "torch.load refuses its pickle protocol or format"
    meaning = (
        "The pickle uses opcodes that `weights_only=True` does not take (it wants protocol 2), or"
        " the file is a tar of torch before 0.1.10."
    )
    why = "It loads only with `weights_only=False`, which lets a file run code."
    mends = (
        "Nothing has to be done if you trust it; a new save with torch's default protocol mends it."
    )

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        for anomaly in subject.seen("opcodes-refused"):
            opcodes = [str(name) for name in anomaly.facts.get("opcodes", ())]
            words = f"torch.load(weights_only=True) does not take its opcodes: {few(opcodes)}"
            yield cls.finding(subject.place(anomaly.record), words, opcodes=opcodes)
        if subject.checkpoint.kind == "torch-legacy-tar":
            words = "torch.load(weights_only=True) does not take the legacy tar format"
            yield cls.finding(subject.place(), words)


class PickleTrailing(FileCheck):
    id = "TRU105"
    title = "Something follows the pickle"
    meaning = (
        "Bytes, or a second pickle, lie behind the end of the one that torch reads. Zeros and other"
        " bytes that are no pickle are a warning."
    )
    why = "Scanners that stop at the first end, or at the first error, miss what comes later."
    mends = "Do not load it before you know what that is."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        for anomaly in subject.seen("pickle-trailing"):
            facts = anomaly.facts
            words = f"{facts.get('length', 0):,} bytes follow the pickle's end"
            if names := [str(name) for name in facts.get("dangerous", ())]:
                words += f", and would run code: {few(names)}"
            elif facts.get("pickle"):
                words += ", and are another pickle"
            bad = bool(names) or bool(facts.get("pickle"))
            severity = None if bad else Severity.WARNING
            place = subject.place(anomaly.record)
            remedy = _do_not_load(subject)
            yield cls.finding(place, words, remedy, severity=severity, **_plain(anomaly))


class MisleadsScanners(FileCheck):
    id = "TRU106"
    title = "The archive misleads programs that check it"
    meaning = (
        "Names, flags or twins are set so that one program reads another record than the next: two"
        " records under one name, a name that differs between header and directory, a record marked"
        " as encrypted that is not."
    )
    why = "A scanner is shown one thing, torch loads another. A flipped bit can look the same."
    mends = "Do not load it before you know how that came about; resume from another step."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        for anomaly in subject.seen(*MISLEADING):
            if words := misleads(anomaly):
                place = subject.place(anomaly.record)
                yield cls.finding(place, words, _do_not_load(subject), **_plain(anomaly))


MISLEADING = ("encrypted", "header-mismatch", "duplicate-record", "case-twin-record")


def misleads(anomaly: Anomaly) -> str | None:
    """Words for an anomaly that hides content from programs which check it, or None."""
    record, field = anomaly.record or "", str(anomaly.facts.get("field", ""))
    if anomaly.code == "encrypted":
        return f"{record} is marked as encrypted, which torch ignores and scanners do not"
    if anomaly.code == "header-mismatch":
        if "name" in field:
            return f"{record} has another name in its own header"
        return f"{record} has other flags in its own header" if "flag" in field else None
    if record.lower().endswith(".pkl"):
        return f"{record} is there more than once, and programs differ in which one they read"
    return None


class HiddenPickle(FileCheck):
    id = "TRU107"
    severity = Severity.WARNING
    title = "A record that nothing refers to holds a pickle"
    meaning = (
        "A record that torch does not load as data holds a pickle. It is an error where loading"
        " that pickle would run code."
    )
    why = "Another loader, or a file renamed later, would run it."
    mends = "Do not unpack it; find out where the file came from."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        is_script = subject.checkpoint.kind == "torchscript"
        for anomaly in subject.seen("hidden-pickle"):
            if is_script and not anomaly.facts.get("dangerous"):
                continue  # its constants and line tables are pickles by design
            names = [str(name) for name in anomaly.facts.get("dangerous", ())]
            words = f"{anomaly.record} holds a pickle that nothing refers to"
            if names:
                words += f", and loading it would run code: {few(names)}"
            severity = Severity.ERROR if names else None
            place = subject.place(anomaly.record)
            remedy = _do_not_load(subject)
            yield cls.finding(place, words, remedy, severity=severity, **_plain(anomaly))


class WritableByOthers(FileCheck):
    id = "TRU108"
    severity = Severity.WARNING
    title = "Everybody may write here"
    meaning = "A file, or its directory, may be written by every user of the machine."
    why = "Anybody can replace a checkpoint by one that runs code when it is loaded."
    mends = "`chmod o-w` it."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        if subject.mode & stat.S_IWOTH:
            yield cls.at(subject.path, "the file may be written by everybody")

    @classmethod
    def look_at_directory(cls, subject: DirectorySubject) -> Iterator[Finding]:
        """The same for the directory itself; with the sticky bit others cannot replace files."""
        mode = subject.directory.mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield cls.at(subject.directory.path, "everybody may add and replace files here")
        pointer = subject.directory.pointer
        if pointer.mode is not None and pointer.mode & stat.S_IWOTH:
            yield cls.at(pointer.path, "everybody may make the pointer name another file")

    @classmethod
    def look_at_step(cls, path: str, shards: list[str]) -> Iterator[Finding]:
        """The same for a sharded step's directory, and for `shards`, the open ones, together."""
        mode = _mode(path)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield cls.at(path, "everybody may add and replace files here")
        if shards:
            words = f"{plural(len(shards), 'shard')} may be written by everybody: {few(shards)}"
            remedy = f"chmod -R o-w -- {quoted(path)}"
            yield cls.finding(Place(path), words, remedy, names=shards[:_MOST])

    @classmethod
    def at(cls, path: str, words: str) -> Finding:
        """The finding for a path."""
        return cls.finding(Place(path), words, f"chmod o-w -- {quoted(path)}")


def _mode(path: str) -> int:
    """The mode of what is no link; 0, which allows nothing, where there is nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return 0
    return 0 if stat.S_ISLNK(mode) else mode


class OddCharacters(FileCheck):
    id = "TRU109"
    severity = Severity.WARNING
    title = "Names hold characters that do not print"
    meaning = "A record's or tensor's name holds control characters or marks of writing direction."
    why = "Printed raw, they can move a terminal's cursor or make a name look like another."
    mends = "The tool prints them escaped; other programs may not."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        records = [
            str(anomaly.record)
            for anomaly in subject.seen("bad-record-name")
            if anomaly.facts.get("problem") == CONTROL_CHARACTERS
        ]
        tensors = [name for name in subject.checkpoint.tensors if not name.isprintable()]
        for kind, names in (("record", records), ("tensor", tensors)):
            if names:
                words = f"{plural(len(names), f'{kind} name')} with characters that do not print"
                remedy = "other programs may print them raw"
                yield cls.finding(subject.place(), f"{words}: {few(names)}", remedy)


CONTROL_CHARACTERS = "control characters"


class TorchScriptCode(FileCheck):
    id = "TRU110"
    severity = Severity.WARNING
    title = "It is a TorchScript archive and holds code"
    meaning = "The archive holds compiled code beside its tensors, for `torch.jit.load`."
    why = "Loading it brings code that the file chooses into the process."
    mends = "Load it only if you trust its source."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        if subject.checkpoint.kind == "torchscript":
            words = "a TorchScript archive: torch.jit.load would bring in the code that it holds"
            yield cls.finding(subject.place(), words, "load it only if you trust its source")


class NestedPickle(FileCheck):
    id = "TRU111"
    severity = Severity.WARNING
    title = "It loads another file from inside itself"
    meaning = "The pickle calls a loader on bytes that it carries along."
    why = (
        "What is in those bytes is loaded with `weights_only=False`, whatever the outer call says."
    )
    mends = "Load it only if you trust its source."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        inside = list(subject.seen("nested-pickle"))
        if not inside:
            return
        names = sorted({str(name) for item in inside for name in item.facts.get("dangerous", ())})
        words = f"loading it loads {plural(len(inside), 'pickle')} more from inside itself"
        unread = any(not item.facts.get("readable", True) for item in inside)
        if names:
            words += f", which would run code: {few(names)}"
        elif unread:
            words += ", which cannot be read here and so not be judged"
        bad = bool(names) or unread or subject.all_must_be_known
        facts = {"count": len(inside), "dangerous": names[:_MOST]}
        place, remedy = subject.place(inside[0].record), _do_not_load(subject)
        severity = Severity.ERROR if bad else None
        yield cls.finding(place, words, remedy, severity=severity, **facts)


def _plain(anomaly: Anomaly) -> dict[str, Any]:
    """An anomaly's facts fit for JSON."""
    facts: dict[str, Any] = {}
    for name, value in anomaly.facts.items():
        if isinstance(value, (list, tuple, set, frozenset)):
            facts[name] = [str(item)[:200] for item in list(value)[:_MOST]]
        elif isinstance(value, (str, int, float, type(None))):
            facts[name] = value
        else:
            facts[name] = str(value)[:200]
    return facts


CODES = frozenset(
    {
        *MISLEADING,
        "computed-calls",
        "dangerous-calls",
        "opcodes-refused",
        "pickle-trailing",
        "hidden-pickle",
        "nested-pickle",
    }
)

CHECKS: tuple[type[FileCheck], ...] = (
    DangerousGlobal,
    UnknownGlobal,
    BenignGlobals,
    RefusedProtocol,
    PickleTrailing,
    MisleadsScanners,
    HiddenPickle,
    WritableByOthers,
    OddCharacters,
    TorchScriptCode,
    NestedPickle,
)
