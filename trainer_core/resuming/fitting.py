"""What of a checkpoint cannot be gone on from, told before anything is changed.

torch finds some of it only while it copies (a sparse weight), and some only at the next step
(the options and the state of another kind of optimizer). Only torch's own optimizers are known
here; the state of others is for them to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

from trainer_core.state import CheckpointError
from trainer_core.wrappers import plain_names

# Options that torch gave to optimizers that existed already: older files are whole without them.
NEWER_OPTIONS = frozenset(
    {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
)


class _Parts(NamedTuple):
    """The state that an optimizer keeps for a parameter, once it has any.

    `like` has the parameter's shape, `single` is one number. `given` is kept only where an option
    of the group is on. All but `or_none` must be there.
    """

    like: tuple[str, ...] = ()
    single: tuple[str, ...] = ("step",)
    given: Mapping[str, str] = {}
    or_none: tuple[str, ...] = ()
    from_start: bool = False


_ADAM = _Parts(("exp_avg", "exp_avg_sq"), given={"max_exp_avg_sq": "amsgrad"})
_KNOWN = {
    "SGD": _Parts(single=(), or_none=("momentum_buffer",)),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _Parts(("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    "RAdam": _Parts(("exp_avg", "exp_avg_sq")),
    "SparseAdam": _Parts(("exp_avg", "exp_avg_sq")),
    "Adamax": _Parts(("exp_avg", "exp_inf")),
    "Adadelta": _Parts(("square_avg", "acc_delta")),
    "Adagrad": _Parts(("sum",), from_start=True),
    "ASGD": _Parts(("ax",), ("step", "eta", "mu")),
    "RMSprop": _Parts(
        ("square_avg",), given={"momentum_buffer": "momentum", "grad_avg": "centered"}
    ),
    "Rprop": _Parts(("prev", "step_size")),
    "Muon": _Parts(("momentum_buffer",), ()),
}


def check_model(saved: Mapping[str, Any], own: Mapping[str, Any], path: str = "model") -> None:
    """Raises CheckpointError, naming the key, for a tensor that cannot be copied into the model's.

    `saved` and `own` are state dicts. Refused are tensors without data, and sparse, quantized,
    nested or complex ones where the model's are not (or the other way round). Names and shapes
    are not looked at.
    """
    for name, tensor in saved.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        _check_data(f"{path}.{name}", tensor)
        mine = own.get(name)
        if isinstance(mine, torch.Tensor) and _form(tensor) != _form(mine):
            raise CheckpointError(
                f"{path}.{name}: is a {_form(tensor)} tensor, while the model's is {_form(mine)}"
            )


def is_ordinary(tensor: Any) -> bool:
    """Whether copying to or from this tensor cannot fail: dense, of torch's own class, no trick."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and _form(tensor) in ("dense real", "dense complex")
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    )


def check_optimizer(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> None:
    """Raises CheckpointError, naming the key, for what would fail only at the next step.

    `saved` is an optimizer's state dict; groups of other sizes are left for torch to refuse. For
    any optimizer: state that is no mapping, or without data. For torch's own also: options that
    are missing or of another kind, parts of the state that are missing, None, or don't fit.
    """
    for key, entry in saved["state"].items():
        if not isinstance(entry, Mapping):
            raise CheckpointError(
                f"optimizer.state.{key}: is a {type(entry).__name__}, not a mapping"
            )
        for part, value in entry.items():
            if isinstance(value, torch.Tensor):
                _check_data(f"optimizer.state.{key}.{part}", value)
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        return
    if type(optimizer).__module__.startswith("torch.optim"):
        _check_options(saved, optimizer)
        _check_state(saved, optimizer, model)


def names_by_group(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[list[str | None]]:
    """The names that the optimizer's parameters have in the model, in order, group by group.

    None stands for one that the model does not have.
    """
    names = plain_names(model)
    return [
        [names.get(id(parameter)) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def check_order(saved: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError where the optimizer has the saved parameters in another order.

    `saved` is what `names_by_group` gave then, None in older files. torch would give each the state
    of another one; names that differ are for the model to refuse.
    """
    own = names_by_group(model, optimizer)
    if not isinstance(saved, (list, tuple)) or len(saved) != len(own):
        return
    for index, (then, now) in enumerate(zip(saved, own, strict=True)):
        if list(then) != now and None not in now and set(then) == set(now):
            at = next(i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b)
            raise CheckpointError(
                f"optimizer.param_groups.{index}: has its parameters in another order: "
                f"{now[at]} where {then[at]} was, so each would get the state of another "
                '(allow_partial=("optimizer",) goes on without that state)'
            )


def check_loaded_options(optimizer: torch.optim.Optimizer) -> None:
    """The same for an optimizer that had the chance to fill in what older files lack."""
    for index, group in enumerate(optimizer.param_groups):
        missing = [name for name in _needed_options(optimizer) if name not in group]
        _refuse_missing(index, missing, optimizer)


def check_loaded(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError for what an optimizer was given and has not kept.

    Looks at the parts of each parameter's state, their shapes and dtypes, and the numbers of each
    group. An optimizer with a `load_state_dict` of its own may drop things in silence.
    """
    loaded = optimizer.state_dict()
    for (key, _, _), own in zip(places(saved, optimizer), _keys(loaded), strict=False):
        entry, now = saved["state"].get(key, {}), loaded["state"].get(own, {})
        for part, value in entry.items():
            words = _loss(part, value, now.get(part, _GONE))
            if words:
                raise CheckpointError(f"optimizer.state.{key}.{part}: {words}")
    for index, (group, now) in enumerate(
        zip(saved["param_groups"], loaded["param_groups"], strict=False)
    ):
        for name, value in group.items():
            plain = isinstance(value, (int, float, str, bool, type(None)))
            if name != "params" and plain and not _is_kept(value, now.get(name, _GONE)):
                raise CheckpointError(
                    f"optimizer.param_groups[{index}].{name}: {value!r:.60} was saved, and after "
                    f"loading it is {now.get(name, 'gone')!r:.60}"
                )


_GONE = object()


def _keys(state: Mapping[str, Any]) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in state["param_groups"])


def _loss(part: str, saved: Any, loaded: Any) -> str:
    if loaded is _GONE:
        return "was saved, and is gone after loading"
    if not isinstance(saved, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return ""
    if saved.shape != loaded.shape and saved.numel() != 1:
        return f"had shape {tuple(saved.shape)}, and has {tuple(loaded.shape)} after loading"
    if saved.dtype != loaded.dtype and part != "step":
        return f"was saved as {saved.dtype}, and is {loaded.dtype} after loading"
    return ""


def _is_kept(saved: Any, loaded: Any) -> bool:
    if isinstance(loaded, torch.Tensor):
        loaded = loaded.item() if loaded.numel() == 1 else loaded
    return loaded is not _GONE and bool(loaded == saved or (loaded != loaded and saved != saved))


def _needed_options(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name in optimizer.defaults if name not in NEWER_OPTIONS]


def _check_options(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    needed = _needed_options(optimizer)
    pairs = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    for index, (group, here) in enumerate(pairs):
        _refuse_missing(index, [name for name in needed if name not in group], optimizer)
        for name in needed:
            if not _is_alike(group[name], here.get(name)):
                raise CheckpointError(
                    f"optimizer.param_groups[{index}].{name}: is {group[name]!r:.60}, which "
                    f"{type(optimizer).__name__} cannot use (here it is {here.get(name)!r:.60})"
                )


def _refuse_missing(index: int, missing: list[str], optimizer: torch.optim.Optimizer) -> None:
    if missing:
        raise CheckpointError(
            f"optimizer.param_groups[{index}]: has no {', '.join(missing)}, which "
            f"{type(optimizer).__name__} needs; another kind of optimizer saved it"
        )


def _is_alike(saved: Any, here: Any) -> bool:
    if isinstance(here, (int, float, torch.Tensor)):
        return isinstance(saved, (int, float)) or _is_single(saved)
    if isinstance(here, (list, tuple)):
        return isinstance(saved, (list, tuple)) and len(saved) == len(here)
    return True


def _check_state(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds: dict[str, type] = {}
    for key, group, parameter in places(saved, optimizer):
        parts = _parts_of(optimizer, parameter)
        entry = saved["state"].get(key) or {}
        if parts is None or not (entry or (parts.from_start and parameter.requires_grad)):
            continue  # not known, or a parameter that was never stepped
        for part, shape in _shapes(parts, group, entry, parameter):
            problem = _problem(part, entry, shape, parameter, part in parts.or_none)
            if part in parts.single and not problem:
                known = kinds.setdefault(part, _kind(entry[part]))
                problem = "" if known is _kind(entry[part]) else "is a number here, a tensor there"
            if problem:
                name = names.get(id(parameter), "(not in the model)")
                raise CheckpointError(
                    f"optimizer.state.{key}.{part}{' ' if problem.startswith('has') else ': '}"
                    f"{problem}, while the parameter at that place, {name}, "
                    f"has shape {tuple(parameter.shape)} and {type(optimizer).__name__} steps it"
                )


def places(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Any, Mapping[str, Any], torch.nn.Parameter]]:
    """Key, saved group and parameter of each place, paired by position as torch does.

    Ends with the shorter side.
    """
    keys = ((key, group) for group in saved["param_groups"] for key in group["params"])
    mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for (key, group), parameter in zip(keys, mine, strict=False):
        yield key, group, parameter


def _parts_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> _Parts | None:
    if type(optimizer).__name__ != "Adafactor":
        return _KNOWN.get(type(optimizer).__name__)
    return _Parts(("row_var", "col_var") if parameter.ndim > 1 else ("variance",))


def _shapes(
    parts: _Parts, group: Mapping[str, Any], entry: Mapping[str, Any], parameter: torch.Tensor
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Each part to look at with the shape that it must have, None for a single number."""
    for part in parts.single:
        yield part, None
    # An option that is off leaves behind what it kept while it was on, so that it may be on again.
    given = (part for part, option in parts.given.items() if group.get(option) or entry.get(part))
    optional = (part for part in parts.or_none if part in entry)
    for part in (*parts.like, *given, *optional):
        shape = list(parameter.shape)
        if part == "row_var":
            shape[-1] = 1
        elif part == "col_var":
            shape[-2] = 1
        yield part, tuple(shape)


def _problem(
    part: str,
    entry: Mapping[str, Any],
    shape: tuple[int, ...] | None,
    parameter: torch.Tensor,
    or_none: bool,
) -> str:
    """What is wrong with one part of a parameter's state, in words; empty if nothing is."""
    if part not in entry:
        return "is missing"
    value = entry[part]
    if or_none and value is None:
        return ""
    if shape is None:
        single = _is_single(value) or (isinstance(value, (int, float)) and _kind(value) is float)
        return "" if single else f"is {_words(value)}, not a number"
    if not isinstance(value, torch.Tensor):
        return f"is {_words(value)}, not a tensor"
    if value.shape != shape:
        return f"has shape {tuple(value.shape)}"
    # Sparse gradients make sparse momentum, in SGD alone.
    wanted = {"dense complex" if parameter.is_complex() else "dense real"}
    wanted |= {"sparse_coo real"} if or_none else set()
    if _form(value) not in wanted or not (value.is_floating_point() or value.is_complex()):
        return f"is a {_form(value)} tensor of {str(value.dtype).removeprefix('torch.')}"
    return ""


def _check_data(path: str, tensor: torch.Tensor) -> None:
    if tensor.device.type == "meta":
        raise CheckpointError(f"{path}: is a tensor on the meta device, which has no data")


def _form(tensor: torch.Tensor) -> str:
    """How a tensor holds its numbers, in words: `dense real`, `sparse_coo real`, ..."""
    layout = str(tensor.layout).removeprefix("torch.").replace("strided", "dense")
    kind = "quantized" if tensor.is_quantized else "complex" if tensor.is_complex() else "real"
    return f"{'nested ' if tensor.is_nested else ''}{layout} {kind}"


def _is_single(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and _form(value) == "dense real"
        and value.numel() == 1
        and value.dtype != torch.bool
    )


def _kind(value: Any) -> type:
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    return bool if isinstance(value, bool) else float


def _words(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
