"""The mark that is written into a file that was put together from what was left of another."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpttool.mending.parts import WHOLE

if TYPE_CHECKING:
    from ckpttool.mending.plan import Mending


def mark_of(
    mending: Mending, missing: str, source: str | None, replaced: list[str], dropped: list[str]
) -> bytes:
    """The JSON of `model.mended`: the source's hash, what was done, with its proofs, and losses.

    `missing` and `source` are the options of `write_mended`, `replaced` and `dropped` what came of
    them.
    """
    import json

    from ckpttool.io.checksum import sha256_of

    records = [record for record in mending.records if record.state != WHOLE]
    document = {
        "schema_version": 1,
        "mended_by": "ckpttool",
        "source": {
            "file": os.path.basename(mending.path),
            "size": mending.size,
            "sha256": sha256_of(mending.reader),
        },
        "proof": mending.proof,
        "structure": mending.structure,
        "dangers": mending.dangers,
        "records": [
            {"name": record.name, "state": record.state, "proof": record.proof}
            for record in records
        ],
        "lost": [loss._asdict() for loss in mending.losses],
        "missing": missing,
        "from": source and os.path.basename(source),
        "replaced": replaced,
        "unproven": mending.unproven,
        "dropped": [*mending.dropped, *(item for item in dropped if item not in mending.dropped)],
    }
    return json.dumps(document, indent=1, default=str).encode()
