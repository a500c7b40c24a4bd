"""A model in full on one rank, where several ranks train it together: gathered, and given back."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from trainer_core.site.ranks import Site
from trainer_core.wrappers import plain_namer, plain_state


class WholeModel(torch.nn.Module):
    """Stands for the model of a site: copies of all its tensors, whole and on the CPU.

    `step`: the local step that they are of. Tied weights are one tensor here too.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.step = 0
        self._tensors = tensors

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]  # no options
        """The tensors, shared, under names without wrappers."""
        return dict(self._tensors)


class Gathering:
    """Moves a site's model to its rank 0 and back. All ranks call each method, in one order."""

    def __init__(self, model: torch.nn.Module, site: Site) -> None:
        self._site = site
        named = chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        plain = plain_namer(model)
        self._same = {plain(name): id(tensor) for name, tensor in named}
        self.tensors: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def gather(self, model: torch.nn.Module) -> None:
        """Makes `tensors` of rank 0 the model's, in place; on other ranks it stays empty.

        Replicated tensors are rank 0's own. One sharded tensor at a time is put together.
        """
        seen: dict[Any, torch.Tensor] = {}
        for name, tensor in plain_state(model).items():
            # Also where rank 0 has it already: all ranks take part, tied or not.
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if not self._site.leads:
                continue
            same = self._same.get(name, name)
            if same in seen:
                self.tensors[name] = seen[same]
            elif name in self.tensors:
                self.tensors[name].copy_(whole)
            else:
                self.tensors[name] = whole.detach().to("cpu", copy=True).contiguous()
            seen[same] = self.tensors[name]

    @torch.no_grad()
    def spread(self, model: torch.nn.Module) -> None:
        """Gives floating tensors of rank 0 to all ranks, bit for bit; each keeps its own part."""
        done: set[Any] = set()
        for name, like in plain_state(model).items():
            same = self._same.get(name, name)
            if same in done or not like.is_floating_point():
                continue
            done.add(same)
            whole = self._site.share(self.tensors[name] if self._site.leads else None)
            _set(like.detach(), whole)


def _set(like: Any, whole: torch.Tensor) -> None:
    if not hasattr(like, "device_mesh"):
        like.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    # Every rank has all of it, so that none needs to be sent a part.
    there = whole.to(mesh.device_type)
    part = distribute_tensor(there, mesh, like.placements, src_data_rank=None)
    like.to_local().copy_(part.to_local())
