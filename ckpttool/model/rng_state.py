"""The `rng` section: states of random number generators, and whether they can be restored.

Two layouts are known: what the generators themselves give (`random.getstate()`, a tuple of 625
words in its middle; `numpy.random.get_state()`, an array of 624; `torch.get_rng_state()`, bytes),
and the same with lists in place of arrays, or numpy's dictionary form.
"""

from __future__ import annotations

from typing import Any

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.values import NumpyArray, TensorValue
from ckpttool.model.inert import integer, what

EXPECTED = ("python", "torch")
"""Parts that every checkpoint holds. numpy, cuda and mps are there where the machine had them."""

_PYTHON_WORDS = 625  # 624 words of the Mersenne Twister and the position in them
_NUMPY_WORDS = 624
_TORCH_CPU_BYTES = 5056  # sizeof(at::CPUGeneratorImplState), the same from torch 1.6 to 2.13
_WORD = 1 << 32


class _WrongError(Exception):
    """A part is not the state of a generator; the message says why. Never leaves this module."""


def rng_parts(rng: Any) -> list[str]:
    """Names of the parts present, a number of devices behind `cuda`: `["python", "cuda (2)"]`."""
    if not isinstance(rng, dict):
        return []
    return [
        f"cuda ({len(part)})" if name == "cuda" and isinstance(part, (list, tuple)) else str(name)
        for name, part in rng.items()
        if part is not None
    ]


def rng_problems(rng: Any) -> list[Anomaly]:
    """Parts that are missing (`schema-rng-missing`) or no state at all (`schema-rng-malformed`)."""
    if not isinstance(rng, dict):
        return [Anomaly("schema-rng-malformed", key="rng", problem=f"is {what(rng)}")]
    missing = [part for part in EXPECTED if rng.get(part) is None]
    problems = [Anomaly("schema-rng-missing", key="rng", parts=missing)] if missing else []
    for name, check in _CHECKS.items():
        state = rng.get(name)
        if state is None:
            continue
        try:
            check(state)
        except _WrongError as wrong:
            place = f"rng.{name}"
            problems.append(Anomaly("schema-rng-malformed", key=place, problem=str(wrong)))
    return problems


def _check_python(state: Any) -> None:
    if not isinstance(state, (tuple, list)) or len(state) != 3:
        raise _WrongError(f"is {what(state)}, not the three parts of random.getstate()")
    version, words, gauss = state
    if integer(version) not in (2, 3):
        raise _WrongError("has an unknown version")
    _check_words(words, _PYTHON_WORDS)
    if gauss is not None and not isinstance(gauss, float):
        raise _WrongError(f"ends with {what(gauss)} where a number or None belongs")


def _check_numpy(state: Any) -> None:
    if isinstance(state, dict):
        if not isinstance(state.get("bit_generator"), str):
            raise _WrongError("names no bit generator")
        inner = state.get("state")
        if state["bit_generator"] == "MT19937":
            _check_words(inner.get("key") if isinstance(inner, dict) else None, _NUMPY_WORDS)
        return
    if not isinstance(state, (tuple, list)) or len(state) != 5:
        raise _WrongError(f"is {what(state)}, not the five parts of numpy.random.get_state()")
    if state[0] != "MT19937":
        raise _WrongError("is not of the MT19937 generator")
    _check_words(state[1], _NUMPY_WORDS)
    position = integer(state[2])
    if position is None or not 0 <= position <= _NUMPY_WORDS:
        raise _WrongError(f"has a position outside 0 to {_NUMPY_WORDS}")


def _check_words(words: Any, count: int) -> None:
    """`words` must be `count` unsigned words of 32 bits: a list, a tuple, an array or a tensor."""
    if isinstance(words, (NumpyArray, TensorValue)):
        if words.shape != (count,):
            raise _WrongError(f"holds {what(words)} of shape {words.shape}, not ({count},)")
        return
    if not isinstance(words, (list, tuple)):
        raise _WrongError(f"holds {what(words)} where {count} integers belong")
    if len(words) != count:
        raise _WrongError(f"holds {len(words)} words where {count} belong")
    if not all(type(word) is int and 0 <= word < _WORD for word in words):
        raise _WrongError("holds something that is not a word of 32 bits")


def _check_torch(state: Any) -> None:
    _check_bytes(state)
    if state.shape[0] != _TORCH_CPU_BYTES:
        raise _WrongError(f"has {state.shape[0]} bytes where torch has {_TORCH_CPU_BYTES}")


def _check_bytes(state: Any) -> None:
    if not isinstance(state, TensorValue):
        raise _WrongError(f"is {what(state)} where a tensor of bytes belongs")
    if state.dtype != "uint8" or len(state.shape or ()) != 1 or not (state.shape or (0,))[0]:
        raise _WrongError(f"is a tensor of {state.dtype} of shape {state.shape}, not of bytes")


def _check_devices(states: Any) -> None:
    if not isinstance(states, (list, tuple)):
        raise _WrongError(f"is {what(states)} where one state a device belongs")
    for state in states:
        _check_bytes(state)


_CHECKS = {
    "python": _check_python,
    "numpy": _check_numpy,
    "torch": _check_torch,
    "cuda": _check_devices,
    "mps": _check_bytes,
}
