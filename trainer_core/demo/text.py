"""The text that the demo learns: this project's own documents and sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ckpttool

VOCABULARY = 96
"""A line break, the 94 printable characters of ASCII and the space. Fixed, so that a model still
fits after a document was edited."""

_DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


class Text(NamedTuple):
    """`characters`: int64, values below VOCABULARY. `files`: how many they are from."""

    characters: torch.Tensor
    files: int


def own_text(packages: Path | None = None) -> Text:
    """The documents beside the packages, where this is a working tree, and every Python source.

    `packages` is the folder that holds `trainer_core` and `ckpttool`, by default where they are
    imported from.
    """
    home = Path(ckpttool.__file__).parents[1] if packages is None else packages
    documents = [home / name for name in _DOCUMENTS] if (home / "pyproject.toml").is_file() else []
    sources = [
        path for name in ("trainer_core", "ckpttool") for path in (home / name).rglob("*.py")
    ]
    files = [path for path in [*documents, *sorted(sources)] if path.is_file()]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    return Text(encode(text), len(files))


def encode(text: str) -> torch.Tensor:
    """Characters to numbers: 0 for a line break, 1 to 95 for ASCII 32 to 126, `?` for the rest."""
    known = bytearray(text.replace("\t", " "), "ascii", "replace")
    codes = torch.frombuffer(known, dtype=torch.uint8).long()
    printable = (codes >= 32) & (codes <= 126)
    return torch.where(codes == 10, 0, torch.where(printable, codes - 31, ord("?") - 31))


class Crops:
    """An endless loader of random pieces of a text, drawn with torch's global generator.

    That generator is part of every checkpoint, and there is nothing else that a place in these data
    could be: `state_dict` says so.
    """

    def __init__(self, characters: torch.Tensor, *, batch: int, positions: int) -> None:
        if len(characters) <= positions:
            raise ValueError(f"a text of {len(characters)} characters is too short")
        self._characters = characters
        self._batch, self._positions = batch, positions

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of inputs and targets, [batch, positions] each."""
        offsets = torch.arange(self._positions + 1)
        while True:
            starts = torch.randint(len(self._characters) - self._positions, (self._batch, 1))
            crops = self._characters[starts + offsets]
            yield crops[:, :-1], crops[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what comes next hangs on the random numbers alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to go to."""
