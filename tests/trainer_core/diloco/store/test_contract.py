"""What every kind of store promises, tried on each of them for real."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.trainer_core.diloco.store.conftest import Open
from trainer_core.diloco.errors import BadNameError, MissingError, PermanentError
from trainer_core.diloco.store import Entry, Store

# More than one part of a multi-part upload, and no whole number of any chunk.
BIG = os.urandom(1 << 20) * 19 + b"the end"


def test_what_is_written_is_read(store: Store) -> None:
    store.write("global/a.bin", b"0123456789")
    assert store.read("global/a.bin") == b"0123456789"
    assert store.read("global/a.bin", 2) == b"23456789"
    assert store.read("global/a.bin", 2, 5) == b"234"
    assert store.read("global/a.bin", 8, 50) == b"89"
    assert store.read("global/a.bin", 10, 20) == store.read("global/a.bin", 30) == b""
    assert store.read("global/a.bin", 3, 3) == b""
    assert store.size("global/a.bin") == 10
    store.write("global/a.bin", memoryview(b"new"))
    assert store.read("global/a.bin") == b"new"
    store.write("global/a.bin", b"")
    assert (store.read("global/a.bin"), store.size("global/a.bin")) == (b"", 0)
    assert store.requests["write"] == 3
    assert store.bytes_written == 13


def test_big_files_are_streamed_both_ways(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(BIG)
    store.put(source, "nodes/n1/delta.safetensors")
    assert store.size("nodes/n1/delta.safetensors") == len(BIG)
    assert store.read("nodes/n1/delta.safetensors", len(BIG) - 10) == BIG[-10:]
    target.write_bytes(b"old")
    store.fetch("nodes/n1/delta.safetensors", target)
    assert target.read_bytes() == BIG
    assert store.read("nodes/n1/delta.safetensors") == BIG
    store.write("nodes/n1/again", memoryview(BIG))
    assert store.read("nodes/n1/again") == BIG
    assert (store.bytes_written, store.bytes_read) == (2 * len(BIG), 3 * len(BIG) + 10)
    with pytest.raises(PermanentError, match="cannot read .*: No such file"):
        store.put(tmp_path / "nowhere", "x")
    with pytest.raises(PermanentError, match="cannot write .*: No such file"):
        store.fetch("nodes/n1/again", tmp_path / "no" / "where")


def test_what_is_not_there(store: Store, tmp_path: Path) -> None:
    for asked in (lambda: store.read("no/thing"), lambda: store.read("no/thing", 4, 4)):
        with pytest.raises(MissingError, match="read 'no/thing'"):
            asked()
    with pytest.raises(MissingError):
        store.fetch("no/thing", tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert store.size("no/thing") is None
    assert (
        store.entries("no") == store.entries("") == store.folders("") == store.folders("no") == []
    )
    store.remove("no/thing")
    assert store.requests["read"] == 2  # one try each: it is an answer, no failure


def test_listings_are_of_now_and_of_one_folder(store: Store, open_store: Open) -> None:
    other = open_store()
    assert other.entries("nodes/a") == []
    for name in ("nodes/a/2", "nodes/a/10", "nodes/a/deep/x", "nodes/b/1", "top.json"):
        store.write(name, name.encode())
    # By another, which has looked before: nothing is remembered.
    assert other.entries("nodes/a") == [Entry("10", 10), Entry("2", 9)]
    assert other.folders("nodes") == ["a", "b"]
    assert (other.entries("nodes"), other.folders("nodes/a")) == ([], ["deep"])
    assert (other.entries(""), other.folders("")) == ([Entry("top.json", 8)], ["nodes"])
    below = [Entry("a/10", 10), Entry("a/2", 9), Entry("a/deep/x", 14), Entry("b/1", 9)]
    assert other.tree("nodes") == below
    assert [name for name, _ in other.tree("")] == [
        *(f"nodes/{name}" for name, _ in below),
        "top.json",
    ]
    assert other.tree("nowhere") == other.tree("nodes/b/no") == []
    assert other.requests["tree"] == 4
    store.remove("nodes/a/2")
    store.write("nodes/a/10", b"")
    assert other.entries("nodes/a") == [Entry("10", 0)]
    assert other.size("nodes/a/2") is None


def test_created_once(store: Store, open_store: Open) -> None:
    other = open_store()
    assert store.create("global/lease.json", b"mine") is True
    assert other.create("global/lease.json", b"theirs") is False
    assert other.read("global/lease.json") == b"mine"
    store.remove("global/lease.json")
    assert other.create("global/lease.json", b"theirs") is True
    # A name that was only written is taken as well.
    store.write("global/written", b"1")
    assert store.create("global/written", b"2") is False
    assert [entry.name for entry in store.entries("global")] == ["lease.json", "written"]


def test_of_two_creators_one_wins(open_store: Open) -> None:
    """50 times, each with a connection of its own (fewer on the Hub, where each waits for others)."""
    stores = [open_store(), open_store()]
    rounds = 10 if stores[0].url.startswith("hf:") else 50
    barrier = threading.Barrier(2)

    def race(which: int) -> list[bool]:
        won = []
        for number in range(rounds):
            barrier.wait(60)
            won.append(stores[which].create(f"race/{number}", b"by %d" % which))
        return won

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(race, (0, 1))
    assert [a + b for a, b in zip(first, second, strict=True)] == [1] * rounds
    for number, won in enumerate(first):
        assert stores[0].read(f"race/{number}") == (b"by 0" if won else b"by 1")
    assert len(stores[0].entries("race")) == rounds


def test_no_reader_sees_half_a_write(open_store: Open) -> None:
    """One replaces a file again and again, with contents of different lengths; another reads."""
    writer, reader = open_store(), open_store()
    contents = [bytes([65 + n]) * size for n, size in enumerate((300_000, 9_000_000, 70_000))]
    writer.write("global/step_count.json", contents[0])
    done, seen = threading.Event(), 0

    def write() -> None:
        try:
            for number in range(12):
                writer.write("global/step_count.json", contents[number % 3])
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set() or seen < 5:
        assert reader.read("global/step_count.json") in contents
        size, listed = reader.size("global/step_count.json"), reader.entries("global")
        assert size in map(len, contents)
        assert [entry.name for entry in listed] == ["step_count.json"]
        assert listed[0].size in map(len, contents)
        seen += 1
    thread.join()


def test_many_threads_share_one_store(store: Store) -> None:
    def work(number: int) -> bytes:
        store.write(f"n/{number}", b"%d" % number * 1000)
        return store.read(f"n/{number}", 0, 50)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(24)))
    assert got == [(b"%d" % number * 1000)[:50] for number in range(24)]
    assert (store.requests["write"], store.requests["read"]) == (24, 24)
    assert len(store.entries("n")) == 24


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", ".hidden", "a/", "a\0"]
)
def test_names_that_lead_elsewhere_are_refused(store: Store, tmp_path: Path, name: str) -> None:
    calls = [
        lambda: store.read(name),
        lambda: store.write(name, b""),
        lambda: store.create(name, b""),
        lambda: store.size(name),
        lambda: store.remove(name),
        lambda: store.fetch(name, tmp_path / "x"),
        lambda: store.put(__file__, name),
    ]
    for call in calls:
        with pytest.raises(BadNameError):
            call()
    if name:
        with pytest.raises(BadNameError):
            store.entries(name)
    assert not store.requests
