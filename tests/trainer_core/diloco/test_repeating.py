"""Lines that a long run could repeat for ever."""

from __future__ import annotations

import itertools
import logging

import pytest

from tests.trainer_core.diloco.faulty import FaultyStore, Rule
from tests.trainer_core.diloco.nodes import Node, memory, run
from trainer_core.diloco import Store
from trainer_core.diloco.commits import POINTER
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.serving import Service, Until, settings_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_a_line_is_said_once_and_then_rarely_with_a_count(said: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rarely = Rarely(logging.getLogger("rarely"), clock)
    for second in range(24 * 3600):
        clock.now = float(second)
        rarely.warning("the Hub is %s", "gone")
    # After 10 minutes, then after twice as long each time: 600, 1800, 4200, …
    times = [599, 1199, 2399, 4799, 9599, 19199, 38399]
    words = [f"the Hub is gone (and {n} times since this was last said)" for n in times]
    assert said.messages == ["the Hub is gone", *words]
    rarely.warning("the Hub is %s", "slow")
    assert said.messages[-1] == "the Hub is slow"
    clock.now += 2 * 76800.0  # the quiet that comes after is over, and it did not come in it
    rarely.warning("the Hub is %s", "slow")
    assert said.messages[-1] == "the Hub is slow"


def test_numbers_that_change_make_no_other_line(said: pytest.LogCaptureFixture) -> None:
    rarely = Rarely(logging.getLogger("rarely"), Clock())
    for step in range(100):
        rarely.info("step %d is skipped", step, about="skipped")
    assert said.messages == ["step 0 is skipped"]


def test_what_is_kept_of_many_lines_is_bounded() -> None:
    rarely = Rarely(logging.getLogger("rarely"), Clock())
    for number in range(3000):
        rarely.info("line %d", number)
    assert len(rarely._known) == 1000


def a_hub() -> str:
    url = memory()
    run([Node("m", "master", lambda: Store.open(url), steps=4)])
    return url


def lines(said: pytest.LogCaptureFixture, begin: str) -> list[str]:
    return [words for words in said.messages if words.startswith(begin)]


def looks(times: int) -> Until:
    left = iter([False] * times)
    return Until(is_stopped=lambda: next(left, True))


def test_half_of_a_commit_is_said_once_however_often_it_is_met(
    said: pytest.LogCaptureFixture,
) -> None:
    store = Store.open(a_hub())
    run([Node("w", "worker", lambda: store, steps=2)])
    store.write(f"global/commits/{3:012d}.json", b'{"form')
    settings = settings_of(store, poll_seconds=0.0, lease_seconds=1000.0)
    with Service(store, "s", settings) as service:
        assert service.run(looks(20), lambda _: None) == 0
    (line,) = lines(said, "outer step failed")
    assert line.endswith("is no JSON, or not wholly written yet")


def test_a_hub_that_is_gone_and_a_damaged_pointer_are_said_once(
    said: pytest.LogCaptureFixture,
) -> None:
    url = a_hub()
    gone = [False]
    rule: Rule = lambda number, method, name: "passing" if gone[0] else None  # noqa: E731 - typed as a whole

    def store() -> Store:
        return FaultyStore(Store.open(url), rule=rule)

    worker = Node("w", "worker", store, steps=40, poll_seconds=0.0, synchronous=True)
    life = worker.life()
    for _ in itertools.islice(life, 2):
        pass
    gone[0] = True
    for _ in itertools.islice(life, 20):
        pass
    for begin in ("upload failed", "poll failed"):
        assert len(lines(said, begin)) == 1, (begin, said.messages)
    skipped = [words for words in said.messages if words.endswith("this boundary is skipped")]
    assert skipped == ["step 6: the upload of step 4 is still under way; this boundary is skipped"]
    gone[0] = False
    Store.open(url).write(POINTER, b'{"outer_')
    for _ in life:
        pass
    assert len(lines(said, POINTER)) == 1
