"""Real servers for the shared store, on loopback, at ports that the system gives.

`python -m tests.trainer_core.diloco.servers s3 FOLDER` runs one until its standard input ends, and
prints the URL and, as JSON, the options that `Store.open` needs.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SSHD = next(
    (path for path in ("/usr/sbin/sshd", shutil.which("sshd") or "") if os.path.exists(path)), ""
)


class Server(NamedTuple):
    """Where a server is: `url` without a folder, and the options that `Store.open` needs."""

    url: str
    options: dict[str, Any]


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """moto's S3 server with one bucket, `hub`.

    One request at a time: moto looks whether a key is free and then writes it, with nothing
    between that keeps another request out, as the real S3 does.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *arguments: object) -> None:
            return

    app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_at_a_time(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        with lock:
            return app(environment, start)

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    options = {"key": "tester", "secret": "tester-secret", "endpoint_url": address}
    options["client_kwargs"] = {"region_name": "us-east-1"}
    try:
        _make_bucket(options)
        yield Server("s3://hub", options)
    finally:
        server.shutdown()
        server.server_close()


def _make_bucket(options: dict[str, Any]) -> None:
    import botocore.session

    client = botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )
    client.create_bucket(Bucket="hub")
    client.close()


@contextlib.contextmanager
def sftp_server(folder: Path) -> Iterator[Server]:
    """OpenSSH's server with its own host key and user key; files go below `folder/files`."""
    import asyncssh

    files = folder / "files"
    files.mkdir(parents=True)
    for name in ("host", "user"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(folder / name)
        (folder / name).chmod(0o600)
        key.write_public_key(folder / f"{name}.pub")
    if os.geteuid() == 0:
        os.makedirs(
            "/run/sshd", mode=0o755, exist_ok=True
        )  # sshd's own, for its privilege separation
    process, port = _start_sshd(folder)
    try:
        host = f"[127.0.0.1]:{port}" if port != 22 else "127.0.0.1"
        (folder / "known_hosts").write_text(f"{host} {(folder / 'host.pub').read_text()}")
        options = {
            "client_keys": [str(folder / "user")],
            "known_hosts": str(folder / "known_hosts"),
        }
        options["config"] = None  # type: ignore[assignment]  # not the tester's own ~/.ssh/config
        yield Server(f"sftp://{getpass.getuser()}@127.0.0.1:{port}{files}", options)
    finally:
        process.kill()
        process.wait()


def _start_sshd(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """It can't take port 0, so a free one is looked up, again if somebody took it meanwhile."""
    for _ in range(20):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        config = folder / "sshd_config"
        config.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n"
            "MaxSessions 100\nSubsystem sftp internal-sftp\n"
        )
        log = folder / "sshd.log"
        with log.open("wb") as output:
            command = [SSHD, "-D", "-e", "-f", str(config)]
            process = subprocess.Popen(command, stderr=output, stdin=subprocess.DEVNULL)
        if _listens(process, port):
            return process, port
        process.kill()
        process.wait()
    raise RuntimeError(f"sshd did not start: {log.read_text()}")


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 5) as client,
        ):
            if client.recv(4) == b"SSH-":
                return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def hanging_server() -> Iterator[int]:
    """The port of one that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in taken:
                one.close()


if __name__ == "__main__":
    made = s3_server() if sys.argv[1] == "s3" else sftp_server(Path(sys.argv[2]))
    with made as running:
        print(running.url, json.dumps(running.options), flush=True)
        sys.stdin.read()
