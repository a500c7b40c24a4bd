"""SCH: what a training checkpoint should hold, and where its parts contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.checks.base import (
    Check,
    DirectoryCheck,
    DirectorySubject,
    FileCheck,
    FileSubject,
    few,
    plural,
)
from ckpttool.findings import Finding, Place, Severity
from ckpttool.model.inert import what

_RESUME_EARLIER = "resume from another step, or save this one again"


class SchemaCheck(FileCheck):
    """A check that turns the anomalies with `code` into findings, one each."""

    code = ""

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        for anomaly in subject.seen(cls.code):
            key = str(anomaly.facts["key"])
            words = cls.words(key, anomaly.facts)
            place = subject.place(key=key)
            yield cls.finding(place, words, cls.remedy(subject), **anomaly.facts)

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        """The sentence for one anomaly."""
        return f"{key} {facts['problem']}"

    @classmethod
    def remedy(cls, subject: FileSubject) -> str | None:
        """What to do about it."""
        return _RESUME_EARLIER


class NotATrainingCheckpoint(FileCheck):
    id = "SCH101"
    title = "Not a training checkpoint"
    meaning = (
        "The file is readable, but holds no dictionary with an integer step. For a file that is not"
        " named like a step file this is an info: it is judged by its container and trust alone."
    )
    why = "Training cannot resume from it."
    mends = "Put the right file in its place, or give this one another name."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        facts, tree = subject.facts, subject.checkpoint.tree
        if any(subject.seen("other-kind")):
            return  # that says it already
        if not subject.checkpoint.readable:
            return
        if subject.step is None and not facts.follows_schema:
            words = f"{_held(tree)}: judged by its container and trust alone"
            yield cls.finding(subject.place(), words, severity=Severity.INFO)
        elif subject.step is not None and "step" not in facts.present:  # else it is SCH105
            words = f"not a training checkpoint: {_held(tree)}"
            yield cls.finding(subject.place(), words, "put the right file in its place")


def _held(tree: Any) -> str:
    if not isinstance(tree, dict):
        return f"it holds {what(tree)}"
    if "step" not in tree:
        return "it holds a dictionary without a step"
    return "it holds a dictionary of another layout than a training checkpoint's"


class StepDiffersFromName(FileCheck):
    id = "SCH102"
    title = "The step in the file is not the step in its name"
    meaning = "The file was renamed, or copied over another step."
    why = "It would load as if it were the step in its name, with counters and schedule off."
    mends = "Rename it to the step that it holds, if that name is free; `ckpttool repair` does."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        held = subject.facts.step
        if subject.step is None or held is None or held == subject.step:
            return
        words = f"the file holds step {held}, its name says step {subject.step}"
        place = subject.place(key="step")
        remedy = _rename(subject.path, held)
        yield cls.finding(place, words, remedy, step=held, name_step=subject.step)


def _rename(path: str, step: int) -> str:
    import os

    from ckpttool.checks.base import quoted
    from ckpttool.model.names import step_file_name

    if step < 0:
        return "put the right file in its place"
    right = os.path.join(os.path.dirname(path), step_file_name(step))
    if os.path.lexists(right):
        return f"move it away: {os.path.basename(right)} is there already"
    return f"mv -n -- {quoted(path)} {quoted(right)}"


class ModelMissing(SchemaCheck):
    id = "SCH103"
    code = "schema-model-missing"
    title = "The model is missing"
    meaning = "The checkpoint has no `model` section."
    why = "There are no weights to resume from; a loader finds out only in the middle of resuming."
    mends = "Resume from another step."

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        return "the model section is missing"


class SectionsMissing(SchemaCheck):
    id = "SCH104"
    severity = Severity.WARNING
    code = "schema-sections-missing"
    title = "Sections are missing"
    meaning = "Keys of the training schema other than the model are not there."
    why = "What they would restore (optimizer, random numbers, counters, …) starts anew on resume."
    mends = "Nothing, if the writer never saved them; else resume from another step."

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        return f"missing: {', '.join(facts['keys'])}"

    @classmethod
    def remedy(cls, subject: FileSubject) -> str | None:
        return "nothing, if their writer never saved them"


class CounterWrong(SchemaCheck):
    id = "SCH105"
    code = "schema-counter"
    title = "A counter is not a number from 0 up"
    meaning = "`step`, `samples` or `tokens` is of another type, or negative."
    why = "Resuming fails, or schedules and logs go wrong from there on."
    mends = "Resume from another step."


class CountersFall(DirectoryCheck):
    id = "SCH106"
    severity = Severity.WARNING
    title = "A counter falls as steps rise"
    meaning = "A later step has seen fewer samples or tokens than an earlier one in the directory."
    why = "The directory mixes two runs, or a run was resumed without its counters."
    mends = "Keep each run in a directory of its own."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        for counter in ("samples", "tokens"):
            yield from cls._look_at(subject, counter)

    @classmethod
    def _look_at(cls, subject: DirectorySubject, counter: str) -> Iterator[Finding]:
        before: tuple[int, int] | None = None
        for item in subject.examined:
            number = getattr(item.facts, counter, None)
            if number is None or item.verdict.state not in ("valid", "dangerous"):
                continue
            if before is not None and number < before[1]:
                words = f"{counter} falls from {before[1]:,} at step {before[0]} to {number:,}"
                place = Place(item.entry.path, key=counter)
                remedy = "keep each run in a directory of its own"
                yield cls.finding(place, words, remedy, earlier_step=before[0], earlier=before[1])
            before = (item.entry.step, number)


class RngMalformed(SchemaCheck):
    id = "SCH107"
    code = "schema-rng-malformed"
    title = "A random number state is malformed"
    meaning = "A part of `rng` is not the state of a generator."
    why = "It is not restored, and the resumed run draws other numbers than it would have."
    mends = "Resume from another step if the run has to be reproducible."


class RngMissing(SchemaCheck):
    id = "SCH108"
    severity = Severity.WARNING
    code = "schema-rng-missing"
    title = "A random number state is missing"
    meaning = "`rng` lacks the state of Python's or torch's generator, which every machine has."
    why = "That generator goes on from wherever it is, so the resumed run is not the same one."
    mends = "Resume from another step if the run has to be reproducible."

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        return f"rng has no state of {' and '.join(facts['parts'])}"


class CoordinatorIncoherent(SchemaCheck):
    id = "SCH109"
    code = "schema-coordinator"
    title = "The coordinator's state contradicts itself"
    meaning = (
        "A part of `coordinator` is of the wrong type, is of another step, or does not cover the"
        " model's tensors with the right shapes and types."
    )
    why = "The outer loop would send a wrong delta, or refuse to start."
    mends = "Resume from another step."


class PendingDeltaDiffers(SchemaCheck):
    """Only where checksums are looked at: the values of three tensors for each key are read."""

    id = "SCH110"
    code = "schema-pending-delta"
    title = "The pending delta is not what it should be"
    meaning = (
        "`pending_upload.delta` differs from `baseline - target_state`, although the baseline is"
        " still the one that it was measured from."
    )
    why = "Sending it would move the global model by something that no training step computed."
    mends = "Resume from another step; do not deliver this upload."

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        names = facts["tensors"]
        count = plural(len(names), "tensor")
        return f"the pending delta is not baseline - target_state in {count}: {few(names)}"


class SectionMalformed(SchemaCheck):
    id = "SCH111"
    code = "schema-section"
    title = "A section is of the wrong type"
    meaning = "`model`, `scaler` or `scheduler` is not the state dict that it should be."
    why = "Resuming from it fails."
    mends = "Resume from another step."


class PrecisionMalformed(SchemaCheck):
    id = "SCH112"
    severity = Severity.WARNING
    code = "schema-precision"
    title = "The precision plan is malformed"
    meaning = "`precision` lacks its mode or one of its two switches, or they are of another type."
    why = "Nobody can tell in which precision the run was trained."
    mends = "Nothing has to be done: resuming does not read it back."

    @classmethod
    def remedy(cls, subject: FileSubject) -> str | None:
        return "nothing has to be done: resuming does not read it back"


class OptimizerIncoherent(SchemaCheck):
    id = "SCH113"
    code = "schema-optimizer"
    title = "The optimizer's state contradicts itself"
    meaning = (
        "`optimizer` has no list of parameter groups, or holds state of parameters that no group"
        " lists. An empty state is fine."
    )
    why = "Loading it fails, or drops momenta in silence."
    mends = "Resume from another step."


class ScalerMissing(SchemaCheck):
    id = "SCH114"
    severity = Severity.WARNING
    code = "schema-scaler-missing"
    title = "The loss scaler's state is missing"
    meaning = "The precision plan says that a loss scaler was in use, but `scaler` is None."
    why = "The scale starts anew on resume; the first steps after it overflow and are skipped."
    mends = "Nothing, if a few skipped steps do not matter; else resume from another step."

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        return "precision.use_scaler is True, but there is no scaler state"

    @classmethod
    def remedy(cls, subject: FileSubject) -> str | None:
        return "nothing, if a few skipped steps do not matter"


class SecretsInConfig(SchemaCheck):
    id = "SCH115"
    severity = Severity.WARNING
    code = "schema-secrets"
    title = "The config holds secrets"
    meaning = "A key of `config` is named like a secret, and its value was not redacted."
    why = "Whoever gets the checkpoint gets the secret. The tool never prints the value."
    mends = "Revoke the secret if the file was shared; redact the config before saving."

    @classmethod
    def words(cls, key: str, facts: dict[str, Any]) -> str:
        return f"not redacted: {few(facts['keys'])}"

    @classmethod
    def remedy(cls, subject: FileSubject) -> str | None:
        return "do not share the file; revoke what was shared already"


FROM_ANOMALIES: tuple[type[SchemaCheck], ...] = (
    ModelMissing,
    SectionsMissing,
    CounterWrong,
    RngMalformed,
    RngMissing,
    CoordinatorIncoherent,
    PendingDeltaDiffers,
    SectionMalformed,
    PrecisionMalformed,
    OptimizerIncoherent,
    ScalerMissing,
    SecretsInConfig,
)
FILE_CHECKS: tuple[type[FileCheck], ...] = (
    NotATrainingCheckpoint,
    StepDiffersFromName,
    *FROM_ANOMALIES,
)
DIRECTORY_CHECKS: tuple[type[DirectoryCheck], ...] = (CountersFall,)
CHECKS: tuple[type[Check], ...] = (*FILE_CHECKS, *DIRECTORY_CHECKS)
