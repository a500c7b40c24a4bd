from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer_core.diloco.hub_server import hub_server
from tests.trainer_core.diloco.servers import SSHD, Server, s3_server, sftp_server
from tests.trainer_core.diloco.threads import (
    heartbeats_end_with_their_test,  # noqa: F401 - used by every test here
)


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server, one for all tests of this process; each takes a prefix of its own."""
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An SFTP server, one for all tests of this process; each takes a folder of its own."""
    if not SSHD:
        pytest.skip("needs OpenSSH's sshd (Debian: openssh-server)")
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture(scope="session")
def hf() -> Iterator[Server]:
    """A small server that speaks the Hub's protocol, one for all tests of this process."""
    with hub_server() as server:
        yield server
