"""Bounds under which untrusted bytes are read; passing one is a finding, not a crash."""

from __future__ import annotations

from typing import NamedTuple


class ReaderLimits(NamedTuple):
    """How much work and memory one file may cost the reader. Immutable; `_replace` makes variants.

    `pickle_bytes`: size of one pickle stream, in bytes. `opcodes`: pickle opcodes executed.
    `memo_entries`: objects remembered by a pickle. `depth`: nesting of the tree where it is walked.
    `inflated_bytes`: bytes really produced when one compressed record is read (not the size that
    its header announces). `records`: members of one container. `integer_bytes`: length of one
    integer in a pickle (its decimal form costs quadratic time).
    """

    pickle_bytes: int = 1 << 29
    opcodes: int = 50_000_000
    memo_entries: int = 50_000_000
    depth: int = 1_000
    inflated_bytes: int = 1 << 30
    records: int = 10_000_000
    integer_bytes: int = 1 << 10


DEFAULT_LIMITS = ReaderLimits()
