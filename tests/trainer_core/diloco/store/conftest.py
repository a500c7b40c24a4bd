from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_core.diloco.store import Store

KINDS = ("directory", "memory", "s3", "sftp", "hf")

Open = Callable[..., Store]


@pytest.fixture(params=KINDS)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens one and the same empty place of each kind, any number of times."""
    kind, opened = request.param, []
    options: dict[str, Any] = {}
    if kind == "directory":
        url = str(tmp_path / "hub")
    elif kind == "memory":
        url = f"memory://{secrets.token_hex(8)}/hub"
    else:
        server = request.getfixturevalue(kind)
        url, options = f"{server.url}/{secrets.token_hex(8)}/hub", server.options

    def opening(**arguments: Any) -> Store:
        opened.append(Store.open(url, **{"options": options, "timeout": 30.0, **arguments}))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> Store:
    return open_store()
