"""The coordinator in full: where the pending upload stands, and which state dicts are copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpttool.cli.main import main
from ckpttool.model.coordinator_state import coordinator_facts
from ckpttool.model.pending_upload import pending_standing

JOB = {"step": 4, "base_outer_step": 2, "generation": 3, "delta": {}, "target_state": {}}


def section(**changes: Any) -> dict[str, Any]:
    plain = {"node_id": "w1", "role": "worker", "local_step": 6, "last_global_step": 2}
    more = {"last_uploaded_step": 2, "baseline_generation": 3, "pending_upload": JOB, "outer": None}
    return {**plain, **more, **changes}


def outer(step: int, *ledger: Any, **more: Any) -> dict[str, Any]:
    return {"outer_step": step, "processed_deltas": list(ledger), **more}


@pytest.mark.parametrize(
    ("state", "standing"),
    [
        (section(), "current"),
        (section(pending_upload=None), None),
        (section(pending_upload=7), None),
        (section(last_global_step=3), "behind"),
        (section(last_global_step=1), "unknown-base"),
        (section(last_global_step=1, outer=outer(2)), "current"),
        (section(outer=outer(5)), "behind"),
        (section(baseline_generation=4), "superseded"),
        (section(last_uploaded_step=4), "delivered"),
        (section(last_uploaded_step=None), "current"),
        (section(outer=outer(3, ["w1", 4, 2])), "applied"),
        (section(outer=outer(3, ["w1", 4, 1])), "behind"),
        (section(outer=outer(3, ["w2", 4, 2])), "behind"),
        (section(outer=outer(3, ("w1", 4, 2))), "applied"),
        (section(outer=outer(3, watermarks={"w1": 4})), "applied"),
        (section(outer=outer(3, watermarks={"w1": 3, "w2": 9})), "behind"),
        (section(outer=outer(3, None, ["w1"], "w142", watermarks=[4])), "behind"),
        (section(pending_upload={**JOB, "base_outer_step": None}), "unknown-base"),
        (section(pending_upload={**JOB, "base_outer_step": -1}, last_global_step=-1), "current"),
        (section(pending_upload={"step": "four"}), "unknown-base"),
        (section(pending_upload={**JOB, "generation": None}, node_id=None), "current"),
        ({"pending_upload": JOB}, "unknown-base"),
        (None, None),
    ],
)
def test_whether_a_pending_upload_can_still_be_applied(state: Any, standing: str | None) -> None:
    found = pending_standing(state)
    assert (found and found.state) == standing


def test_new_keys_are_shown_and_nothing_is_said_against_them() -> None:
    facts = coordinator_facts(section(fence=7, session="ab", since=3.5, secret_thing=[1], n=None))
    assert facts is not None
    known = {"fence": 7, "session": "ab", "since": 3.5, "secret_thing": "a list", "n": None}
    assert dict(facts.extra) == known
    assert json.loads(json.dumps(facts.as_dict()))["extra"] == known


@pytest.mark.parametrize(
    ("file", "copies", "standing"),
    [
        # Told apart from the code by torch: `torch.equal` of each pair in a process of its own.
        (
            "master/step_000000000002.pt",
            {("model", "pending_upload.target_state"), ("baseline", "outer.global_state")},
            "current",
        ),
        (
            "master/step_000000000006.pt",
            {("model", "baseline", "pending_upload.target_state")},
            "delivered",
        ),
        ("worker/step_000000000004.pt", None, None),
        ("pending/step_000000000006.pt", set(), "current"),
    ],
)
def test_real_files_are_shown_in_full(
    corpus: Path, file: str, copies: set[tuple[str, ...]] | None, standing: str | None
) -> None:
    path = corpus / "seed-runs" / file
    for verb in ("inspect", "verify"):
        done = CliRunner().invoke(main, [verb, str(path), "--json"], catch_exceptions=False)
        document = json.loads(done.stdout)
        found = (document["training"] if verb == "inspect" else document)["coordinator"]
        if copies is not None:
            assert {tuple(group) for group in found["copies"]} == copies
        assert (found["standing"] and found["standing"]["state"]) == standing
        shown = CliRunner().invoke(main, [verb, str(path)], catch_exceptions=False).stdout
        assert "identical" in shown or not found["copies"]
        assert ("byte for byte" in shown) == (verb == "verify" and bool(found["copies"]))
        assert f"node {found['node_id']}" in shown


def test_copies_are_what_torch_says_is_equal(corpus: Path) -> None:
    """All pairs of state dicts in all real files, compared by torch."""
    import torch

    from ckpttool.checks.verify import verify

    for path in sorted((corpus / "seed-runs").glob("*/step_*.pt")):
        report = verify(path)
        assert report.facts is not None
        if report.facts.coordinator is None:
            continue
        state = torch.load(path, weights_only=False)  # a file of this project's own corpus
        held = state["coordinator"]
        job, whole = held["pending_upload"] or {}, held["outer"] or {}
        parts = {
            "model": state["model"],
            "baseline": held["baseline"],
            "pending_upload.target_state": job.get("target_state"),
            "outer.global_state": whole.get("global_state"),
        }
        pairs = {
            (a, b)
            for a, one in parts.items()
            for b, other in parts.items()
            if a < b and one and other and all(torch.equal(one[n], other[n]) for n in one)
        }
        groups = report.facts.copies
        assert {(a, b) for group in groups for a in group for b in group if a < b} == pairs, path


def test_without_checksums_inspect_says_nothing_and_verify_compares(
    corpus: Path, tmp_path: Path
) -> None:
    """A file without checksums: nothing is proven by what is stored."""
    import torch

    source = corpus / "seed-runs" / "master" / "step_000000000006.pt"
    state = torch.load(source, weights_only=False)  # a file of this project's own corpus
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / source.name)
    finally:
        torch.serialization.set_crc32_options(before)
    shown = {}
    for verb in ("inspect", "verify"):
        done = CliRunner().invoke(main, [verb, str(tmp_path / source.name)], catch_exceptions=False)
        shown[verb] = done.stdout
    assert "identical" not in shown["inspect"]
    assert "identical" in shown["verify"]
