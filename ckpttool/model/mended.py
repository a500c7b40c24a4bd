"""The mark in a file that was put together from what was left of a damaged one.

A record `.ckpttool/mended.json`: which file it was made from (name, size, SHA-256), what was done,
with which proofs, and what was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError

if TYPE_CHECKING:
    from ckpttool.formats.container import Container

MARK_NAME = ".ckpttool/mended.json"
_MOST_BYTES = 64 << 20


def read_mark(container: Container | None) -> dict[str, Any] | None:
    """The mark of a file; None where there is none, or none that can be read. Never raises."""
    if container is None or MARK_NAME not in container.records:
        return None
    import json

    try:
        mark = json.loads(container.read(MARK_NAME, limit=_MOST_BYTES))
    except (FormatError, ValueError, RecursionError):
        return None
    return mark if isinstance(mark, dict) else None


def mark_words(mark: dict[str, Any]) -> str:
    """A mark in a sentence. It may say anything: it comes from the file."""
    source = mark.get("source")
    source = source if isinstance(source, dict) else {}
    words = f"put together by ckpttool mend from {source.get('file', '?')}"[:300]
    words += f" (SHA-256 {str(source.get('sha256', '?'))[:64]})"
    for key, what in (
        ("lost", "lost"),
        ("replaced", "taken from another file"),
        ("unproven", "not proven"),
        ("dropped", "left out"),
    ):
        items = mark.get(key)
        if isinstance(items, list) and items:
            words += f", {len(items):,} {what}"
    return words
