"""What goes wrong: how long it is tried, and in which words it is said."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.trainer_core.diloco.faulty import FaultyStore
from tests.trainer_core.diloco.servers import Server, hanging_server
from trainer_core.diloco.errors import PassingError, PermanentError
from trainer_core.diloco.store import Store
from trainer_core.diloco.store.deadline import Pulse, run_watched

SECRET = "hunter2-correct-horse"


@pytest.fixture
def hung_port() -> object:
    with hanging_server() as port:
        yield port


@pytest.mark.parametrize("kind", ["s3", "sftp", "hf"])
def test_a_server_that_hangs_is_given_up(kind: str, hung_port: int) -> None:
    """No answer in time is worth other tries, and the last one says how long it was waited for."""
    address = f"http://127.0.0.1:{hung_port}"
    url, options = {
        "s3": ("s3://hub/x", {"key": "k", "secret": SECRET, "endpoint_url": address}),
        "sftp": (
            f"sftp://me:{SECRET}@127.0.0.1:{hung_port}/x",
            {"known_hosts": None, "config": None},
        ),
        "hf": ("hf://owner/name", {"endpoint": address, "token": SECRET}),
    }[kind]
    store = Store.open(url, timeout=0.3, attempts=2, options=options)
    store.first_wait_s = 0.001
    calls = [lambda: store.read("a"), lambda: store.size("a")]
    if kind != "hf":  # whose library goes on trying in the thread that was given up
        calls += [lambda: store.write("a", b"1"), lambda: store.entries("n")]
    for call in calls:
        with pytest.raises(PassingError, match=r"(?i)no answer within 0.3 s|time") as caught:
            call()
        assert SECRET not in str(caught.value) + store.url
    assert set(store.requests.values()) == {2}
    store.close()


@pytest.mark.parametrize("kind", ["s3", "sftp", "hf"])
def test_nobody_there_is_a_passing_error(kind: str) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        url, options = {
            "s3": (
                "s3://hub",
                {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"},
            ),
            "sftp": (f"sftp://me@127.0.0.1:{port}/x", {"known_hosts": None, "config": None}),
            "hf": ("hf://owner/name", {"endpoint": f"http://127.0.0.1:{port}", "token": False}),
        }[kind]
        store = Store.open(url, attempts=2, options=options)
        store.first_wait_s = 0.001
        with pytest.raises(PassingError, match=r"read 'a' on"):
            store.read("a")
    assert store.requests["read"] == 2
    store.close()


def test_a_bucket_that_is_not_there(s3: Server) -> None:
    store = Store.open("s3://nowhere/x", options=s3.options)
    calls = [
        lambda: store.read("a"),
        lambda: store.size("a"),
        lambda: store.write("a", b"1"),
        lambda: store.create("a", b"1"),
        lambda: store.entries("a"),
        lambda: store.remove("a"),
    ]
    for call in calls:
        with pytest.raises(PermanentError, match="bucket"):
            call()
    assert set(store.requests.values()) == {1}  # at once, each
    store.close()


def test_s3_without_credentials(
    s3: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    shown = {name: s3.options[name] for name in ("endpoint_url", "client_kwargs")}
    store = Store.open("s3://hub", options=shown)
    with pytest.raises(PermanentError, match="credentials"):
        store.write("a", b"1")
    assert store.requests["write"] == 1
    store.close()


def test_logins_that_sftp_refuses(sftp: Server, tmp_path: Path) -> None:
    """An unknown host key, and a key that the server doesn't know: both at once, in words."""
    import asyncssh

    (tmp_path / "known_hosts").write_text("")
    stranger = {**sftp.options, "known_hosts": str(tmp_path / "known_hosts")}
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(tmp_path / "key")
    nobody = {**sftp.options, "client_keys": [str(tmp_path / "key")], "agent_path": None}
    for options, words in ((stranger, "[Hh]ost key"), (nobody, "[Pp]ermission denied")):
        store = Store.open(f"{sftp.url}/x", options=options)
        with pytest.raises(PermanentError, match=words):
            store.read("a")
        assert store.requests["read"] == 1
        store.close()


def test_sftp_connects_again_after_a_break(sftp: Server) -> None:
    store = Store.open(f"{sftp.url}/breaks", options=sftp.options)
    store.first_wait_s = 0.001
    store.write("a", b"1")
    connection = store._backend._connection  # type: ignore[attr-defined]  # the kind's own
    from fsspec.asyn import get_loop

    get_loop().call_soon_threadsafe(connection.abort)
    assert store.read("a") == b"1"
    assert store.requests["read"] <= 2
    store.close()


def test_a_directory_says_what_no_try_mends(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "hub")
    store.write("file", b"1")
    (tmp_path / "hub" / "folder").mkdir()
    calls = [
        lambda: store.write("file/below", b"2"),
        lambda: store.read("folder"),
        lambda: store.size("folder"),
        lambda: store.write("folder", b"2"),
        lambda: Store.open(tmp_path / "not" / "mounted").write("a", b"1"),
    ]
    for call in calls:
        with pytest.raises(PermanentError):
            call()
    assert not (tmp_path / "not").exists()
    assert store.read("file") == b"1"
    assert store.requests["write"] == 3


def test_schemes_and_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"'gopher'; known are: file.*memory.*s3.*sftp.*hf"):
        Store.open("gopher://x/y")
    for url in (
        "s3://",
        "s3://B*d/x",
        "s3://hub/../x",
        "sftp://h",
        "sftp:///x",
        "sftp://h:x/y",
        "sftp://h/a/../b",
        "hf://x",
        "hf://a/b/../c",
    ):
        with pytest.raises((PermanentError, ValueError)):
            Store.open(url)
    for url in (f"s3://key:{SECRET}@hub/x", f"hf://me:{SECRET}@owner/name"):
        with pytest.raises(PermanentError, match="login") as caught:
            Store.open(url)
        assert SECRET not in str(caught.value)
    for url, module in (
        ("s3://hub", "s3fs"),
        ("sftp://h/x", "asyncssh"),
        ("hf://a/b", "huggingface_hub"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        extra = url.partition(":")[0]
        with pytest.raises(PermanentError, match=rf"pip install 'ckpttool\[{extra}\]'"):
            Store.open(url)
    assert Store.open(f"file://{tmp_path}/hub").url == f"{tmp_path}/hub"
    for arguments in ({"timeout": 0}, {"attempts": 0}):
        with pytest.raises(ValueError, match="must be"):
            Store.open(tmp_path, **arguments)  # type: ignore[arg-type]  # one of either


def test_a_closed_store_ends_its_waits() -> None:
    store = FaultyStore(Store.open("memory://closing"), rule=lambda *_: "passing", attempts=9)
    store.first_wait_s = 3600.0
    failed: list[PassingError] = []

    def call() -> None:
        try:
            store.read("a")
        except PassingError as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    store.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "closed" in str(failed[0])


def test_a_call_that_was_given_up_does_nothing_late() -> None:
    go, ended, late = threading.Event(), threading.Event(), []

    def work(pulse: Pulse) -> None:
        try:
            go.wait(60)
            pulse.beat()
            late.append("published")
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match="no answer within 0.05 s"):
        run_watched(work, 0.05)
    go.set()
    assert ended.wait(60)
    assert late == []


def test_a_call_that_beats_is_waited_for() -> None:
    """For as long as it likes; the time-out here is far above any stall of a busy machine."""
    timeout, start = 2.0, time.monotonic()

    def work(pulse: Pulse) -> float:
        while time.monotonic() - start < 1.2 * timeout:
            threading.Event().wait(0.02)
            pulse.beat()
        return time.monotonic() - start

    assert run_watched(work, timeout) > timeout
