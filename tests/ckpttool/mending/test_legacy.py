"""torch's legacy formats: no checksums, so what is there is taken, and a zip is written."""

from __future__ import annotations

import io
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import FormatError, RefusedError
from ckpttool.mending.plan import plan_mend
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import mended


@cache
def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    big = torch.randn(300, generator=generator)
    return {"a": torch.randn(7, generator=generator), "b": big[:100], "c": big[100:], "n": 5}


@cache
def data() -> bytes:
    buffer = io.BytesIO()
    torch.save(state(), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def content(name: str) -> int:
    """Where the bytes of a tensor's storage begin. They come in the order of their addresses."""
    return data().index(storage_bytes(name))


def whole_before(length: int) -> list[str]:
    """The tensors whose bytes all precede a cut."""
    ends = {"a": content("a") + 28, "b": content("b") + 400, "c": content("b") + 1200}
    return [name for name, end in ends.items() if end <= length]


def storage_bytes(name: str) -> bytes:
    return bytes(state()[name].untyped_storage().tolist())


def loaded(out: bytes | None) -> Any:
    assert out is not None
    assert out.startswith(b"PK")
    return torch.load(io.BytesIO(out), weights_only=True)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


def test_a_whole_one_is_left_alone(tmp_path: Path) -> None:
    assert mended(tmp_path, data())[0] is None


def test_bytes_behind_it(tmp_path: Path) -> None:
    out, _ = mended(tmp_path, corrupt.append(data(), bytes(100)))
    assert same(loaded(out), state())
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert any("no checksums" in note for note in plan.notes)
        assert not plan.lossless
        assert not plan.loses


@pytest.mark.parametrize("count", [1 << 61, 0, 512, (1 << 64) - 1])
def test_a_damaged_count_of_elements(count: int, tmp_path: Path) -> None:
    """The pickle says the same, and all storages then end where the file does."""
    word = content("a") - 8
    assert struct.unpack_from("<Q", data(), word) == (7,)
    out, _ = mended(tmp_path, corrupt.put_bytes(data(), word, struct.pack("<Q", count)))
    assert same(loaded(out), state())


def test_a_cut_one(tmp_path: Path) -> None:
    cut = content("b") + 4 * 150
    damaged = corrupt.keep_first(data(), cut)
    with pytest.raises(RefusedError, match="lost: "):
        mended(tmp_path, damaged)
    out, _ = mended(tmp_path, damaged, allow_loss=True)
    found = loaded(out)
    assert [key for key in found if key != "n"] == whole_before(cut)
    assert torch.equal(found["b"], state()["b"])
    with plan_mend(tmp_path / "damaged.pt") as plan:
        lost = {loss.tensor: (loss.nbytes, loss.survived) for loss in plan.losses}
    assert lost["c"] == (800, 200)


def test_zeros_and_another_step(tmp_path: Path) -> None:
    damaged = corrupt.keep_first(data(), content("b") + 4 * 150)
    found = loaded(mended(tmp_path, damaged, allow_loss=True, missing="zeros")[0])
    assert torch.equal(found["c"][:50], state()["c"][:50])
    assert torch.equal(found["c"][50:], torch.zeros(150))
    source = tmp_path / "other.pt"
    torch.save({"c": torch.full((200,), 3.0)}, source)
    options = {"allow_loss": True, "missing": "from", "source": str(source)}
    found = loaded(mended(tmp_path, damaged, **options)[0])
    assert torch.equal(found["c"], torch.full((200,), 3.0))


def test_cut_at_every_twentieth(tmp_path: Path) -> None:
    for part in range(1, 20):
        length = len(data()) * part // 20
        damaged = corrupt.keep_first(data(), length)
        whole = whole_before(length)
        try:
            out, _ = mended(tmp_path, damaged, allow_loss=True)
        except FormatError:
            assert whole == []
            continue
        found = loaded(out)
        assert sorted(key for key in found if key != "n") == whole, part
        for name in whole:
            assert torch.equal(found[name], state()[name])


@pytest.mark.parametrize("version", ["1.6.0", "2.0.1", "2.13.0"])
def test_files_of_the_corpus(version: str, corpus: Path, tmp_path: Path) -> None:
    path = corpus / f"torch-{version}" / "train_legacy.pt"
    out, _ = mended(tmp_path, path.read_bytes() + b"more")
    assert out is not None
    ours = torch.load(io.BytesIO(out), weights_only=False)
    theirs = torch.load(path, weights_only=False)
    assert flat(ours) == flat(theirs)


def test_a_cut_one_of_the_corpus(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "torch-2.13.0" / "truncated_legacy.pt"
    out, _ = mended(tmp_path, path.read_bytes(), allow_loss=True)
    assert out is not None
    ours = flat(torch.load(io.BytesIO(out), weights_only=False))
    theirs = flat(torch.load(path.with_name("train_legacy.pt"), weights_only=False))
    tensors = {name: value for name, value in ours.items() if isinstance(value, tuple)}
    assert tensors
    assert all(theirs[name] == value for name, value in tensors.items())


def flat(value: object, name: str = "") -> dict[str, object]:
    if isinstance(value, torch.Tensor):
        return {name: (str(value.dtype), tuple(value.shape), value.flatten().tolist())}
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [flat(item, f"{name}.{key}") for key, item in items]
        return {key: item for part in parts for key, item in part.items()}
    return {name: repr(value)}
