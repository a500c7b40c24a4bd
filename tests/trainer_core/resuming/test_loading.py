"""Nothing that a file names is run, and nothing honest is refused without a reason."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_core import CheckpointError, CheckpointManager, CheckpointWarning, TrustWarning
from trainer_core.resuming.loading import RefusedFileError, load_state


def stored(tmp_path: Path, state: Any, **options: Any) -> Path:
    path = tmp_path / "step_000000000003.pt"
    torch.save(state, path, **options)
    return path


def torch_alone_refuses(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return True
    return False


NUMERIC = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", NUMERIC)
def test_numeric_arrays_and_scalars_load(tmp_path: Path, dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    path = stored(tmp_path, {"array": array, "one": array[1, 2], "step": 3})
    assert torch_alone_refuses(path)
    loaded = load_state(path)
    assert loaded["array"].dtype == array.dtype
    assert loaded["array"].tolist() == array.tolist()
    assert loaded["one"] == array[1, 2]
    assert torch_alone_refuses(path), "what was allowed must be so for one call only"


def test_names_of_both_generations_of_numpy_load(tmp_path: Path) -> None:
    path = stored(tmp_path, {"a": np.arange(3, dtype=np.uint32)})
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("data.pkl"):
                modern, ancient = b"numpy._core.multiarray", b"numpy.core.multiarray"
                assert (modern in data) != (ancient in data)
                swap = (modern, ancient) if modern in data else (ancient, modern)
                data = data.replace(*swap)
            new.writestr(info.filename, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_state(other)["a"].tolist() == [0, 1, 2]


def test_big_endian_and_text_arrays_are_told_apart(tmp_path: Path) -> None:
    assert load_state(stored(tmp_path, {"a": np.arange(3, dtype=">i4")}))["a"].tolist() == [0, 1, 2]
    for array in (np.array(["text"]), np.array([1], dtype="datetime64[s]")):
        with pytest.raises(RefusedFileError, match=r"Str|DateTime"):
            load_state(stored(tmp_path, {"a": array}))


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_an_array_of_objects_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    array = np.array([Touch(tmp_path / "ran")], dtype=object)
    with pytest.raises(CheckpointError):
        load_state(stored(tmp_path, {"a": array}))
    with pytest.raises(CheckpointError):
        load_state(stored(tmp_path, {"a": np.array([{"plain": 1}], dtype=object)}))
    assert not (tmp_path / "ran").exists()


def test_a_namespace_is_refused_in_words_that_name_it(tmp_path: Path) -> None:
    path = stored(tmp_path, {"step": 3, "config": argparse.Namespace(lr=1)})
    with pytest.raises(
        RefusedFileError, match=r"argparse\.Namespace.*weights_only=False"
    ) as caught:
        load_state(path)
    assert caught.value.names == ["argparse.Namespace"]
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert load_state(path)["config"].lr == 1


@pytest.mark.parametrize("kind", ["train_zip", "train_legacy", "train_proto4"])
@pytest.mark.parametrize("version", ["1.6.0", "2.0.1", "2.13.0"])
def test_training_files_of_old_torch(tmp_path: Path, corpus: Path, version: str, kind: str) -> None:
    """Refused while safe, since they hold a Namespace; whole when trust is asked for."""
    path = tmp_path / "step_000000000003.pt"
    shutil.copy(corpus / f"torch-{version}" / f"{kind}.pt", path)
    manager = CheckpointManager(tmp_path)
    for fallback in (False, True):
        with pytest.raises(RefusedFileError, match=r"argparse\.Namespace"):
            manager.load_latest(fallback=fallback)
    with pytest.warns(TrustWarning, match="run any code"):
        loaded = manager.load_latest(weights_only=False)
    assert loaded is not None
    assert loaded["step"] == 3
    assert isinstance(loaded["config"], argparse.Namespace)


def test_what_runs_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    manager.save(2, {"step": 2})
    stored(tmp_path, {"step": 3, "model": {}, "evil": Touch(tmp_path / "ran")})
    manager.point_to(3)
    with pytest.raises(CheckpointError, match="dangerous"):
        manager.load_latest()
    with pytest.warns(CheckpointWarning, match="dangerous"):
        loaded = manager.load_latest(fallback=True)
    assert loaded == {"step": 2}
    assert not (tmp_path / "ran").exists()


def test_weights_only_false_does_what_it_says_and_says_what_it_does(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    stored(tmp_path, {"step": 3, "evil": Touch(tmp_path / "ran")})
    with pytest.warns(TrustWarning, match="run any code it chooses"):
        assert manager.load_latest(weights_only=False) is not None
    assert (tmp_path / "ran").is_dir()
    assert issubclass(TrustWarning, UserWarning)


def test_trust_does_not_excuse_damage(tmp_path: Path) -> None:
    path = stored(tmp_path, {"step": 3, "w": torch.zeros(1000), "evil": Touch(tmp_path / "ran")})
    data = bytearray(path.read_bytes())
    data[data.index(bytes(3000)) + 1500] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        CheckpointManager(tmp_path).load_latest(weights_only=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("state", [[1], "x", None, torch.ones(2), (1, 2)])
def test_only_a_dictionary_is_a_state(tmp_path: Path, state: Any) -> None:
    with pytest.raises(CheckpointError, match="not a dictionary"):
        load_state(stored(tmp_path, state))


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"<html>", b"PK\x03\x04" + bytes(50)])
def test_what_is_no_checkpoint_is_one_kind_of_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt: is no checkpoint") as caught:
        load_state(path)
    assert str(caught.value).isprintable()
    with (
        pytest.warns(TrustWarning),
        pytest.raises(CheckpointError, match=r"a\.pt: torch cannot load it: ") as caught,
    ):
        load_state(path, weights_only=False)
    assert str(caught.value).isprintable()


def test_a_pickle_protocol_that_torch_cannot_read_safely(tmp_path: Path) -> None:
    path = stored(tmp_path, {"step": 3, "w": torch.ones(2)}, pickle_protocol=4)
    assert torch_alone_refuses(path)
    with pytest.raises(RefusedFileError, match=r"operand 149.*weights_only=False") as caught:
        load_state(path)
    assert str(caught.value).isprintable()
    with pytest.warns(TrustWarning):
        assert load_state(path, weights_only=False)["w"].tolist() == [1, 1]


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pt"):
        load_state(tmp_path / "none.pt")


def test_tensors_saved_on_another_device_come_to_the_cpu(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    path = tmp_path / "cuda.pt"
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("data.pkl"):
                tag = b"X\x03\x00\x00\x00cpu"
                assert tag in data
                data = data.replace(tag, b"X\x06\x00\x00\x00cuda:0")
            new.writestr(info.filename, data)
    assert load_state(path)["w"].device.type == "cpu"


def test_a_torch_whose_safe_loading_is_not_safe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2025-32434: files could get round weights_only=True up to torch 2.5.1."""
    path = tmp_path / "step_000000000001.pt"
    torch.save({"step": 1}, path)
    for version in ("2.5.1", "1.13.0+cu117"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(CheckpointError, match=r"torch .*2\.6 or newer"):
            load_state(path)
    for version in ("2.6.0", "2.13.0+cpu", "3.0.0a0+git123"):
        monkeypatch.setattr(torch, "__version__", version)
        assert load_state(path) == {"step": 1}
