"""Loading one checkpoint file with torch, safely unless told otherwise.

`torch.load(weights_only=True)` builds nothing but tensors and plain values. Checkpoints of other
programs often hold the state of numpy's generator as an array, which torch refuses; the few globals
that rebuild numeric arrays are allowed here for the time of one call, and only those that the file
asks for. They cannot run code: an array of objects, the one kind that could hold some, is left out.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ckpttool.errors import UnreadableError
from trainer_core.resuming.wording import some
from trainer_core.state import CheckpointError

_NUMERIC_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_MOST_NAMES = 5
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # torch writes in bold
_TORCHS_REASON = re.compile(r"WeightsUnpickler error:\s*([^\n]{1,200})")
_WHAT_IT_MEANS = (
    "weights_only=False lets a file run any code it chooses while it is loaded, with your rights. "
    "Ask for it only for files that you trust as you trust a program."
)


class TrustWarning(UserWarning):
    """A file is about to be loaded in a way that lets it run code."""


class RefusedFileError(CheckpointError):
    """A file needs classes that safe loading refuses; `names` lists them where they are known."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


def load_state(path: str | os.PathLike[str], *, weights_only: bool = True) -> dict[Any, Any]:
    """The dictionary in a file that `torch.save` wrote, with every tensor on the CPU.

    With `weights_only`, a file that needs more than plain values, tensors and numeric numpy arrays
    raises RefusedFileError, which names what it needs. Without, it emits a TrustWarning and lets
    the file run what code it likes. Raises CheckpointError for a file that torch cannot load or
    that holds no dictionary. Checksums are not looked at: see `CheckpointManager.load_latest`.
    """
    where = os.fspath(path)
    if weights_only:
        _refuse_old_torch(where)
    else:
        warnings.warn(f"{where}: {_WHAT_IT_MEANS}", TrustWarning, stacklevel=2)
    needed = _needed(where) if weights_only else None
    try:
        state = _load(where, needed)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # torch, pickle and the file's own code may raise anything
        raise CheckpointError(f"{where}: torch cannot load it: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{where}: holds a {type(state).__name__}, not a dictionary")
    return state


def _refuse_old_torch(path: str) -> None:
    """Before 2.6 files could get round torch's safe loading (CVE-2025-32434)."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 6):
        raise CheckpointError(
            f"{path}: safe loading is not safe in torch {torch.__version__}: install 2.6 or newer"
        )


def _load(path: str, needed: list[str] | None) -> Any:
    if needed is None:
        return torch.load(path, map_location="cpu", weights_only=False)
    with warnings.catch_warnings(), torch.serialization.safe_globals(_to_allow(needed)):
        # Of a pickle protocol that it may not know; if so, it says that in its error as well.
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise RefusedFileError(_refusal(path, [_what_torch_says(error)]), []) from error


def _what_torch_says(error: pickle.UnpicklingError) -> str:
    """The one line of torch's long advice that tells what it stumbled over."""
    found = _TORCHS_REASON.search(str(error))
    return f"something else ({found[1] if found else _first_line(error)})"


def _refusal(path: str, names: list[str]) -> str:
    return (
        f"{path}: needs {some(names, _MOST_NAMES)}, which safe loading refuses. If you trust "
        "whoever wrote the file, and only then, weights_only=False loads it: the file may then "
        "run any code."
    )


def _needed(path: str) -> list[str]:
    """The globals that the file names, read without loading.

    Raises RefusedFileError where one is not to be allowed, and CheckpointError for what is no
    checkpoint at all, in words that fit better than torch's.
    """
    from ckpttool.formats.globals import Trust
    from ckpttool.model.checkpoint import open_checkpoint

    try:
        with open_checkpoint(path) as checkpoint:
            used, readable, words = checkpoint.globals, checkpoint.readable, checkpoint.words
    except UnreadableError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.reason}") from error
    if not readable:
        raise CheckpointError(f"{path}: is no checkpoint that can be read: {words}")
    fine = {*_registered_names(), *_allowed()}
    names = {f"{use.module}.{use.name}": use.trust is Trust.TORCH_SAFE for use in used}
    refused = [name for name, safe in names.items() if not safe and name not in fine]
    if refused:
        raise RefusedFileError(_refusal(path, refused), refused)
    return list(names)


def _registered_names() -> set[str]:
    """What the user has told torch to trust (`torch.serialization.add_safe_globals`)."""
    names = set()
    for item in torch.serialization.get_safe_globals():
        if isinstance(item, tuple):
            names.add(item[1])
        else:
            names.add(f"{item.__module__}.{item.__qualname__}")
    return names


def _allowed() -> dict[str, Any]:
    """The globals that rebuild arrays, under the names that they have had in numpy 1 and 2."""
    try:
        import numpy
    except ImportError:
        return {}
    allowed: dict[str, Any] = {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}
    for name in ("_reconstruct", "scalar"):
        function = _array_function(numpy, name)
        if function is not None:
            allowed[f"numpy.core.multiarray.{name}"] = function
            allowed[f"numpy._core.multiarray.{name}"] = function
    return allowed


def _array_function(numpy: Any, name: str) -> Any:
    core = getattr(numpy, "_core", None) or getattr(numpy, "core", None)
    return getattr(getattr(core, "multiarray", None), name, None)


def _to_allow(needed: Iterable[str]) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    allowed = _allowed()
    chosen: list[Any] = [(allowed[name], name) for name in needed if name in allowed]
    if any(name == "numpy.dtype" for _, name in chosen):
        import numpy

        # The class of a dtype is no global of the file: torch meets it when it fills one in.
        classes = (type(numpy.dtype(name)) for name in _NUMERIC_DTYPES)
        chosen += [kind for kind in classes if kind is not numpy.dtype]
    return chosen


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in _ESCAPE.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
