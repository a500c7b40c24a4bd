"""Batches and losses: what a loader may give, how the model is called with it, what comes back."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def endless(loader: Iterable[Any], first: Iterator[Any]) -> Generator[Any, None, None]:
    """Batches without end: `first` to its end, then `loader` from its beginning, again and again.

    Ends where there is no more to come: after `first` if the loader is itself an iterator, and when
    a later pass gives nothing (a generator behind a DataLoader, used up). Raises ValueError if the
    very first pass gives no batch.
    """
    iterator, passes = first, 0
    while True:
        empty = True
        for batch in iterator:
            empty = False
            yield batch
        passes += 1
        if empty and passes == 1:
            used_up = " (it is an iterator: it may be used up)" if first is loader else ""
            raise ValueError(f"the dataloader gave no batch{used_up}")
        if empty or first is loader:
            return
        iterator = iter(loader)


def has_length(loader: Any) -> bool:
    """Whether `len(loader)` works; a DataLoader of an endless stream has `__len__`, and raises."""
    try:
        len(loader)
    except TypeError:
        return False
    return True


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`, copied without waiting where memory is pinned.

    Goes through mappings, lists, tuples and named tuples, and keeps their types. Anything else that
    has a method `to` (a BatchEncoding, a PackedSequence, a graph) is asked to move itself. The rest
    (strings, numbers) stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    kind = type(batch)
    if kind is tuple or kind is list:
        return kind([to_device(value, device) for value in batch])
    if kind is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _mapping_to_device(batch, device)
    if isinstance(batch, (list, tuple)):
        moved = [to_device(value, device) for value in batch]
        return kind(*moved) if hasattr(batch, "_fields") else kind(moved)
    return batch


def _mapping_to_device(batch: Mapping[Any, Any], device: torch.device) -> Mapping[Any, Any]:
    moved = {key: to_device(value, device) for key, value in batch.items()}
    if not isinstance(batch, MutableMapping):
        return moved
    same_kind = copy.copy(batch)
    same_kind.update(moved)
    return same_kind


def count(batch: Any) -> tuple[int, int]:
    """How many samples and tokens a batch holds.

    Both are read off one tensor: `input_ids` of a mapping that has it, else the first tensor found.
    Samples are the size of its first dimension (1 for a scalar, or where there is no tensor).
    Tokens are its elements, padding included, if it is a matrix of integers, [samples, positions];
    else 0.
    """
    lead = _first_tensor(batch)
    if lead is None:
        return 1, 0
    shape = lead.shape
    tokens = shape[0] * shape[1] if len(shape) == 2 and _is_integer(lead.dtype) else 0
    return (shape[0] if shape else 1), tokens


def _first_tensor(value: Any) -> torch.Tensor | None:
    """`input_ids` of the outermost mapping, else the first in reading order."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        items: Iterable[Any] = value
    elif isinstance(value, Mapping):
        items = (value.get("input_ids"), *value.values())
    else:
        return None
    for item in items:
        found = _first_tensor(item)
        if found is not None:
            return found
    return None


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """`model(**batch)` for a mapping, `model(*batch)` for a list or tuple, else `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(*batch)
    return model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model or `loss_fn` gave, as a tensor without dimensions.

    Taken are a tensor of one element, a mapping with `loss` (also an object with `.loss`), and a
    tuple or list that begins with one. Raises TypeError where there is no tensor to be found,
    ValueError for a tensor of several elements, or none.
    """
    loss = _find_loss(output)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"a loss must be a tensor, not {_kind(loss)}: the model may return a loss, a mapping "
            "with 'loss', or a tuple that begins with one; loss_fn(model, batch) overrides"
        )
    if loss.ndim == 0:
        return loss
    if loss.numel() != 1:
        raise ValueError(
            f"a loss must be one number, not a tensor of shape {tuple(loss.shape)}: take its mean "
            "in the model, or give a loss_fn(model, batch)"
        )
    return loss.reshape(())


def _find_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        if "loss" not in output:
            keys = ", ".join(map(repr, output)) or "none"
            raise TypeError(f"the model gave a mapping without 'loss' (keys: {keys})")
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, (list, tuple)) and output:
        return _find_loss(output[0])
    return output


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    empty = "an empty " if isinstance(value, (list, tuple)) and not value else "a "
    return empty + type(value).__name__
