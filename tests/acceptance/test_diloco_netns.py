"""Four nodes in network namespaces of their own, slow and lossy links between them, an SFTP store."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import diloco_netns


@pytest.mark.slow
def test_kills_over_slow_and_lossy_links(tmp_path: Path) -> None:
    if (reason := diloco_netns.why_not()) is not None:
        pytest.skip(reason)
    kills, _, report = diloco_netns.run(tmp_path, diloco_netns.PLAN, 4)
    assert kills == 4
    assert (report["problems"], report["lost"], report["twice"]) == ([], [], [])
    rounds = diloco_netns.PLAN.rounds
    assert report["outer_steps"] == rounds and report["applied"] == 4 * rounds
    assert report["waiting"] == report["refused"] == report["differing_values"] == 0
