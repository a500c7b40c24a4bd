"""A Hub that goes away while nodes run, as a directory that is moved or a mount that is lost."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer_core.diloco.nodes import Node, deltas_on, new_model, replay, run
from tests.trainer_core.diloco.test_overlaps import put
from trainer_core.diloco import PassingError, Store
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.serving import Service, Until, settings_of


def turns(lives: list[Iterator[int]], steps: int) -> None:
    for _ in range(steps):
        for life in lives:
            next(life)


def go_away(hub: Path, how: str) -> Path:
    away = hub.with_name("away")
    hub.rename(away)
    if how == "unmounted":
        hub.mkdir()  # what lies under a mount
    return away


def come_back(hub: Path, away: Path, how: str) -> None:
    if how == "unmounted":
        hub.rmdir()  # which fails where anything was written there
    assert not hub.exists()
    away.rename(hub)


@pytest.mark.parametrize("how", ["moved", "unmounted"])
def test_nothing_is_written_where_the_hub_was_and_all_go_on_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    hub = tmp_path / "hub"
    nodes = [
        Node(name, role, lambda: Store.open(hub, attempts=1), steps=24)
        for name, role in (("m", "master"), ("w", "worker"), ("w2", "worker"))
    ]
    lives = [node.life() for node in nodes]
    turns(lives, 8)
    away = go_away(hub, how)
    caplog.set_level(logging.WARNING)
    turns(lives, 4)
    # One that starts again meanwhile knows from its checkpoint that there was a Hub.
    lives[2] = nodes[2].life()
    turns(lives, 4)
    come_back(hub, away, how)
    assert any("the Hub is gone: no commit is left" in words for words in caplog.messages)
    for life in (lives[1], lives[2], lives[0]):
        for _ in life:
            pass
    run([nodes[0]])
    store = Store.open(hub)
    applied = replay(store, new_model().state_dict())
    assert set(applied) == deltas_on(store)
    assert {(node, 24) for node in ("m", "w", "w2")} <= set(applied)
    log = CommitLog(store)
    assert log.read(0).fence == 1 and log.steps() == list(range(len(log.steps())))


def test_serve_waits_for_it(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    store = Store.open(hub, attempts=1)
    run([Node("m", "master", lambda: Store.open(hub), steps=2)])
    looks = itertools.count()
    where: list[Path] = []

    def is_stopped() -> bool:
        look = next(looks)
        if look == 4:
            where.append(go_away(hub, "moved"))
        if look == 30:
            come_back(hub, where[0], "moved")
            put(Store.open(hub), 2, 0)
        return look > 200

    settings = settings_of(store, poll_seconds=0.01, keep_commits=None)
    with Service(store, "s", settings) as service:
        assert service.run(Until(rounds=1, is_stopped=is_stopped), lambda _: None) == 1
    assert replay(Store.open(hub), new_model().state_dict()) == [("m", 2), ("w", 2)]


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "hub", attempts=1)
    assert store.entries("nodes") == []
    store.write("a/b", b"1")  # the first to write makes it
    (tmp_path / "hub").rename(tmp_path / "away")
    for name in ("a/b", "c"):
        with pytest.raises(PassingError, match="the directory of the store is gone"):
            store.write(name, b"2")
        with pytest.raises(PassingError, match="the directory of the store is gone"):
            store.create(name, b"2")
    assert store.size("a/b") is None and store.entries("a") == []
    assert not (tmp_path / "hub").exists()
    (tmp_path / "away").rename(tmp_path / "hub")
    store.write("c", b"2")
    assert store.read("a/b") == b"1"
