"""Model and optimizer in shards: what goes into them, and back from them onto any number of ranks.

The shards hold tensors only, under full names (`model.<name>`, `optimizer.state.<name>.<part>`,
`ema.<name>`); everything else is in `trainer.pt`. `torch.distributed.checkpoint` writes each rank's
part and cuts the parts anew when another number of ranks reads them. Then each rank notes size and
SHA-256 of its shards in its own file: these bind them to the step. The rename that gives the
directory its name publishes all of it at once.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpttool.errors import WriteError
from ckpttool.io.durable import write_error
from trainer_core.loop.stepping import named_parameters
from trainer_core.resuming.fitting import places
from trainer_core.resuming.loading import load_state
from trainer_core.resuming.parts import Parts
from trainer_core.saving.savable import CheckpointError
from trainer_core.site.per_rank import BUFFERS
from trainer_core.site.per_rank import KEY as RANKS
from trainer_core.site.ranks import Site
from trainer_core.wrappers import own_state, plain_namer, plain_state

KEY = "sharded"
SHARDS = "shards"
TRAINER_NAME = "trainer.pt"
_SECTIONS = ("model", "ema")
_MOST_RANKS = 100_000
_CHUNK_BYTES = 1 << 20


def rank_file_name(rank: int) -> str:
    """`rank_00003.pt` for 3."""
    return f"rank_{rank:05d}.pt"


class ShardedState(dict[str, Any]):
    """A checkpoint without its model and optimizer, which are in the shards of `path`.

    `Trainer.resume` reads them from there, each rank its own part.
    """

    def __init__(self, state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        super().__init__(state)
        self.path = os.fspath(path)


# Taking a checkpoint apart


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, without wrappers, by its place."""
    named = named_parameters(model, optimizer).items()
    plain = plain_namer(model)
    names = {id(parameter): plain(name) for name, parameter in named}
    return [names[id(one)] for group in optimizer.param_groups for one in group["params"]]


def is_sharded(state: Any) -> bool:
    """Whether a checkpoint is one that `Trainer.state_dict` made of a sharded model."""
    return isinstance(state, dict) and isinstance(state.get(KEY), Mapping)


def take_apart(
    state: Mapping[str, Any], rank: int, world_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors that go into shards, nested as their names say; and what `trainer.pt` holds.

    Buffers that each rank has for itself are rank 0's in the shards. Raises CheckpointError for a
    shard where none can be kept.
    """
    names = state[KEY]["parameters"]
    tensors: dict[str, Any] = {}
    rest = {key: value for key, value in state.items() if key != BUFFERS}
    about: dict[str, Any] = {"world_size": world_size, "parameters": names}
    about["files"] = [TRAINER_NAME, *map(rank_file_name, range(world_size))]
    for section in _SECTIONS:
        if _holds_tensors(state.get(section)):
            tensors[section], about[section] = _divided(state[section])
            rest[section] = {}
    if rank:
        for name in state.get(BUFFERS) or ():
            del tensors["model"][name]
    optimizer = state["optimizer"]
    kept, more = {}, {}
    for place, entry in optimizer["state"].items():
        kept[names[place]], more[place] = _divided(entry)
    about["optimizer"] = {"param_groups": optimizer["param_groups"], "state": more}
    tensors["optimizer"] = {"state": {name: entry for name, entry in kept.items() if entry}}
    rest |= {"optimizer": {}, KEY: about}
    _refuse_shards(rest, "")
    return tensors, rest


def _holds_tensors(section: Any) -> bool:
    return isinstance(section, Mapping) and any(map(torch.is_tensor, section.values()))


def _divided(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {name: value for name, value in entry.items() if torch.is_tensor(value)}
    return tensors, {name: value for name, value in entry.items() if name not in tensors}


def _refuse_shards(value: Any, path: str) -> None:
    if hasattr(value, "device_mesh"):
        words = "is sharded, which only model, averaged model and optimizer state can be"
        raise CheckpointError(f"{path}: {words}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_shards(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _refuse_shards(item, f"{path}[{number}]")


def staged(tensors: dict[str, Any]) -> dict[str, Any]:
    """A copy on the CPU, to be saved from while training goes on."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    copies: dict[str, Any] = BlockingAsyncStager().stage(tensors)
    return copies


def local_bytes(tensors: Any) -> int:
    """Bytes that this rank has of nested tensors."""
    if isinstance(tensors, Mapping):
        return sum(map(local_bytes, tensors.values()))
    local = tensors.to_local() if hasattr(tensors, "to_local") else tensors
    return int(local.nbytes)


def write_shards(tensors: dict[str, Any], path: Path, site: Site, *, sync: bool) -> list[str]:
    """Writes this rank's part into the directory `path`; then rank 0 writes `.metadata`.

    Gives the names of the files that this rank wrote. All ranks call it. What goes wrong on one of
    them all raise, as WriteError where the system refused.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from trainer_core.site.writer import Writer

    writer = Writer(path, sync)
    with _quiet():
        try:
            save(tensors, storage_writer=writer, process_group=site.group)
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            words = f"{type(cause).__name__}: {cause}"
            if isinstance(cause, OSError):
                failed = WriteError(path, f"cannot write (rank {rank}): {cause.strerror or words}")
                failed.errno = cause.errno
                raise failed from error
            raise RuntimeError(f"rank {rank} could not write its shard: {words}") from error
    return writer.shards


def digests_of(path: Path, shards: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`size` (bytes) and `sha256` (hexadecimal) of each of these files in the directory `path`.

    Read back, not taken while writing: it is what the file system has. Raises WriteError.
    """
    try:
        return {name: _digest(path / name) for name in shards}
    except OSError as error:
        raise write_error(path, error) from error


def _digest(path: Path) -> dict[str, Any]:
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            digest.update(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


# Putting one together


def read_step(path: str | os.PathLike[str]) -> ShardedState:
    """All of a sharded step but what is in its shards. Raises CheckpointError, OSError."""
    file = os.path.join(path, TRAINER_NAME)
    state = load_state(file)
    about = state.get(KEY)
    if not isinstance(about, Mapping) or not isinstance(about.get("optimizer"), Mapping):
        raise CheckpointError(f"{file}: does not say what the shards hold")
    size = about.get("world_size")
    if type(size) is not int or not 0 < size <= _MOST_RANKS:
        raise CheckpointError(f"{file}: does not say how many ranks it had")
    ranks = [load_state(os.path.join(path, rank_file_name(rank))) for rank in range(size)]
    own = ranks[0]
    state |= {"rng": own.get("rng"), "data": own.get("data")}
    state[RANKS] = {str(rank): section for rank, section in enumerate(ranks)}
    groups = about["optimizer"].get("param_groups")
    state["optimizer"] = {"state": {}, "param_groups": groups}
    return ShardedState(state, path)


def filled(state: ShardedState, parts: Parts, site: Site | None) -> dict[str, Any]:
    """The checkpoint with its tensors, each laid out as the one of this run that it belongs to.

    All ranks of `site` call it; None for a process alone. A tensor that belongs to none comes as
    a whole. Nothing of this run is changed. Raises CheckpointError.
    """
    from trainer_core.site.metadata_trust import read_metadata

    metadata = read_metadata(state.path)
    about = state[KEY]
    wanted = _wanted(metadata.state_dict_metadata, about, parts)
    _read(wanted, state.path, metadata, site)
    names, optimizer = about["parameters"], about["optimizer"]
    entries = {place: dict(entry) for place, entry in optimizer["state"].items()}
    for place, name in enumerate(names):
        if name in wanted["optimizer"]["state"]:
            entries.setdefault(place, {}).update(wanted["optimizer"]["state"][name])
    full = {key: value for key, value in state.items() if key != KEY}
    full["optimizer"] = {"state": entries, "param_groups": optimizer["param_groups"]}
    for section in _SECTIONS:
        if section in about:
            full[section] = {**wanted.get(section, {}), **about[section]}
    return full


def _wanted(entries: Mapping[str, Any], about: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Memory for every tensor of the shards, nested like them."""
    own = {"model": plain_state(parts.model)}
    if isinstance(parts.ema, torch.nn.Module):
        own["ema"] = plain_state(parts.ema)
    groups = parts.optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    by_name = dict(zip(about["parameters"], parameters, strict=False))
    wanted: dict[str, Any] = {"optimizer": {"state": {}}}
    for key, entry in entries.items():
        if not hasattr(entry, "properties"):
            continue  # an object, which would have to be unpickled
        section, _, name = key.partition(".")
        if section == "optimizer":
            name, _, part = name.removeprefix("state.").rpartition(".")
            state = wanted["optimizer"]["state"].setdefault(name, {})
            state[part] = _memory(entry, by_name.get(name))
        elif section in _SECTIONS:
            like = own.get(section, {}).get(name)
            wanted.setdefault(section, {})[name] = _memory(entry, like)
    return wanted


def _memory(entry: Any, like: Any) -> torch.Tensor:
    dtype = entry.properties.dtype
    if hasattr(like, "device_mesh") and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _read(wanted: dict[str, Any], path: str, metadata: Any, site: Site | None) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainer_core.site.writer import Reader

    group = None if site is None else site.group
    try:
        with _quiet():
            reader = Reader(path, metadata)
            load(wanted, storage_reader=reader, process_group=group, no_dist=site is None)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        words = f"the shards cannot be read (rank {rank}): {type(cause).__name__}: {cause}"
        raise CheckpointError(f"{path}: {words}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the shards cannot be read: {error}") from error


def laid_out(state: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """A checkpoint of whole tensors, with each cut as the one of this run that it belongs to."""
    full = dict(state)
    for section, module in (("model", parts.model), ("ema", parts.ema)):
        if isinstance(module, torch.nn.Module) and isinstance(state.get(section), Mapping):
            own = module.state_dict()
            saved = own_state(state[section], module)
            full[section] = {name: _cut(value, own.get(name)) for name, value in saved.items()}
    optimizer = state["optimizer"]
    entries = dict(optimizer["state"])
    for key, _, parameter in places(optimizer, parts.optimizer):
        if isinstance(entries.get(key), Mapping):
            entry = entries[key].items()
            entries[key] = {part: _cut(value, parameter) for part, value in entry}
    full["optimizer"] = {**optimizer, "state": entries}
    return full


def _cut(value: Any, like: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh")
    if not plain or not hasattr(like, "device_mesh") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    whole = value.detach().to(mesh.device_type)
    return distribute_tensor(whole, mesh, like.placements, src_data_rank=None)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that it takes one process for one process, and of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
