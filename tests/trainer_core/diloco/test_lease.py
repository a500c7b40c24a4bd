"""Who is master; the clock is the test's own, as nothing may depend on a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer_core.diloco.nodes import Node, memory, new_model, replay, run
from tests.trainer_core.diloco.test_overlaps import put
from trainer_core.diloco import PermanentError, Store
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.lease import Lease, LeaseError, newest_claim
from trainer_core.diloco.serving import Service, Until, settings_of


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


def test_what_is_no_file_in_the_place_of_a_lease_is_no_silent_wait(tmp_path: Path) -> None:
    store, clock = Store.open(tmp_path, attempts=1), Clock()
    (tmp_path / "global/lease/000000000001.json").mkdir(parents=True)
    with pytest.raises(PermanentError, match="Is a directory"):
        Lease(store, "a", "s1", 10.0, clock).attempt()


def test_a_master_after_lost_lease_files_counts_on_from_the_log() -> None:
    """Under a number below that of the newest commit nothing that it commits would count."""
    store = Store.open(memory())
    run([Node("w", "worker", lambda: store, steps=2)])
    for life in (1, 2, 3):
        run([Node("m", "master", lambda: store, steps=2 * life)])
        if life > 1:
            assert len(store.entries("global/lease")) == 1
    log = CommitLog(store)
    newest = log.latest()
    assert newest is not None and newest.fence == 3
    for entry in store.entries("global/lease"):
        store.remove(f"global/lease/{entry.name}")
    put(store, 4, 2)
    with Service(store, "s", settings_of(store, keep_commits=None)) as service:
        assert service.run(Until(idle=0.0), lambda _: None) == 1
    made = log.latest()
    assert made is not None
    assert (made.outer_step, made.fence, made.master) == (newest.outer_step + 1, 4, "s")
    assert replay(store, new_model().state_dict())[-1] == ("w", 4)


def test_lost_lease_files_of_the_first_master_are_counted_on_from_too() -> None:
    """Its number is the one that a new count would begin with."""
    store = Store.open(memory())
    run([Node("w", "worker", lambda: store, steps=2), Node("m", "master", lambda: store, steps=2)])
    newest = CommitLog(store).latest()
    assert newest is not None and newest.fence == 1
    for entry in store.entries("global/lease"):
        store.remove(f"global/lease/{entry.name}")
    put(store, 4, 2)
    with Service(store, "s", settings_of(store, keep_commits=None)) as service:
        service.run(Until(idle=0.0), lambda _: None)
    made = CommitLog(store).latest()
    assert made is not None and made.outer_step > newest.outer_step
    assert (made.fence, made.master) == (2, "s")


def test_a_lease_file_nested_without_end_is_one_that_cannot_be_read() -> None:
    store = Store.open(memory())
    store.write("global/lease/000000000002.json", b"[" * 100_000)
    claim = newest_claim(store)
    assert claim is not None
    assert (claim.number, claim.holder, claim.is_readable) == (2, "unknown", False)


def test_a_living_master_mends_its_lease_file() -> None:
    store, clock = Store.open(memory()), Clock()
    lease = Lease(store, "a", "s1", 10.0, clock)
    assert lease.attempt()
    for content in (b"", b"[", b"{}"):
        store.write("global/lease/000000000001.json", content)
        lease.check()
        lease.beat()
        claim = newest_claim(store)
        assert claim is not None and (claim.holder, claim.session) == ("a", "s1")


def test_a_process_with_the_same_node_id_is_named_as_such() -> None:
    store, clock = Store.open(memory()), Clock()
    first, second = Lease(store, "a", "s1", 10.0, clock), Lease(store, "a", "s2", 10.0, clock)
    assert first.attempt() and second.attempt()
    with pytest.raises(LeaseError, match="another process under this node's id"):
        first.check()


def test_of_many_candidates_that_see_the_same_exactly_one_gets_the_number() -> None:
    store, clock = Store.open(memory()), Clock()
    dead = {"holder": "z", "session": "s", "beat": 4}
    store.write("global/lease/000000000003.json", json.dumps(dead).encode())
    leases = [Lease(store, f"n{i}", f"s{i}", 5.0, clock) for i in range(5)]
    assert [lease.attempt() for lease in leases] == [False] * 5
    clock.now += 6.0
    assert [lease.attempt() for lease in leases] == [True, False, False, False, False]
