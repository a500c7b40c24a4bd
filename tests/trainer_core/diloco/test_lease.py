"""Who is master; the clock is the test's own, as nothing may depend on a real one."""

from __future__ import annotations

import json

import pytest

from tests.trainer_core.diloco.nodes import memory
from trainer_core.diloco import Store
from trainer_core.diloco.lease import Lease, LeaseError, newest_claim


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_silent_master_loses_its_place_and_an_audible_one_does_not() -> None:
    store, clock = Store.open(memory()), Clock()
    first = Lease(store, "a", "s1", 10.0, clock)
    second = Lease(store, "b", "s2", 10.0, clock)
    assert first.attempt()
    assert first.number == 1
    for _ in range(5):  # 45 seconds, but the counter moves
        assert not second.attempt()
        clock.now += 9.0
        first.beat()
    assert not second.attempt()
    clock.now += 9.9
    assert not second.attempt()
    clock.now += 0.2
    assert second.attempt()
    assert second.number == 2
    with pytest.raises(LeaseError, match=r"a is no longer the master: b \(fencing number 2\)"):
        first.check()
    assert first.number is None
    with pytest.raises(LeaseError, match="a is not the master"):
        first.beat()
    second.beat()
    assert [entry.name for entry in store.entries("global/lease")] == ["000000000002.json"]


def test_who_stops_frees_its_place_and_a_restart_needs_not_wait_for_itself() -> None:
    store, clock = Store.open(memory()), Clock()
    first, restarted = Lease(store, "a", "s1", 1e9, clock), Lease(store, "a", "s2", 1e9, clock)
    assert first.attempt()
    assert restarted.attempt()
    with pytest.raises(LeaseError):
        first.check()
    other = Lease(store, "b", "s3", 1e9, clock)
    assert not other.attempt()
    restarted.release()
    restarted.release()
    assert other.attempt()
    claim = newest_claim(store)
    assert claim is not None
    assert (claim.number, claim.holder) == (3, "b")


def test_a_lease_file_that_cannot_be_read_is_watched_like_any_other() -> None:
    store, clock = Store.open(memory()), Clock()
    for content in (b"", b"[1]", b'{"holder": "x"}', b"\xff" * 99):
        store.write("global/lease/000000000007.json", content)
        lease = Lease(store, "b", "s", 5.0, clock)
        assert not lease.attempt()
        clock.now += 6.0
        assert lease.attempt()
        assert lease.number == 8
        store.remove("global/lease/000000000008.json")


def test_of_many_candidates_that_see_the_same_exactly_one_gets_the_number() -> None:
    store, clock = Store.open(memory()), Clock()
    dead = {"holder": "z", "session": "s", "beat": 4}
    store.write("global/lease/000000000003.json", json.dumps(dead).encode())
    leases = [Lease(store, f"n{i}", f"s{i}", 5.0, clock) for i in range(5)]
    assert [lease.attempt() for lease in leases] == [False] * 5
    clock.now += 6.0
    assert [lease.attempt() for lease in leases] == [True, False, False, False, False]
