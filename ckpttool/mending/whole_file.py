"""What the known SHA-256 of a whole file settles, and what stays in doubt without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.mending.parts import UNPROVEN, WHOLE
from ckpttool.mending.proofs import BY_SHA256
from ckpttool.model.mended import MARK_NAME

if TYPE_CHECKING:
    from ckpttool.mending.parts import Part
    from ckpttool.mending.plan import Mending

# Kinds whose records mean more than a pickle and its storages: only rewritten whole.
NOT_REBUILT = frozenset(("torchscript", "pt2", "dcp-shard", "npz"))


def settle_doubts(mending: Mending) -> None:
    """Compares the file to come with its known SHA-256, which proves all of it, or refutes it.

    Where it is not known, a content that merely fits is no proof: then the records do not go over
    as they are, since a file that looks untouched would claim more than anyone knows.
    """
    if mending.hopeless is not None or mending.healthy or not mending.rewrites:
        return
    parts = mending.parts.parts
    if mending.known_sha256 and not mending.loses:
        mending.has_known_sha256 = has_known_sha256(mending)
        if mending.has_known_sha256:
            _all_proven(mending, parts)
            return
    doubtful = [part.name for part in parts if "doubtful" in part.facts]
    mending.rewrites = not doubtful
    if doubtful:
        mending.notes.append(f"the mended file is marked inside as not proven ({MARK_NAME})")
    if doubtful and mending.kind in NOT_REBUILT:
        names = ", ".join(doubtful[:5])
        mending.hopeless = f"only a whole one of this kind can be written; {names}: not proven"


def has_known_sha256(mending: Mending) -> bool:
    """Whether the file, with its records as they are planned, would have its known SHA-256."""
    from ckpttool.mending.write import sha256_of_rewritten

    return sha256_of_rewritten(mending) == mending.known_sha256


def _all_proven(mending: Mending, parts: list[Part]) -> None:
    mending.unproven = []
    for part in parts:
        if part.state == UNPROVEN:
            part.state, part.proof = part.facts.pop("doubtful", WHOLE), BY_SHA256
