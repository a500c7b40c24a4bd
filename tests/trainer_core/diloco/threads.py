"""What a node that was killed in a test leaves running, since its process lives on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trainer_core.diloco.lease import Keeper


@pytest.fixture(autouse=True)
def heartbeats_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else they would beat on in the midst of another test."""
    made: list[Keeper] = []
    begin = Keeper.__init__

    def noted(self: Keeper, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Keeper, "__init__", noted)
    yield
    for heartbeat in made:
        heartbeat.stop()
        heartbeat._thread.join(10)
