"""Who is waited for, where a rank stands still: by posts alone, then by processes that do."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.trainer_core.site.test_site import HERE, run
from trainer_core.site.waiting import VARIABLE, Waiting, seconds_to_wait


class Rank:
    """One of three, whose step and exchanges, and whose clock, are the test's."""

    def __init__(self, number: int, store: Any, now: Callable[[], float]) -> None:
        self.step, self.begun, self.is_stopped = 7, {"0": 40, "1": 12}, False
        self.logger = logging.getLogger(f"rank {number}")
        self.waiting = Waiting(number, 3, self, store, 60.0, clock=now, begun=lambda: self.begun)


class Ranks:
    def __init__(self) -> None:
        self.now = 0.0
        store = dist.HashStore()
        self.each = [Rank(number, store, lambda: self.now) for number in range(3)]

    def go(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for rank in self.each:
                if not rank.is_stopped:
                    rank.waiting.exchange()
                    rank.waiting.tick()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.name, record.getMessage()) for record in caplog.records]


def test_a_rank_that_has_begun_fewer_exchanges_is_waited_for_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks()
    ranks.go(5)
    ranks.each[0].begun = {"0": 41, "1": 12}
    ranks.each[2].begun = {"0": 41, "1": 12}
    ranks.go(58)
    assert lines(caplog) == []
    ranks.go(3000)
    words = (
        "waiting for rank 1, which was last heard of after step 7 (its process is alive); nothing "
        "has moved here for 60 s"
    )
    assert lines(caplog) == [("rank 0", words), ("rank 2", words)]
    ranks.each[1].begun = ranks.each[0].begun = ranks.each[2].begun = {"0": 42, "1": 12}
    caplog.clear()
    ranks.go(1)
    assert [name for name, _ in lines(caplog)] == ["rank 0", "rank 2"]
    assert lines(caplog)[0][1].startswith("going on after 30")


def test_a_process_that_is_stopped_is_said_to_be_silent(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    ranks.go(20)
    ranks.each[1].is_stopped = True
    for rank in (ranks.each[0], ranks.each[2]):
        rank.step, rank.begun = 9, {"0": 55, "1": 14}
    ranks.go(200)
    words = (
        "waiting for rank 1, which was last heard of after step 7 (of its process nothing is "
        "heard); nothing has moved here for 60 s"
    )
    assert lines(caplog) == [("rank 0", words), ("rank 2", words)]


def test_where_all_are_at_work_or_nobody_stands_still_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks()
    ranks.go(1000)  # one long step of all
    for step in range(100):
        for number, rank in enumerate(ranks.each):  # one is behind, and comes
            rank.step, rank.begun = step, {"0": step + number, "1": 3}
        ranks.go(50)
    assert lines(caplog) == []


def test_a_store_that_does_not_answer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Where rank 0 keeps it, and is stopped."""
    ranks = Ranks()
    ranks.go(5)
    for _ in range(100):
        ranks.now += 1.0
        ranks.each[2].waiting.tick()
    ((name, words),) = lines(caplog)
    assert name == "rank 2" and words.startswith("waiting, and the store over which the ranks")


def test_many_are_named_in_short(caplog: pytest.LogCaptureFixture) -> None:
    now, store = [0.0], dist.HashStore()
    one = Rank(0, store, lambda: now[0])
    waiting = Waiting(0, 9, one, store, 60.0, clock=lambda: now[0], begun=lambda: one.begun)
    for rank in range(1, 8):  # rank 8 was never heard of
        store.set(f"at-{rank}", json.dumps([4, rank, {"0": 39}]))
    for _ in range(70):
        now[0] += 1.0
        waiting.exchange()
        waiting.tick()
    ((_, words),) = lines(caplog)
    assert words.startswith("waiting for rank 1, which was last heard of after step 1 (of its ")
    assert "; rank 3, which was" in words and "rank 4" not in words and "; and 4 more;" in words


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf"])
def test_an_option_that_is_no_time(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE} must be a number of seconds above 0"):
        seconds_to_wait()
    monkeypatch.setenv(VARIABLE, "2.5")
    assert seconds_to_wait() == 2.5
    monkeypatch.setenv(VARIABLE, "")
    assert seconds_to_wait() == 60.0


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_ranks_that_stand_still_are_said_by_the_others_and_waited_for(tmp_path: Path) -> None:
    run(str(HERE / "standing.py"), str(tmp_path))
    found = json.loads((tmp_path / "standing.json").read_text())
    for case, one in found.items():
        stood = int(case[-1])
        assert one["codes"] == [0, 0] and one["steps"] == [6, 6], case
        said = one["lines"][1 - stood][0]
        begin = f"waiting for rank {stood}, which was last heard of after step "
        assert said.startswith(begin), said
        assert int(said.removeprefix(begin).split()[0]) <= 4
