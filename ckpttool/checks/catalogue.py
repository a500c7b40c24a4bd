"""The catalogue: every finding id, what it means, why it matters and what mends it.

An entry is the check's own class: `id`, `severity`, `title`, `meaning`, `why`, `mends`.
"""

from __future__ import annotations

from ckpttool.checks import (
    books,
    container,
    directory,
    pointer,
    schema,
    sharded,
    sharded_places,
    trust,
    values,
)
from ckpttool.checks.base import Check

FAMILIES = {
    "PTR": "pointer",
    "FIL": "file and container",
    "SCH": "training schema",
    "SHD": "sharded steps",
    "TRU": "trust",
    "DIR": "directory",
    "VAL": "tensor values",
}

CATALOGUE: dict[str, type[Check]] = {
    check.id: check
    for family in (
        *(pointer, container, schema, sharded, sharded_places, trust, directory, books, values),
    )
    for check in family.CHECKS
}


def entry(id: str) -> type[Check] | None:
    """The entry for a finding id, in whatever case it is written; None if there is none."""
    return CATALOGUE.get(id.strip().upper())
