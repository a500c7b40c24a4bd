"""What each rank of a run has for itself: random numbers, the place in the data, some buffers.

They are kept by global rank, and a rank of a run of the same size gets its own back, bit for bit.
In a run of another size model and optimizer are exact, and this is the rule for the rest:

- Random numbers: a rank that was there before goes on with its own. A new rank r is seeded from
  the SHA-256 of what rank r modulo the old size had, and of r and both sizes.
- Data, where a DistributedSampler shares out each pass (or a process is alone): every rank goes on
  in the same pass, at the batch by which as many samples were used by all; rounded down, so that
  some may be seen twice.
- Data, otherwise: a rank that was there before goes on at its own place; a new one begins a pass.
- Buffers that no wrapper keeps alike (batch statistics): those of rank 0.
- Attributes of the model (`trainer_core.census.census`): a rank's own; a new rank r has those
  of rank r modulo the old size, but its generators are as the program has made them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trainer_core.census.census import without_generators
from trainer_core.rng import plain_host_state
from trainer_core.wrappers import plain_namer, plain_state

KEY = "ranks"
BUFFERS = "buffers"
ATTRIBUTES = "attributes"
_SHARED = "shared"


def own_section(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint of this process that is its own.

    `rng`, `data`, `attributes`, and `generators`: those that dataset and collate function draw
    from, where there are some.
    """
    data = dict(state.get("data") or {})
    generators = data.pop("generators", None)
    section = {"rng": state.get("rng"), "data": data, "generators": generators}
    if ATTRIBUTES in state:
        section[ATTRIBUTES] = state[ATTRIBUTES]
    return section | ({BUFFERS: state[BUFFERS]} if state.get(BUFFERS) else {})


def more_sections(model: torch.nn.Module, loader: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of a run of several ranks needs besides, to be told apart by rank.

    That the `data` are shared out; and the buffers that every rank has for itself: all but those
    that DistributedDataParallel copies from rank 0 before each forward.
    """
    sections: dict[str, Any] = {}
    if shares_out(loader):
        sections["data"] = {**data, _SHARED: True}
    if not getattr(model, "broadcast_buffers", False):
        own = plain_state(model)
        plain = plain_namer(model)
        names = {plain(name) for name, _ in model.named_buffers()}
        sections[BUFFERS] = {
            name: own[name]
            for name in own
            if name in names and not hasattr(own[name], "device_mesh")
        }
    return sections


class Taken(NamedTuple):
    """A checkpoint as one rank goes on from it, and what of it could not be kept, in words."""

    state: dict[str, Any]
    unkept: list[str]


def take_own(state: Mapping[str, Any], rank: int, size: int, loader: Any) -> Taken:
    """The checkpoint for rank `rank` of `size` that goes through `loader`.

    What comes from a run of one process counts as that of a single rank.
    """
    sections = _sections(state)
    old = len(sections)
    if old == size:
        buffers = sections[rank].get(BUFFERS) or {}
        taken = _with(state, sections[rank])
        return Taken({**taken, "model": {**taken["model"], **buffers}}, [])
    section = dict(sections[rank] if rank < old else sections[rank % old])
    if rank >= old:
        section["rng"] = _seeded_anew(section["rng"], rank, old, size)
        if ATTRIBUTES in section:
            section[ATTRIBUTES] = without_generators(section[ATTRIBUTES])
    shared = old == 1 or (section.get("data") or {}).get(_SHARED) is True
    words = _place(section, rank, old, size, shared and (size == 1 or shares_out(loader)))
    unkept = (
        f"ranks: {old} saved, {size} here: model and optimizer are exact; {_rng_words(old, size)}; "
        f"{words}"
    )
    return Taken(_with(state, section), [unkept])


def _sections(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """By rank. What makes no sense is as if one process had saved it."""
    ranks = state.get(KEY)
    if isinstance(ranks, Mapping) and ranks:
        found = [ranks.get(str(number)) for number in range(len(ranks))]
        sections = [section for section in found if isinstance(section, Mapping)]
        if len(sections) == len(ranks):
            return sections
    return [own_section(state)]


def _with(state: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    data = dict(section.get("data") or {})
    if section.get("generators") is not None:
        data["generators"] = section["generators"]
    own = {"rng": section.get("rng"), "data": data or None}
    if ATTRIBUTES in section:
        own[ATTRIBUTES] = section[ATTRIBUTES]
    return {key: value for key, value in {**state, **own}.items() if key not in (KEY, BUFFERS)}


def _rng_words(old: int, size: int) -> str:
    low, high = min(size, old), max(size, old) - 1
    which = f"rank {low}" if low == high else f"ranks {low} to {high}"
    if size < old:
        return f"the random numbers of {which} are not gone on with"
    return f"{which}: new random numbers, seeded from the saved ones"


def _place(section: dict[str, Any], rank: int, old: int, size: int, shared: bool) -> str:
    """Changes the place in the data to that of another run size; says so."""
    place = dict(section.get("data") or {})
    batch = place.get("batch")
    if shared and type(batch) is int and batch >= 0:
        # What the place remembers of its last batch is true only of its old shard.
        section["data"] = {**place, "batch": batch * old // size}
        section["data"].pop("last", None)
        exact = "" if batch * old % size == 0 else ", rounded down: some samples come again"
        return (
            f"data: approximate: batch {batch * old // size} of the pass instead of {batch}{exact}"
        )
    place.pop("last", None)
    section["data"] = place
    if rank >= old:
        # Only the number of the pass: what belongs to the place is another rank's.
        section["data"] = {key: place[key] for key in ("kind", "epoch") if key in place}
        section["data"] |= {"batch": 0} if section["data"] else {}
        section["generators"] = None
    return "data: approximate: each rank keeps its own place in its pass, new ranks begin one"


def shares_out(loader: Any) -> bool:
    """Whether a DistributedSampler, or one like it, gives each rank its part of every pass."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    parts = getattr(loader, "sampler", None), batch_sampler, inner
    return any(hasattr(part, "num_replicas") and hasattr(part, "rank") for part in parts)


def _seeded_anew(saved: Any, rank: int, old: int, size: int) -> dict[str, Any]:
    """What `capture_rng_state` would give after everything was seeded with a number of this rank's.

    Depends on `saved` and the three numbers only.
    """
    digest = hashlib.sha256(f"rank {rank} of {size}, from {old}".encode())
    _digest_of(saved, digest)
    seed = int.from_bytes(digest.digest()[:8], "little")
    state: dict[str, Any] = {
        "python": random.Random(seed).getstate(),  # noqa: S311 - not for secrets
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if isinstance(saved, Mapping) and "numpy" in saved:
        state |= _numpy_state(seed)
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        generators = [torch.Generator(device=f"cuda:{index}") for index in devices]
        state["cuda"] = [one.manual_seed(seed).get_state() for one in generators]
    return state


def _numpy_state(seed: int) -> dict[str, Any]:
    try:
        import numpy
    except ImportError:
        return {}
    generator = numpy.random.RandomState(seed % (1 << 32))
    return plain_host_state({"numpy": generator.get_state(legacy=False)})


def _digest_of(value: Any, digest: Any) -> None:
    """Feeds plain values and tensors to a hash, in their order."""
    if isinstance(value, torch.Tensor):
        digest.update(repr(value.tolist()).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _digest_of(item, digest)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest_of(item, digest)
    else:
        digest.update(repr(value).encode())
