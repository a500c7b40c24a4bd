"""What `inspect` shows of one file."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckpttool.checks.base import plural
from ckpttool.model.mended import mark_words
from ckpttool.render.report import show_findings
from ckpttool.render.text import escape, shorten_middle, size_text
from ckpttool.render.words import (
    GENERATIONS,
    RUNS_CODE,
    coordinator_words,
    counters_words,
    load_words,
    precision_words,
    shape_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpttool.findings import Finding
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.schema import TrainingFacts
    from ckpttool.model.sharded_metadata import ShardedTensor
    from ckpttool.model.tensor import TensorRef
    from ckpttool.render.text import Printer

Named = TypeVar("Named", "TensorRef", "ShardedTensor")

_CONFIG_WIDTH = 400
_MOST_FINDINGS = 5
_MOST_SECTIONS = 40


class Wanted(NamedTuple):
    """Which lists were asked for; `tensors` is a pattern, or None."""

    tensors: str | None = None
    tree: bool = False
    records: bool = False
    globals: bool = False

    @property
    def any(self) -> bool:
        """Whether any list was asked for."""
        return self.tensors is not None or self.tree or self.records or self.globals


def show_file(
    printer: Printer,
    checkpoint: Checkpoint,
    facts: TrainingFacts,
    findings: list[Finding],
    wanted: Wanted,
    verify_command: str,
) -> None:
    """Prints the page of a file: the summary, or the lists that were asked for."""
    if wanted.any:
        _show_lists(printer, checkpoint, wanted)
    else:
        _show_summary(printer, checkpoint, facts)
    show_wrong(printer, findings, verify_command)


def _show_summary(printer: Printer, checkpoint: Checkpoint, facts: TrainingFacts) -> None:
    printer.line(printer.colour(escape(checkpoint.path), "bold"))
    printer.facts(_file_facts(checkpoint, facts.is_training), indent="  ")
    if facts.is_training:
        printer.heading("training")
        printer.facts(training_lines(facts), indent="  ")
    if facts.coordinator is not None:
        printer.heading("coordinator")
        printer.facts(coordinator_words(facts.coordinator, facts.copies), indent="  ")
    if checkpoint.sections:
        printer.heading("sections")
        _show_sections(printer, checkpoint)
    if checkpoint.globals:
        printer.heading("globals")
        _show_trust(printer, checkpoint)


def _file_facts(checkpoint: Checkpoint, is_training: bool) -> Iterator[tuple[str, str]]:
    training = "a training checkpoint: " if is_training else ""
    yield "kind", training + escape(checkpoint.words)
    yield "size", f"{checkpoint.size:,} bytes ({size_text(checkpoint.size)})"
    yield "format", GENERATIONS.get(checkpoint.kind, "")
    if checkpoint.mended is not None:
        yield "mended", escape(mark_words(checkpoint.mended))
    if checkpoint.container is not None:
        yield "container", _container_words(checkpoint)
    if checkpoint.readable and (checkpoint.container is not None or checkpoint.tensors):
        yield "tensors", _tensor_words(checkpoint)
    if checkpoint.readable:
        yield "load", load_words(checkpoint)


def _container_words(checkpoint: Checkpoint) -> str:
    container = checkpoint.container
    assert container is not None
    parts = [plural(len(container.entries), "record")]
    if container.prefix:
        parts.append(f"root folder {escape(container.prefix)}/")
    for fact, label in (("version", "version"), ("protocol_version", "protocol version")):
        if container.facts.get(fact) is not None:
            parts.append(f"{label} {escape(str(container.facts[fact]))}")
    parts.append(f"{container.byteorder}-endian")
    parts.append("checksums stored" if container.has_checksums else "no checksums stored")
    return ", ".join(parts)


def _tensor_words(checkpoint: Checkpoint) -> str:
    count = plural(len(checkpoint.tensors), "tensor")
    if not checkpoint.storages:
        return count
    stored, used = checkpoint.stored_bytes, checkpoint.used_bytes
    words = f"{count} in {plural(len(checkpoint.storages), 'storage')}"
    words += f"; {size_text(stored)} stored, {size_text(used)} used"
    if 0 < used < stored:
        words += f" ({100 * (stored - used) / stored:.0f} % of the bytes belong to no tensor)"
    return words


def training_lines(facts: TrainingFacts) -> Iterator[tuple[str, str]]:
    """What the training schema's sections say, as labelled lines."""
    yield "counters", counters_words(facts)
    if facts.precision is not None:
        yield "precision", precision_words(facts.precision)
    if facts.optimizer is not None:
        yield "optimizer", escape(facts.optimizer.line())
    yield (
        "scheduler",
        escape(facts.scheduler.line()) if facts.scheduler else _absent(facts, "scheduler"),
    )
    yield "rng", ", ".join(map(escape, facts.rng)) or _absent(facts, "rng")
    yield "coordinator", "" if facts.coordinator else _absent(facts, "coordinator")
    yield "config", "" if "config" in facts.missing else _config_words(facts.config)
    if facts.missing:
        yield "missing", ", ".join(facts.missing)
    if facts.extra:
        yield "other keys", ", ".join(escape(shorten_middle(str(k), 60)) for k in facts.extra[:20])


def _absent(facts: TrainingFacts, key: str) -> str:
    return "" if key in facts.missing else "none"


def _config_words(config: Any) -> str:
    if config is None:
        return "none"
    from ckpttool.model.secrets import is_secret_key
    from ckpttool.render.tree import JsonTree

    parts: list[str] = []
    room = _CONFIG_WIDTH

    def write(text: str) -> None:
        nonlocal room
        parts.append(text[:room])
        room -= len(text)
        if room < 0:
            raise _FullError

    try:
        JsonTree(write, {}, hide=is_secret_key).value(config)
    except _FullError:
        parts.append("… (--tree shows all)")
    return "".join(parts)


class _FullError(Exception):
    """As much of a config as there is room for has been written; never leaves this module."""


def _show_sections(printer: Printer, checkpoint: Checkpoint) -> None:
    rows = [
        (
            escape(section.name),
            escape(section.type),
            f"{section.tensors:,}" if section.tensors else "",
            size_text(section.nbytes) if section.tensors else "",
        )
        for section in islice(checkpoint.sections.values(), _MOST_SECTIONS)
    ]
    columns(printer, ("section", "type", "tensors", "bytes"), rows, right=(2, 3), indent="  ")
    if len(checkpoint.sections) > _MOST_SECTIONS:
        more = len(checkpoint.sections) - _MOST_SECTIONS
        printer.line(f"  and {more:,} more (--tensors and --tree show all)")


def _show_trust(printer: Printer, checkpoint: Checkpoint) -> None:
    classes: dict[str, list[str]] = {}
    for use in checkpoint.globals:
        classes.setdefault(use.trust.value, []).append(f"{use.module}.{use.name}")
    colours = {"dangerous": "error", "unknown": "warning"}
    for trust in ("dangerous", "unknown", "benign", "torch-safe"):
        names = classes.get(trust, [])
        if names:
            label = printer.colour(trust, colours[trust]) if trust in colours else trust
            label += " " * (10 - len(trust))
            shown = ", ".join(map(escape, names[:8]))
            more = f" and {len(names) - 8} more (--globals)" if len(names) > 8 else ""
            printer.wrapped(shown + more, first=f"  {label}  ", rest=" " * 14)
    if "dangerous" in classes:
        printer.line(f"  {RUNS_CODE}")


def show_wrong(printer: Printer, findings: list[Finding], verify_command: str) -> None:
    """Findings from warnings on, the worst first, and the command that tells more."""
    told = sorted(
        (finding for finding in findings if finding.severity.rank > 0),
        key=lambda finding: -finding.severity.rank,
    )
    if told:
        printer.heading("wrong at a glance")
        show_findings(printer, told[:_MOST_FINDINGS])
        if len(told) > _MOST_FINDINGS:
            printer.line(f"  and {len(told) - _MOST_FINDINGS:,} more")
        printer.line(f"  run: {escape(verify_command)}")


def _show_lists(printer: Printer, checkpoint: Checkpoint, wanted: Wanted) -> None:
    if wanted.globals:
        _list_globals(printer, checkpoint)
    if wanted.records:
        _list_records(printer, checkpoint)
    if wanted.tensors is not None:
        _list_tensors(printer, matching(checkpoint, wanted.tensors))
    if wanted.tree:
        from ckpttool.render.tree import TextTree

        TextTree(printer.line).show("", checkpoint.tree)


def matching(checkpoint: Checkpoint, pattern: str) -> list[TensorRef]:
    """The tensors whose names fit a shell pattern (`model.*`); letter case counts."""
    return named_like(pattern, checkpoint.tensors.values())


def named_like(pattern: str, tensors: Iterable[Named]) -> list[Named]:
    """Those whose `name` fits a shell pattern."""
    if pattern == "*":
        return list(tensors)
    from fnmatch import translate
    from re import compile as compile_pattern

    fits = compile_pattern(translate(pattern)).match
    return [tensor for tensor in tensors if fits(tensor.name)]


def _list_tensors(printer: Printer, tensors: Iterable[TensorRef]) -> None:
    rows = [
        (
            escape(tensor.name),
            tensor.dtype if tensor.layout == "strided" else f"{tensor.layout} {tensor.dtype}",
            shape_text(tensor.shape),
            escape(tensor.device or ""),
            escape(tensor.storage or ""),
            size_text(tensor.nbytes),
        )
        for tensor in tensors
    ]
    columns(printer, ("name", "dtype", "shape", "device", "storage", "bytes"), rows)


def _list_records(printer: Printer, checkpoint: Checkpoint) -> None:
    container = checkpoint.container
    if container is None:
        return
    methods = {0: "stored", 8: "deflated"}
    rows = [
        (
            escape(record.name),
            f"{record.size:,}",
            methods.get(record.method, f"method {record.method}"),
            "" if record.crc is None else f"{record.crc:08x}",
            f"{record.header_offset:,}",
        )
        for record in container.entries
    ]
    columns(printer, ("record", "bytes", "kept", "crc32", "offset"), rows)


def _list_globals(printer: Printer, checkpoint: Checkpoint) -> None:
    rows = [
        (
            use.trust.value,
            escape(f"{use.module}.{use.name}"),
            "called" if use.called else "named",
        )
        for use in checkpoint.globals
    ]
    columns(printer, ("trust", "global", "how"), rows)


def columns(
    printer: Printer,
    headers: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *,
    right: tuple[int, ...] = (),
    indent: str = "",
) -> None:
    """A plain list in columns, the widest shortened where a terminal is too narrow.

    Not a `table`: such a list may have a hundred thousand lines, over which `tabulate` takes
    seconds, and its import costs as much as reading a whole file.
    """
    lines = [headers, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if printer.width is not None:
        excess = len(indent) + sum(widths) + 2 * (len(widths) - 1) - printer.width
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] = max(widths[widest] - max(excess, 0), 12)
        lines = [
            tuple(shorten_middle(c, w) for c, w in zip(line, widths, strict=True)) for line in lines
        ]
    sides = [">" if i in right else "<" for i in range(len(widths))]
    layout = indent + "  ".join(f"{{:{s}{w}}}" for s, w in zip(sides, widths, strict=True))
    for line in lines:
        printer.line(layout.format(*line).rstrip())
