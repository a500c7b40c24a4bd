"""The faulty store does what it says: what rests on it is only as good a test as that."""

from __future__ import annotations

import secrets

import pytest

from tests.trainer_core.diloco.faulty import Faults, FaultyStore, History, Killed
from trainer_core.diloco.errors import MissingError, PassingError, PermanentError
from trainer_core.diloco.store import Store


@pytest.fixture
def plain() -> Store:
    return Store.open(f"memory://{secrets.token_hex(8)}")


def test_faults_by_rule(plain: Store) -> None:
    faults = {1: "passing", 2: "permanent", 3: "unknown", 4: "half", 6: "unknown"}
    store = FaultyStore(plain, rule=lambda number, *_: faults.get(number))
    with pytest.raises(PassingError):
        store.write("a", b"1234")
    with pytest.raises(PermanentError):
        store.write("a", b"1234")
    assert plain.size("a") is None
    with pytest.raises(PassingError):
        store.write("a", b"1234")
    assert plain.read("a") == b"1234"
    with pytest.raises(PassingError):
        store.write("a", b"abcdef")
    assert plain.read("a") == store.read("a") == b"abc"
    with pytest.raises(PassingError):
        store.remove("a")
    assert plain.size("a") is None
    assert [entry[1] for entry in store.log] == ["write"] * 4 + ["read", "remove"]
    store.partitioned = True
    with pytest.raises(PassingError):
        store.entries("")
    store.calm()
    assert store.entries("") == []


def test_the_stores_own_tries_get_through(plain: Store) -> None:
    faults = {1: "passing", 2: "unknown", 4: "unknown", 7: "passing", 8: "passing", 9: "passing"}
    store = FaultyStore(plain, rule=lambda number, *_: faults.get(number), attempts=3)
    store.write("a", b"1")
    assert store.requests["write"] == 3
    # Created, but reported as failed: the second try finds the name taken, by this very content.
    assert store.create("lease", b"mine")
    assert plain.read("lease") == b"mine"
    with pytest.raises(PassingError, match="read 'a' on memory://"):
        store.read("a")
    assert store.requests["read"] == 3 + 1  # one was create's own look


def test_a_create_that_lost_is_not_taken_for_won(plain: Store) -> None:
    plain.create("lease", b"theirs")
    faults = {1: "unknown", 2: "passing"}
    store = FaultyStore(plain, rule=lambda number, *_: faults.get(number), attempts=4)
    assert store.create("lease", b"mine") is False
    only = FaultyStore(plain, rule=lambda number, *_: "unknown" if number == 1 else None)
    plain.remove("lease")
    assert only.create("lease", b"mine") is True  # by its own look at the end
    lost = FaultyStore(plain, rule=lambda number, *_: "unknown" if number == 1 else None)
    with pytest.raises(PassingError):
        lost.create("lease", b"other")


def test_death_is_for_good(plain: Store) -> None:
    before = FaultyStore(plain, rule=lambda _, method, name: "die" if name == "b" else None)
    before.write("a", b"1")
    for name in ("b", "a"):
        with pytest.raises(Killed):
            before.write(name, b"2")
    assert (plain.read("a"), plain.size("b")) == (b"1", None)
    after = FaultyStore(plain, rule=lambda number, *_: "die after" if number == 1 else None)
    for call in (lambda: after.write("c", b"3"), lambda: after.read("a")):
        with pytest.raises(Killed):
            call()
    assert plain.read("c") == b"3"


def test_old_views_lack_only_what_others_did_lately(plain: Store) -> None:
    history = History()
    writer = FaultyStore(plain, history=history)
    reader = FaultyStore(plain, Faults(stale=2), seed=5, history=history)
    writer.write("n/a", b"old")
    writer.write("n/x", b"")
    writer.write("n/y", b"")
    writer.write("n/a", b"new")
    writer.write("n/b", b"new")
    reader.write("n/mine", b"own")
    views, reads = set(), set()
    for _ in range(60):
        views.add(tuple(entry.name for entry in reader.entries("n")))
        reads.add(reader.read("n/a"))
    # The last two changes include the reader's own, so just "b" may be unknown to it.
    assert views == {("a", "b", "mine", "x", "y"), ("a", "mine", "x", "y")}
    assert reads == {b"new"}
    writer.remove("n/a")
    found = set()
    for _ in range(60):
        try:
            found.add(reader.read("n/a"))
        except MissingError:
            found.add(b"gone")
    assert found == {b"new", b"gone"}
    assert reader.folders("") == ["n"]


def test_chance_is_seeded(plain: Store) -> None:
    def run(seed: int) -> list[object]:
        faults = Faults(passing=0.2, permanent=0.1, unknown=0.2, half=0.1, delay_s=0.0001)
        store = FaultyStore(plain, faults, seed=seed)
        for number in range(200):
            try:
                store.write(f"f{number}", b"12")
            except (PassingError, PermanentError):
                pass
        return [fault for *_, fault in store.log]

    first = run(1)
    assert first == run(1) != run(2)
    counts = {
        fault: first.count(fault) for fault in ("passing", "permanent", "unknown", "half", None)
    }
    assert all(count > 5 for count in counts.values()), counts
