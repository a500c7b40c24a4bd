"""Four nodes, each in a network namespace of its own, with delay and loss between them.

`python -m benchmarks.diloco_netns`: the store is an SFTP server (OpenSSH's) beside the master;
what goes between two nodes takes 50 ms each way, and 1 % of the packets is lost. Some nodes are
killed on the way, and at the end the same is asked as in `benchmarks.diloco_kills`.

Needs Linux, root, iproute2 (`ip netns`) and OpenSSH's sshd. The addresses, 10.77.0.0/24, are only
within the namespaces; nothing else is contacted, and the namespaces are always removed. Delay and
loss are the kernel's (veth, bridge, `tc netem`) or, where it has no netem, those of
`benchmarks.lossy_link`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.diloco_kills import (
    NODES,
    Plan,
    is_fine,
    nodes_of,
    replay,
    run_with_kills,
    write_text,
)
from benchmarks.diloco_nodes import ROOT, Commands, ends_on_sigterm
from benchmarks.diloco_places import Place
from benchmarks.lossy_link import DEVICE

PLAN = Plan(rounds=5, inner_steps=10, batch=4, every=3, lockstep=True, seconds=900.0)
DELAY_MS, LOSS_PERCENT = 50, 1
PORT = 2222
SSHD = "/usr/sbin/sshd"


def why_not() -> str | None:
    """What is missing to run this here, in words; None if nothing is."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs Linux and root, to make network namespaces"
    for program in ("ip", "tc", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            return f"needs {program} (Debian: iproute2, openssh-client, openssh-server)"
    probe = _name("probe")
    done = _try("ip", "netns", "add", probe)
    if done.returncode:
        return f"needs network namespaces: {done.stderr.strip()}"
    try:
        if not _has_netem(probe) and not os.path.exists("/dev/net/tun"):
            return "needs the kernel's netem, or /dev/net/tun"
    finally:
        _run("ip", "netns", "del", probe)
    return None


@contextlib.contextmanager
def namespaces(folder: Path) -> Iterator[dict[str, str]]:
    """The nodes' namespaces by node, joined by links that are slow and lossy."""
    names = {node: _name(node) for node in NODES}
    with contextlib.ExitStack() as stack:
        for name in names.values():
            _add_namespace(stack, name)
        ends = {name: address(node) for node, name in names.items()}
        if _has_netem(names[NODES[0]]):
            _join_by_kernel(stack, ends)
        else:
            _join_by_relay(stack, ends, folder)
        yield names


def address(node: str) -> str:
    """That of a node, within the namespaces."""
    return f"10.77.0.{NODES.index(node) + 1}"


def _name(node: str) -> str:
    return f"diloco{os.getpid()}-{node}"


def _add_namespace(stack: contextlib.ExitStack, name: str) -> None:
    stack.callback(_try, "ip", "netns", "del", name)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _has_netem(namespace: str) -> bool:
    netem = ("netem", "delay", "1ms")
    done = _try("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", *netem)
    _try("tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root")
    return done.returncode == 0


def _join_by_kernel(stack: contextlib.ExitStack, ends: dict[str, str]) -> None:
    """A bridge in a namespace of its own, and a pair of virtual Ethernet devices to each node."""
    switch = _name("switch")
    _add_namespace(stack, switch)
    _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge0", "up")
    for number, (name, at) in enumerate(ends.items()):
        port = f"port{number}"
        peer = ("peer", "name", DEVICE, "netns", name)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
        _bring_up(name, at)
        netem = ("netem", "delay", f"{DELAY_MS}ms", "loss", f"{LOSS_PERCENT}%", "limit", "10000")
        _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *netem)


def _join_by_relay(stack: contextlib.ExitStack, ends: dict[str, str], folder: Path) -> None:
    words = [f"{name}={at}" for name, at in ends.items()]
    command = [sys.executable, "-m", "benchmarks.lossy_link", *words]
    command += ["--delay", str(DELAY_MS / 1000), "--loss", str(LOSS_PERCENT / 100)]
    with (folder / "link.log").open("wb") as log:
        relay = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT
        )
    stack.callback(_end, relay)
    assert relay.stdout is not None
    if relay.stdout.readline() != b"ready\n":
        raise RuntimeError((folder / "link.log").read_text())
    for name, at in ends.items():
        _bring_up(name, at)


def _bring_up(name: str, at: str) -> None:
    _run("ip", "-n", name, "address", "add", f"{at}/24", "dev", DEVICE)
    _run("ip", "-n", name, "link", "set", DEVICE, "mtu", "1500", "up")


@contextlib.contextmanager
def sftp_server(folder: Path, namespace: str) -> Iterator[Place]:
    """OpenSSH's server in the master's namespace, with keys of its own; files are in `hub`."""
    folder.mkdir()
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    host = address(NODES[0])
    known = f"[{host}]:{PORT} {(folder / 'host.pub').read_text()}"
    (folder / "known_hosts").write_text(known)
    (folder / "config").write_text(
        f"Port {PORT}\nListenAddress {host}\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPermitRootLogin yes\nUseDNS no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n"
        "MaxSessions 100\nSubsystem sftp internal-sftp\n"
    )
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd's own, it insists on it
    command = ["ip", "netns", "exec", namespace, SSHD, "-D", "-e", "-f", str(folder / "config")]
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        _wait_until_it_listens(server, folder)
        options = {"client_keys": [str(folder / "user")], "config": None}
        options["known_hosts"] = str(folder / "known_hosts")
        path = folder / "options.json"
        path.write_text(json.dumps(options))
        yield Place(f"sftp://root@{host}:{PORT}{folder}/hub", path)
    finally:
        _end(server)


def _wait_until_it_listens(server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while "Server listening" not in (folder / "sshd.log").read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"sshd did not start: {(folder / 'sshd.log').read_text()}")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(*command: str) -> None:
    done = _try(*command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def run(folder: Path, plan: Plan, kills: int) -> tuple[int, float, dict[str, object]]:
    """The whole run: how many kills there were, its seconds, and what the replay found."""
    text = write_text(folder)
    with namespaces(folder) as names, sftp_server(folder / "sftp", names[NODES[0]]) as place:
        prefixes = {node: ("ip", "netns", "exec", name) for node, name in names.items()}
        with Commands(prefixes) as starter:
            nodes = nodes_of(starter, folder / "nodes", place, text, plan)
            # The store's files, seen from where no network is between: this process is in none.
            inside = Place(str(folder / "sftp" / "hub"))
            killed = run_with_kills(nodes, plan, kills, inside)
    return killed.kills.total(), killed.seconds, replay(inside, nodes, folder / "copy")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco_netns")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=PLAN.rounds)
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 3
    plan = PLAN._replace(rounds=options.rounds)
    with ends_on_sigterm(), tempfile.TemporaryDirectory() as folder:
        kills, seconds, report = run(Path(folder), plan, options.kills)
    print(f"{kills} kills in {seconds:.1f} s, {DELAY_MS} ms each way, {LOSS_PERCENT} % lost")
    print(json.dumps(report, indent=1))
    return 0 if is_fine(report) else 1


if __name__ == "__main__":
    sys.exit(main())
