"""What torch says of a sharded step, as JSON on standard output: `python torch_says_sharded.py PATH`.

Run in a process of its own, so that nothing is shared with what is tested.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def main(path: str) -> None:
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    tensors: dict[str, Any] = {}
    objects: list[str] = []
    state: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects.append(name)
            continue
        chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    places = [
        [index.fqn, place.relative_path, place.offset, place.length]
        for index, place in metadata.storage_data.items()
    ]
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, tensor in state.items():
        flat = tensor.contiguous().flatten().view(torch.uint8)
        tensors[name]["bytes"] = flat.numpy().tobytes().hex()
    print(json.dumps({"tensors": tensors, "objects": objects, "places": sorted(places)}))


if __name__ == "__main__":
    main(sys.argv[1])
