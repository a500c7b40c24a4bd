"""Works out a run's outer state anew, from the deltas and the order of the ledger alone.

`python -m benchmarks.diloco_replay FOLDER` reads the folder of a shared store in which every commit
and delta was kept, and prints what it found as JSON. It shares no code with the coordinator: it
knows the files, and the outer steps are `torch.optim.SGD(nesterov=True)`.

With `--diary FILE` (any number of them) it looks for every upload that was acknowledged: each must
be in the ledger once, or lie in the store, newer than what the ledger has dealt with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco_replay")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--diary", type=Path, action="append", default=[])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    commits = [json.loads(path.read_bytes()) for path in commit_files(options.folder)]
    report = replayed(options.folder, commits) | audited(options.folder, commits, options.diary)
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] or report["lost"] or report["twice"] else 0


def commit_files(folder: Path) -> list[Path]:
    """The ledger's files in their order. Raises ValueError where one is missing."""
    paths = sorted((folder / "global" / "commits").glob("*.json"))
    if not paths or [int(path.stem) for path in paths] != list(range(len(paths))):
        raise ValueError(f"{folder} has no whole ledger: {[path.stem for path in paths]}")
    return paths


def replayed(folder: Path, commits: list[dict[str, Any]]) -> dict[str, Any]:
    """Every outer step anew, each compared with the weights and momentum that were published."""
    problems = _chain(folder, commits)
    state = load_file(folder / commits[0]["model"]["name"])
    weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in state.items()}
    lr, momentum = commits[-1]["outer_lr"], commits[-1]["outer_momentum"]
    optimizer = torch.optim.SGD(list(weights.values()), lr, momentum, nesterov=momentum > 0)
    applied = differing = 0
    for commit in commits[1:]:
        for name, gradient in _mean(folder, commit, problems).items():
            weights[name].grad = gradient
        optimizer.step()
        applied += len(commit["applied"])
        differing += _differing(folder, commit["model"], dict(weights))
        if momentum:
            buffers = {n: optimizer.state[w]["momentum_buffer"] for n, w in weights.items()}
            differing += _differing(folder, commit["momentum"], buffers)
    if differing:
        problems.append(f"{differing} values differ from what the ledger gives")
    last = hashlib.sha256(b"".join(_raw(w) for _, w in sorted(weights.items()))).hexdigest()
    facts = {"outer_steps": len(commits) - 1, "applied": applied, "differing_values": differing}
    return {**facts, "weights_sha256": last, "problems": problems}


def audited(folder: Path, commits: list[dict[str, Any]], diaries: list[Path]) -> dict[str, Any]:
    """Which deltas were applied twice, and which acknowledged ones are nowhere."""
    entries = [_key(entry) for commit in commits for entry in commit["applied"]]
    refused = {_key(entry) for commit in commits for entry in commit["refused"]}
    twice = [list(one) for one, count in Counter(entries).items() if count > 1]
    twice += [list(one) for one in set(entries) & refused]
    shas = {_key(entry): entry["sha256"] for commit in commits for entry in commit["applied"]}
    marks, acknowledged, waiting, lost = commits[-1]["watermarks"], 0, 0, []
    for line in _lines(diaries):
        acknowledged += 1
        match = re.fullmatch(r"nodes/([^/]+)/delta_(\d+)\.safetensors", line["name"])
        assert match is not None
        key = match[1], int(match[2])
        if shas.get(key) == line["sha256"]:
            continue
        is_new = key not in shas and key not in refused and key[1] > marks.get(key[0], -1)
        if is_new and _sha256(folder / line["name"]) == line["sha256"]:
            waiting += 1
        else:
            lost.append(line["name"])
    counts = {"acknowledged": acknowledged, "waiting": waiting, "refused": len(refused)}
    return {**counts, "twice": twice, "lost": lost}


def _chain(folder: Path, commits: list[dict[str, Any]]) -> list[str]:
    """Whether each commit names the hash of the one before, and fencing numbers only rise."""
    problems, before, fence = [], None, 0
    for path, commit in zip(commit_files(folder), commits, strict=True):
        if commit["previous"] != before:
            problems.append(f"{path.name} does not follow from the commit before it")
        if commit["fence"] < fence:
            problems.append(f"{path.name} has a lower fencing number than one before it")
        before, fence = hashlib.sha256(path.read_bytes()).hexdigest(), commit["fence"]
    return problems


def _mean(folder: Path, commit: dict[str, Any], problems: list[str]) -> Tensors:
    """The weighted mean of a commit's deltas, added up in its order; each node counts once."""
    total: Tensors = {}
    weights: dict[str, float] = {}
    for entry in commit["applied"]:
        path, weight = folder / entry["name"], entry["weight"]
        if _sha256(path) != entry["sha256"]:
            problems.append(f"{entry['name']} is not the file that the ledger names")
        weights[entry["node_id"]] = weight
        for key, tensor in load_file(path).items():
            total.setdefault(key, torch.zeros_like(tensor)).add_(tensor, alpha=weight)
    return {key: tensor / sum(weights.values()) for key, tensor in total.items()}


def _differing(folder: Path, file: dict[str, Any], expected: Tensors) -> int:
    """How many values of a published file are not, bit for bit, the expected ones."""
    found = load_file(folder / file["name"])
    if found.keys() != expected.keys():
        return sum(tensor.numel() for tensor in expected.values())
    pairs = ((found[name], expected[name].detach()) for name in expected)
    return sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)


def _key(entry: dict[str, Any]) -> tuple[str, int]:
    return entry["node_id"], entry["local_step"]


def _lines(diaries: list[Path]) -> list[dict[str, Any]]:
    """Whole lines only: a process that was killed within one has not acknowledged it."""
    texts = [path.read_text() for path in diaries if path.exists()]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def _raw(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return raw


if __name__ == "__main__":
    sys.exit(main())
