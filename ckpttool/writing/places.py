"""Where in the content something lies, in words: dotted, as tensors are named."""

from __future__ import annotations

from typing import Any

_LONGEST_PATH = 64
_LONGEST_LABEL = 200


class KeyLabel:
    """The place of a key itself, in a path."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def path_text(labels: list[Any]) -> str:
    """The dotted path of what lies at these labels; of a long one the beginning and the end."""
    if len(labels) > _LONGEST_PATH:
        half = _LONGEST_PATH // 2
        labels = [*labels[:half], "…", *labels[-half:]]
    return ".".join(_label(label)[:_LONGEST_LABEL] for label in labels if label != "")


def _label(label: Any) -> str:
    """One part of a path."""
    if isinstance(label, KeyLabel):
        return f"(key {type(label.key).__name__})"
    if isinstance(label, (str, float, bool)) or label is None:
        return str(label)
    if isinstance(label, int) and label.bit_length() < 256:
        return str(label)
    return f"({type(label).__name__})"
