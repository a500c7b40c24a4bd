"""Random number generators: their states as plain data, and back.

What is stored is what the generators themselves give (`random.getstate()`,
`np.random.get_state()`, `torch.get_rng_state()`), with arrays turned into lists of integers, so
that it loads under `torch.load(weights_only=True)`. The original forms restore as well.

Generators that a DataLoader, its sampler or its dataset hold are kept with the position in the
data: see `trainer_core.data.feed`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

_KNOWN = ("python", "numpy", "torch", "cuda", "mps")
_MT19937_WORDS = 624


def capture_rng_state() -> dict[str, Any]:
    """The state of every global generator of this process, as plain values and CPU tensors.

    Keys: `python`; `numpy`, where it is installed; `torch` (the CPU's); `cuda`, one tensor a
    device, where CUDA is available; `mps`, where that is. Give it to `restore_rng_state`.
    """
    state = plain_host_state(host_rng_state())
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def host_rng_state() -> dict[str, Any]:
    """The states of the generators that are on no device, quickly and as they come.

    `plain_host_state` makes of it what a checkpoint holds.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = _numpy()
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


def plain_host_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `host_rng_state` gave, as plain values and CPU tensors."""
    plain = dict(state)
    if plain.get("numpy"):
        plain["numpy"] = _plain_numpy_state(plain["numpy"])
    return plain


def is_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results of `host_rng_state` are the same."""
    if one["python"] != other["python"] or not torch.equal(one["torch"], other["torch"]):
        return False
    numpys = [plain_host_state({"numpy": side.get("numpy", {})}) for side in (one, other)]
    return bool(numpys[0] == numpys[1])


def restore_rng_state(state: Any) -> dict[str, str]:
    """Restores each generator on its own, and gives what failed: the part's name to the reason.

    An empty result means that every generator of this process that the checkpoint should cover goes
    on where it was. A part is all or nothing: one that is refused leaves its generator untouched.
    Parts are `python`, `numpy`, `torch`, `mps`, and `cuda` or `cuda:<index>`; `rng` stands for the
    state as a whole. With another number of CUDA devices, those that both sides have are restored,
    and every other one is named. Each failure is logged as a warning too. Never raises.
    """
    failures: dict[str, str] = {}
    if not isinstance(state, Mapping):
        failures["rng"] = f"holds {_kind(state)} where a mapping belongs"
    else:
        for name in _parts_to_restore(state):
            _RESTORERS.get(name, _restore_unknown)(name, state.get(name, _MISSING), failures)
    for part, reason in failures.items():
        logger.warning("random state not restored: %s: %s", part, reason)
    return failures


def grave_failures(failures: Mapping[str, str], saved: Any, device: torch.device) -> dict[str, str]:
    """Those failures of `restore_rng_state` that a run on `device` cannot overlook.

    Not what the checkpoint never held, nor generators of devices that are not the run's own.
    """
    if not isinstance(saved, Mapping):
        return {}
    own = {"python", "numpy", "torch", device.type}
    if device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        own.add(f"cuda:{index}")
    return {
        part: reason
        for part, reason in failures.items()
        if part in own and part.partition(":")[0] in saved
    }


class _Missing:
    """Stands for a part that the state does not have; None may be garbage in its place."""


_MISSING = _Missing()


def _parts_to_restore(state: Mapping[Any, Any]) -> list[str]:
    """What is saved, and what every checkpoint ought to hold. CUDA and MPS are only where saved."""
    expected = ["python", "torch"] + (["numpy"] if _numpy() is not None else [])
    saved = [name if isinstance(name, str) else repr(name) for name in state]
    return [*(name for name in _KNOWN if name in expected or name in saved)] + [
        name for name in saved if name not in _KNOWN
    ]


@contextmanager
def _noting(part: str, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures[part] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def _restore_python(part: str, state: Any, failures: dict[str, str]) -> None:
    with _noting(part, failures):
        version, words, gauss = _sequence(state, "three items", 3)
        if gauss is not None and not isinstance(gauss, float):
            raise ValueError(f"gauss_next is {_kind(gauss)}, not a number")
        # setstate changes gauss_next before it looks at the words, so a scratch one tries first.
        scratch = random.Random()  # noqa: S311
        scratch.setstate((version, tuple(_words_of_32_bits(words)), gauss))
        random.setstate(scratch.getstate())


def _restore_numpy(part: str, state: Any, failures: dict[str, str]) -> None:
    with _noting(part, failures):
        plain = _numpy_state_dict(state)
        numpy = _numpy()
        if numpy is None:
            raise ValueError("numpy is not installed here")
        current = numpy.random.get_state(legacy=False)
        if plain["bit_generator"] != current["bit_generator"]:
            raise ValueError(
                f"saved from a {plain['bit_generator']!r} generator, "
                f"while a {current['bit_generator']} is in use here"
            )
        _check_mt19937(plain)
        # set_state writes word by word, so a scratch one tries first.
        scratch = numpy.random.RandomState()
        if plain["bit_generator"] != "MT19937":
            scratch = numpy.random.RandomState(type(numpy.random.get_bit_generator())())
        scratch.set_state(plain)
        numpy.random.set_state(scratch.get_state(legacy=False))


def _restore_torch(part: str, state: Any, failures: dict[str, str]) -> None:
    with _noting(part, failures):
        saved = _byte_tensor(state)
        torch.Generator().set_state(saved)  # refuses what is not a state, and harms nothing
        torch.set_rng_state(saved)


def _restore_cuda(part: str, state: Any, failures: dict[str, str]) -> None:
    with _noting(part, failures):
        saved = _sequence(state, "one state a device")
        if not torch.cuda.is_available():
            raise ValueError(f"saved for {len(saved)} CUDA devices, and there is none here")
        # Starts CUDA: before that states are only queued, and a bad one would fail much later.
        torch.cuda.current_device()
        present = torch.cuda.device_count()
        for index in range(max(len(saved), present)):
            with _noting(f"cuda:{index}", failures):
                if index >= present:
                    raise ValueError(f"saved for {len(saved)} devices; here are only {present}")
                if index >= len(saved):
                    raise ValueError(f"saved for {len(saved)} devices; here are {present}")
                torch.cuda.set_rng_state(_byte_tensor(saved[index]), index)


def _restore_mps(part: str, state: Any, failures: dict[str, str]) -> None:
    with _noting(part, failures):
        saved = _byte_tensor(state)
        if not torch.backends.mps.is_available():
            raise ValueError("saved for an MPS device, and there is none here")
        torch.mps.set_rng_state(saved)


def _restore_unknown(part: str, state: Any, failures: dict[str, str]) -> None:
    failures[part] = "no generator of that name is known; left alone"


_RESTORERS: dict[str, Callable[[str, Any, dict[str, str]], None]] = {
    "python": _restore_python,
    "numpy": _restore_numpy,
    "torch": _restore_torch,
    "cuda": _restore_cuda,
    "mps": _restore_mps,
}


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _plain_numpy_state(state: Mapping[str, Any]) -> Any:
    """The tuple that `np.random.set_state` knows, with a list for the array; a dict for others."""
    if state["bit_generator"] != "MT19937":
        return _without_arrays(state)
    inner = state["state"]
    words = [int(word) for word in inner["key"]]
    return ("MT19937", words, int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"]))


def _without_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_arrays(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _numpy_state_dict(state: Any) -> dict[str, Any]:
    """Either form as the dict of `np.random.get_state(legacy=False)`. Raises ValueError."""
    if isinstance(state, Mapping):
        if not isinstance(state.get("bit_generator"), str):
            raise ValueError("names no bit generator")
        return dict(state)
    name, words, position, has_gauss, gauss = _sequence(state, "five items", 5)
    inner = {"key": words, "pos": position}
    return {"bit_generator": name, "state": inner, "has_gauss": has_gauss, "gauss": gauss}


def _check_mt19937(state: dict[str, Any]) -> None:
    """Puts checked numbers in place, since numpy itself would take many a wrong one."""
    if state["bit_generator"] != "MT19937":
        return
    inner = state.get("state")
    if not isinstance(inner, Mapping):
        raise ValueError("holds no words")
    words = _words_of_32_bits(inner.get("key"))
    position, has_gauss = _integers([inner.get("pos"), state.get("has_gauss", 0)])
    if len(words) != _MT19937_WORDS:
        raise ValueError(f"holds {len(words)} words where {_MT19937_WORDS} belong")
    if not 0 <= position <= _MT19937_WORDS or has_gauss not in (0, 1):
        raise ValueError(f"position {position} or has_gauss {has_gauss} is out of range")
    state["state"] = {"key": _numpy().array(words, dtype="uint32"), "pos": position}
    state["has_gauss"], state["gauss"] = has_gauss, float(state.get("gauss", 0.0))


def _sequence(value: Any, what: str, length: int | None = None) -> Any:
    if value is _MISSING:
        raise ValueError("the checkpoint holds no state for it")
    if not isinstance(value, (tuple, list)) or length not in (None, len(value)):
        raise ValueError(f"holds {_kind(value)} where {what} belong")
    return value


def _integers(values: Any) -> list[int]:
    """A list, tuple, ndarray or tensor of integers as a list of them. Raises ValueError."""
    if isinstance(values, torch.Tensor) or hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"holds {_kind(values)} where integers belong")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"holds {_kind(value)} where an integer belongs")
    return list(values)


def _words_of_32_bits(values: Any) -> list[int]:
    words = _integers(values)
    if not all(0 <= word < 1 << 32 for word in words):
        raise ValueError("holds an integer that is not a word of 32 bits")
    return words


def _byte_tensor(value: Any) -> torch.Tensor:
    """The state as torch wants it, uint8 on the CPU, whatever a loader has turned it into.

    `torch.load(map_location="cuda")` moves it to a GPU, and a cast of a whole checkpoint makes it
    floating: both are undone where no value is lost by it. Raises ValueError otherwise.
    """
    if value is _MISSING:
        raise ValueError("the checkpoint holds no state for it")
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"holds {_kind(value)} where a tensor belongs")
    if value.is_meta:
        raise ValueError("is a tensor on the meta device, which holds no values")
    saved = value.detach().to("cpu")
    if saved.dtype != torch.uint8:
        exact = saved.to(torch.uint8)
        if not torch.equal(exact.to(saved.dtype), saved):
            raise ValueError(f"was cast to {saved.dtype} and its values no longer are bytes")
        saved = exact
    return saved.contiguous()


def _kind(value: Any) -> str:
    return "nothing" if value is None or value is _MISSING else f"a {type(value).__name__}"
