"""What the outer loop costs its store: requests and bytes, for 1,000 nodes, against the protocol
that this one follows (see "On paper" for both).

The formulas are checked, to the last request and byte, against what real coordinators of 10 and
of 30 nodes did on a store in memory, whose counters count each request; then they are worked out
for 1,000 nodes and a model of 150 million parameters, the smallest of the DiLoCo paper.

On paper
--------

n nodes, the master among them; K kept commits (`keep_commits`); sizes in bytes: D of a delta, W of
the weights, M of the outer momentum, C of a commit, P of the pointer, L of the lease file; H of
what is read of a tensor file for its header (64 KiB, or all of a smaller file).

A round, for each node:

    is the delta there already, and the Hub still? put it       size 2, put 1           writes D
    poll that finds a new model: pointer, commit, header, body  read 3, fetch 1         P+C+H+W

and for the master besides:

    is the lease still mine? (before, before the commit, and once more by the next look)
                                                                entries 3, read 3       3 L
    look for deltas, twice: the second finds nothing new        tree 2
    headers, then bodies                                        read n, fetch n         n (H+D)
    weights and momentum, unless they are there already         size 2, put 2           writes W+M
    raise the lease's counter, move the pointer                 write 2                 writes L+P
    is the pointer still right? where a look found nothing      read 1                  P
    the commit                                                  create 1                writes C
    what do the K kept commits need? after the commit, and for the next look
                                                                read 2K                 2 K C
    clean up: the oldest commit, its n deltas, weights, momentum
                                                                entries 2, read 1, remove n+3      C

A poll that finds nothing new: read 1, P bytes. A master's look that finds nothing new: lease
entries 1 and read 1, L bytes; tree 1; pointer read 1, P bytes. A tree is one request for each 1,000
files on S3 and the Hub: with K kept commits there are up to (K+1) n deltas below it. (In memory it
counts as one, and so it does in the formulas that are checked; then it is worked out.)

The protocol that this one follows: each node puts its delta, and polls `step_count.json` (P), and
fetches the weights if it is newer; the master overwrites weights and metadata (two requests), and
each of its polls lists every node's folder and downloads every delta there is. Deltas are never
removed, so after r rounds these are n r. (Favourable to it: nothing for lists of files, no retries,
no request for a momentum, which it keeps to itself.)

Bytes are the contents of files; those of a listing's answer are not counted for either.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.measure import Row
from trainer_core.diloco.commit import commit_name
from trainer_core.diloco.commits import POINTER
from trainer_core.diloco.coordinator import DumbDiLoCoCoordinator
from trainer_core.diloco.deltas import NODES
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import FIRST_READ

NODES_BIG = 1_000
PARAMETERS = 150_000_000
KEEP = 3
ROUNDS = 20
POLLS = 100
"""Of each node and of the master in one round: for example every 5 s, with rounds of 500 s."""


class Sizes(NamedTuple):
    """Bytes of the files of one round; `older` are the kept commits and the one that goes."""

    delta: int
    weights: int
    momentum: int
    pointer: int
    lease: int
    commit: int
    before: int
    """The commit that workers find: in the order here, that of the round before."""
    kept: int
    """All kept commits together, the newest among them."""
    oldest: int
    """The commit that is cleaned away."""

    @property
    def delta_header(self) -> int:
        """What is read of a delta to judge it."""
        return min(self.delta, FIRST_READ)

    @property
    def weights_header(self) -> int:
        """What is read of the weights before they are fetched."""
        return min(self.weights, FIRST_READ)


class Cost(NamedTuple):
    """Requests by the store's methods, and the bytes that they moved."""

    requests: dict[str, int]
    read: int
    written: int

    @property
    def total(self) -> int:
        """Requests of all kinds."""
        return sum(self.requests.values())


def round_cost(n: int, sizes: Sizes, keep: int = KEEP) -> Cost:
    """All nodes' requests in a round in which each polls once, as the formula says."""
    requests = {
        "size": 2 * n + 2,
        "put": n + 2,
        "read": 3 * n + 3 + n + 2 * keep + 1 + 1,
        "fetch": 2 * n,
        "entries": 3 + 2,
        "tree": 2,
        "write": 2,
        "create": 1,
        "remove": n + 3,
    }
    polls = n * (sizes.pointer + sizes.weights_header + sizes.weights)
    commits = (n - 1) * sizes.before + sizes.commit + 2 * sizes.kept + sizes.oldest
    deltas = n * (sizes.delta_header + sizes.delta)
    written = n * sizes.delta + sizes.weights + sizes.momentum + sizes.lease + sizes.pointer
    small = 3 * sizes.lease + sizes.pointer
    return Cost(requests, polls + commits + deltas + small, written + sizes.commit)


def look_cost(sizes: Sizes) -> Cost:
    """A master's look that finds nothing new."""
    return Cost({"entries": 1, "read": 2, "tree": 1}, sizes.lease + sizes.pointer, 0)


def on_s3(cost: Cost, n: int, keep: int = KEEP) -> Cost:
    """The same where a listing gives at most 1,000 names at once."""
    pages = math.ceil((keep + 1) * n / 1_000)
    requests = {
        name: count * (pages if name == "tree" else 1) for name, count in cost.requests.items()
    }
    return cost._replace(requests=requests)


def poll_cost(sizes: Sizes) -> Cost:
    """A node's poll that finds nothing new."""
    return Cost({"read": 1}, sizes.pointer, 0)


def seed_round_cost(n: int, sizes: Sizes, r: int) -> Cost:
    """The other protocol's: all but the master's own polls."""
    requests = {"put": n + 2, "read": n, "fetch": n}
    read = n * (sizes.pointer + sizes.weights)
    return Cost(requests, read, n * sizes.delta + sizes.weights + sizes.pointer)


def seed_look_cost(n: int, sizes: Sizes, r: int) -> Cost:
    """One poll of its master after r rounds: it downloads every delta."""
    return Cost({"folders": 1, "entries": n, "fetch": n * r}, n * r * sizes.delta, 0)


class Site:
    """Real coordinators of n nodes, each with counters of its own, on one store in memory."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._url = f"memory://{secrets.token_hex(8)}"
        self._step = 0
        self._models = [_model() for _ in range(n)]
        self._stores = [Store.open(self._url) for _ in range(n)]
        names = [f"node-{number:04d}" for number in range(n)]
        options: dict[str, Any] = {
            "synchronous": True,
            "quorum": n,
            "keep_commits": KEEP,
            "inner_steps": 1,
        }
        options |= {"lease_seconds": 3600.0, "final_window": "report"}
        self.coordinators = [
            DumbDiLoCoCoordinator(
                self._models[i], self._stores[i], node_id=names[i], role=role, **options
            )
            for i, role in enumerate(["worker"] * (n - 1) + ["master"])
        ]
        self.commits: dict[int, int] = {}

    def round(self) -> None:
        """Each node makes a step and a boundary, the master last, which commits."""
        self._step += 1
        torch.manual_seed(self._step)
        for coordinator, model in zip(self.coordinators, self._models, strict=True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            coordinator.after_optimizer_step(model, self._step)
        newest = self.coordinators[-1].outer_step
        assert newest is not None
        self.commits[newest] = self._size(commit_name(newest))

    def sizes(self) -> Sizes:
        """Of what the last round left, looked at by a store that nobody counts."""
        new = self.coordinators[-1].outer_step
        assert new is not None
        watcher = Store.open(self._url)
        found = {entry.name: entry.size for entry in watcher.entries("global")}
        model = next(name for name in found if name.startswith(f"model-{new:012d}"))
        momentum = next(name for name in found if name.startswith(f"momentum-{new:012d}"))
        deltas = watcher.entries(f"{NODES}/node-0000")
        lease = watcher.entries("global/lease")[0].size
        kept = sum(self.commits[step] for step in range(new - KEEP + 1, new + 1))
        ends = self.commits[new], self.commits[new - 1], kept, self.commits[new - KEEP]
        sizes = found[model], found[momentum], self._size(POINTER), lease
        return Sizes(deltas[-1].size, *sizes, *ends)

    def deltas(self) -> int:
        """How many lie on the store."""
        watcher = Store.open(self._url)
        return sum(len(watcher.entries(f"{NODES}/{node}")) for node in watcher.folders(NODES))

    def look(self) -> Cost:
        """One look of the master, which finds nothing."""
        with self.counted() as cost:
            # Its lane does this at each poll; here without the lane's clock.
            assert self.coordinators[-1]._master.round() is None
        return cost[0]

    def poll(self) -> Cost:
        """One poll of a worker that has the newest model."""
        known = self.coordinators[-1].outer_step
        assert known is not None
        with self.counted() as cost:
            assert self.coordinators[0]._reader.newer_than(known) is None
        return cost[0]

    @contextmanager
    def counted(self) -> Iterator[list[Cost]]:
        """What all nodes did meanwhile, as the one element of the list."""
        before, cost = self._total(), list[Cost]()
        yield cost
        after = self._total()
        requests = {
            name: count - before.requests.get(name, 0)
            for name, count in after.requests.items()
            if count != before.requests.get(name, 0)
        }
        cost.append(Cost(requests, after.read - before.read, after.written - before.written))

    def _total(self) -> Cost:
        requests: Counter[str] = Counter()
        for store in self._stores:
            requests.update(store.requests)
        read = sum(store.bytes_read for store in self._stores)
        return Cost(dict(requests), read, sum(store.bytes_written for store in self._stores))

    def _size(self, name: str) -> int:
        size = Store.open(self._url).size(name)
        assert size is not None
        return size

    def __enter__(self) -> Site:
        for coordinator in reversed(self.coordinators):  # the master first
            coordinator.start()
        return self

    def __exit__(self, *_: object) -> None:
        for coordinator in self.coordinators:
            coordinator.stop()


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(16, 16)


class Compared(NamedTuple):
    """Counted and worked out, for a round, a look and a poll; and the commit's bytes."""

    counted: tuple[Cost, Cost, Cost]
    formula: tuple[Cost, Cost, Cost]
    deltas: int
    commit: int


def compare(n: int) -> Compared:
    """Runs n nodes until old commits are cleaned away in each round, and counts one round more."""
    with Site(n) as site:
        for _ in range(KEEP + 3):
            site.round()
        with site.counted() as cost:
            site.round()
        sizes = site.sizes()
        counted = cost[0], site.look(), site.poll()
        formula = round_cost(n, sizes), look_cost(sizes), poll_cost(sizes)
        return Compared(counted, formula, site.deltas(), sizes.commit)


def _big(n: int, small: Compared, large: Compared, between: int) -> Sizes:
    """Sizes at 1,000 nodes; a commit grows by the same bytes with each node."""
    slope = (large.commit - small.commit) / between
    commit = math.ceil(large.commit + slope * (n - 30))
    tensors = 4 * PARAMETERS
    rest = commit, commit, KEEP * commit, commit
    return Sizes(tensors, tensors, tensors, 300, 150, *rest)


def run() -> list[Row]:
    """The rows: what was checked, then what 1,000 nodes cost."""
    small, large = compare(10), compare(30)
    off = sum(one.counted != one.formula for one in (small, large))
    rows = [Row("DiLoCo: formulas off from what 10 and 30 nodes did", off, None, "", at_most=0)]
    n, r = NODES_BIG, ROUNDS
    sizes = _big(n, small, large, 20)
    ours, theirs = on_s3(round_cost(n, sizes), n), seed_round_cost(n, sizes, r)
    look, their_look = on_s3(look_cost(sizes), n), seed_look_cost(n, sizes, r)
    poll = poll_cost(sizes)
    words = f"DiLoCo, {n:,} nodes: "
    total = ours.total + POLLS * (n * poll.total + look.total)
    their_total = theirs.total + POLLS * (n * poll.total + their_look.total)
    moved = ours.read + ours.written + POLLS * (n * poll.read + look.read)
    their_moved = theirs.read + theirs.written + POLLS * (n * poll.read + their_look.read)
    last = f"round {r} with {POLLS} polls"
    return [
        *rows,
        Row(f"{words}requests of a node's poll", poll.total, poll.total, "requests"),
        Row(f"{words}requests of a master's look", look.total, their_look.total, "requests"),
        Row(f"{words}bytes of a master's look", look.read, their_look.read, "B"),
        Row(f"{words}requests of {last}", total, their_total, "requests", at_most=1),
        Row(f"{words}bytes of {last}", moved / 1e12, their_moved / 1e12, "TB", at_most=1),
        Row(
            f"{words}deltas kept after {r} rounds",
            KEEP * n * sizes.delta / 1e12,
            r * n * sizes.delta / 1e12,
            "TB",
        ),
    ]
