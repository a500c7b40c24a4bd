"""The text of a run: what is learned from, and what is held out to measure by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_core.demo.model import CharTransformer
from trainer_core.demo.text import VOCABULARY, encode, own_text

POSITIONS = 64
SHAPE = {"width": 64, "layers": 2, "heads": 4}
"""116,480 parameters: a step of 16 crops takes some 15 ms on one core."""

BLOCK = 4096
"""Characters: of every tenth block of the text nothing is learned."""
_WINDOWS = 256


class Split(NamedTuple):
    """Characters to learn from, and those that are held out; int64, [length] each."""

    training: torch.Tensor
    held_out: torch.Tensor


def split_text(path: Path | None = None) -> Split:
    """The text in a file, by default this project's own, without and with every tenth block."""
    if path is None:
        characters = own_text().characters
    else:
        characters = encode(path.read_text(encoding="utf-8", errors="replace"))
    blocks = torch.split(characters, BLOCK)
    training = [block for number, block in enumerate(blocks) if number % 10 != 9]
    held_out = [block for number, block in enumerate(blocks) if number % 10 == 9]
    if not held_out:
        words = f"a text of {len(characters)} characters is too short"
        raise ValueError(f"{words}: {10 * BLOCK} are needed")
    return Split(torch.cat(training), torch.cat(held_out))


def new_model(seed: int) -> CharTransformer:
    """The model, its weights drawn with this seed: the same on every node."""
    torch.manual_seed(seed)
    return CharTransformer(VOCABULARY, POSITIONS, **SHAPE)


@torch.no_grad()
def held_out_loss(
    model: CharTransformer, state: Mapping[str, Any], characters: torch.Tensor
) -> float:
    """The mean cross-entropy of a state dict, in nats a character, over windows spread evenly."""
    model.load_state_dict(state)
    model.eval()
    last = len(characters) - POSITIONS - 1
    starts = torch.linspace(0, last, min(_WINDOWS, last + 1)).long()
    windows = characters[starts[:, None] + torch.arange(POSITIONS + 1)]
    return float(model(windows[:, :-1], windows[:, 1:]))
