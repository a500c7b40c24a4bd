"""Names on disk: steps, the pointer, temporaries. Shared by the tool and the training core."""

from __future__ import annotations

import re

from ckpttool.io.durable import Temporary, parse_temporary_name, temporary_name
from ckpttool.io.lock_holder import LOCK_NAME

__all__ = [
    "LOCK_NAME",
    "MANIFEST_NAME",
    "POINTER_NAME",
    "QUARANTINE_NAME",
    "STEP_DIGITS",
    "Temporary",
    "parse_step_directory_name",
    "parse_step_file_name",
    "parse_step_name",
    "parse_temporary_name",
    "step_directory_name",
    "step_file_name",
    "step_name_like",
    "temporary_name",
]

POINTER_NAME = "latest.json"
MANIFEST_NAME = "manifest.jsonl"
QUARANTINE_NAME = ".quarantine"
STEP_DIGITS = 12

_STEP_DIRECTORY = re.compile(rf"step_([0-9]{{{STEP_DIGITS}}})\Z")
_STEP_FILE = re.compile(r"step_([0-9]+)\.pt\Z")


def step_file_name(step: int) -> str:
    """The name of a step file: `step_000000000004.pt` for 4. Raises ValueError below 0."""
    if step < 0:
        raise ValueError(f"a step cannot be negative: {step}")
    return f"step_{step:0{STEP_DIGITS}d}.pt"


def has_full_width(name: str) -> bool:
    """Whether a step file's name has all twelve digits: of two names for a step, this is meant."""
    return name in _full_names(parse_step_name(name))


def _full_names(step: int | None) -> tuple[str, ...]:
    return () if step is None else (step_file_name(step), step_directory_name(step))


def parse_step_file_name(name: str) -> int | None:
    """The step in a step file's name, or None. Any width of ASCII digits counts (`step_4.pt`)."""
    match = _STEP_FILE.match(name)
    # A number of thousands of digits is nobody's step, and costly to convert.
    return int(match[1]) if match and len(match[1]) <= 18 else None


def step_directory_name(step: int) -> str:
    """The name of a sharded step's directory: `step_000000000004` for 4.

    Raises ValueError below 0.
    """
    return step_file_name(step).removesuffix(".pt")


def parse_step_directory_name(name: str) -> int | None:
    """The step in the name of a sharded step's directory, which has all twelve digits, or None."""
    match = _STEP_DIRECTORY.match(name)
    return int(match[1]) if match else None


def parse_step_name(name: str) -> int | None:
    """The step in the name of a step file or of a sharded step's directory, or None."""
    step = parse_step_file_name(name)
    return parse_step_directory_name(name) if step is None else step


def step_name_like(name: str, step: int) -> str:
    """The name that a step of the same kind as `name`, file or directory, has for `step`."""
    is_directory = parse_step_directory_name(name) is not None
    return step_directory_name(step) if is_directory else step_file_name(step)
