"""What becomes of a pending upload: whether the base that it was measured from can still be used.

Only what stands in the file is asked; what the shared store holds by now, no file knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckpttool.model.inert import integer


class Standing(NamedTuple):
    """`state` is one of the following; `words` say why.

    `applied`: the outer state has it already. `delivered`: this node has uploaded it. `current`:
    its base is the newest outer step that is known here. `behind`: a newer one is known, so a run's
    limit on staleness decides. `superseded`: the baseline has been replaced since it was measured.
    `unknown-base`: it is measured from an outer step that is not known here, or does not say from
    which.
    """

    state: str
    words: str


def pending_standing(section: Any) -> Standing | None:
    """The standing of a coordinator section's pending upload; None where there is none."""
    job = section.get("pending_upload") if isinstance(section, dict) else None
    if not isinstance(job, dict):
        return None
    outer = section.get("outer")
    step, base = integer(job.get("step")), integer(job.get("base_outer_step"))
    if where := _applied(section.get("node_id"), step, base, outer):
        return Standing("applied", f"applied already: {where}")
    uploaded = integer(section.get("last_uploaded_step"))
    if step is not None and uploaded is not None and uploaded >= step:
        words = "delivered already; whether it was applied, only the shared store knows"
        return Standing("delivered", words)
    newest = _newest(section, outer)
    if base is None:
        return Standing("unknown-base", "it does not say on which outer step it is based")
    if base > newest:
        words = f"cannot be applied as far as known here: outer step {base} is not known"
        return Standing("unknown-base", words)
    generation = integer(job.get("generation"))
    current = integer(section.get("baseline_generation"))
    if generation is not None and current is not None and generation != current:
        words = f"measured from baseline generation {generation}, which {current} has replaced"
        return Standing("superseded", f"{words}; {_distance(base, newest)}")
    state = "current" if base == newest else "behind"
    return Standing(state, _distance(base, newest))


def _newest(section: dict[Any, Any], outer: Any) -> int:
    known = [integer(section.get("last_global_step"))]
    if isinstance(outer, dict):
        known.append(integer(outer.get("outer_step")))
    return max((number for number in known if number is not None), default=-1)


def _distance(base: int, newest: int) -> str:
    if base == newest:
        return "can be applied: its base is the newest outer step that is known here"
    behind = newest - base
    steps = "step" if behind == 1 else "steps"
    return f"its base is {behind:,} outer {steps} behind: applied where the run's limit allows that"


def _applied(node: Any, step: int | None, base: int | None, outer: Any) -> str | None:
    """Where the outer state says that it was applied; None where it does not."""
    if not isinstance(outer, dict) or not isinstance(node, str) or step is None:
        return None
    ledger = outer.get("processed_deltas")
    entries = ledger if isinstance(ledger, (list, tuple)) else ()
    if any(_is_it(entry, node, step, base) for entry in entries):
        return "the outer state's ledger lists it"
    marks = outer.get("watermarks")
    mark = integer(marks.get(node)) if isinstance(marks, dict) else None
    if mark is not None and mark >= step:
        return f"the outer state has what this node did up to step {mark:,}"
    return None


def _is_it(entry: Any, node: str, step: int, base: int | None) -> bool:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        return False
    return entry[0] == node and integer(entry[1]) == step and integer(entry[2]) == base
