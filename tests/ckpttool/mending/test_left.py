"""What is left where nothing can mend: whole tensors kept, others dropped, zeroed, or replaced."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.checks.verify import verify
from ckpttool.errors import FormatError, RefusedError
from ckpttool.findings import Severity
from ckpttool.mending.plan import plan_mend
from ckpttool.mending.write import write_mended
from ckpttool.model.checkpoint import open_checkpoint
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import mended, small


def saved(state: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


@cache
def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(9)
    big = torch.randn(4, 50, generator=generator)
    return {
        "model": {"first": torch.randn(40, generator=generator), "row": big[0], "rest": big[1:]},
        "list": [torch.ones(3), "between", torch.zeros(500)],
        "zeros": torch.zeros(64),
        "step": 5,
    }


@cache
def data() -> bytes:
    return saved(state())


def content(record: str) -> range:
    return corrupt.content_range(data(), record)


def loaded(out: bytes | None) -> Any:
    assert out is not None
    return torch.load(io.BytesIO(out), weights_only=True)


def mark(tmp_path: Path) -> dict[str, Any]:
    with open_checkpoint(tmp_path / "mended.pt") as checkpoint:
        assert checkpoint.mended is not None
        return checkpoint.mended


def test_loss_must_be_allowed(tmp_path: Path) -> None:
    damaged = corrupt.keep_first(data(), content("data/2").start + 4)
    with pytest.raises(RefusedError, match=r"list\.0"):
        mended(tmp_path, damaged)
    assert not (tmp_path / "mended.pt").exists()


def test_a_cut_file_keeps_all_before_the_cut(tmp_path: Path) -> None:
    """Cut within the storage of two views: the one that precedes the cut comes back."""
    cut = content("data/1").start + 4 * 60
    out, _ = mended(tmp_path, corrupt.keep_first(data(), cut), allow_loss=True)
    found = loaded(out)
    assert torch.equal(found["model"]["first"], state()["model"]["first"])
    assert torch.equal(found["model"]["row"], state()["model"]["row"])
    assert "rest" not in found["model"]
    assert "zeros" not in found
    assert found["list"] == [None, "between", None]
    assert found["step"] == 5


def test_what_is_lost_is_listed_with_the_bytes_that_are_there(tmp_path: Path) -> None:
    cut = content("data/1").start + 4 * 60
    damaged = corrupt.keep_first(data(), cut)
    mended(tmp_path, damaged, allow_loss=True)
    with plan_mend(tmp_path / "damaged.pt") as plan:
        lost = {loss.tensor: (loss.nbytes, loss.survived) for loss in plan.losses}
        assert plan.unproven == ["model.row"]
    assert lost == {
        "model.rest": (600, 40),
        "list.0": (12, 0),
        "list.2": (2000, 0),
        "zeros": (256, 0),
    }
    noted = mark(tmp_path)
    assert [loss["tensor"] for loss in noted["lost"]] == list(lost)
    assert noted["unproven"] == ["model.row"]
    assert noted["source"]["size"] == len(damaged)


def test_zeros_of_a_tensor_before_the_cut_are_no_gap(tmp_path: Path) -> None:
    """A file that ends in zeros since its last whole tensor is zeros."""
    out, _ = mended(tmp_path, corrupt.keep_first(data(), content("data/4").stop), allow_loss=True)
    assert torch.equal(loaded(out)["zeros"], torch.zeros(64))
    out, _ = mended(
        tmp_path, corrupt.keep_first(data(), content("data/4").stop - 1), allow_loss=True
    )
    assert "zeros" not in loaded(out)


def test_a_tail_that_never_reached_the_disk(tmp_path: Path) -> None:
    """The size is right, and zeros stand where the rest should be: they are no content."""
    start = content("data/2").start
    damaged = corrupt.zero_tail(data(), len(data()) - start - 4)
    out, _ = mended(tmp_path, damaged, allow_loss=True)
    found = loaded(out)
    assert sorted(found["model"]) == ["first", "rest", "row"]
    assert found["list"] == [None, "between", None]
    assert "zeros" not in found


def test_a_damaged_record_loses_all_its_tensors(tmp_path: Path) -> None:
    """Nobody knows which of its bytes are wrong."""
    damaged = corrupt.zero_range(data(), content("data/1").start, 64)
    out, _ = mended(tmp_path, damaged, allow_loss=True)
    assert list(loaded(out)["model"]) == ["first"]
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert {(loss.tensor, loss.survived) for loss in plan.losses} == {
            ("model.row", 0),
            ("model.rest", 0),
        }


def test_zeros_in_place_of_what_is_lost(tmp_path: Path) -> None:
    cut = content("data/1").start + 4 * 60
    damaged = corrupt.keep_first(data(), cut)
    out, _ = mended(tmp_path, damaged, allow_loss=True, missing="zeros")
    found = loaded(out)
    assert torch.equal(found["model"]["row"], state()["model"]["row"])
    assert found["model"]["rest"].shape == (3, 50)
    assert torch.equal(found["model"]["rest"][1:], torch.zeros(2, 50))
    assert torch.equal(found["list"][0], torch.zeros(3))
    assert mark(tmp_path)["missing"] == "zeros"


def test_tensors_from_another_step(tmp_path: Path) -> None:
    other = {
        "model": {"first": torch.full((40,), 7.0), "row": torch.full((50,), 8.0)},
        "list": [torch.full((3,), 9.0), "x", torch.full((501,), 9.0)],
        "zeros": torch.full((64,), 6, dtype=torch.int64),
        "extra": torch.ones(2),
    }
    source = tmp_path / "other.pt"
    source.write_bytes(saved(other))
    damaged = corrupt.zero_range(data(), content("data/1").start, 64)
    damaged = corrupt.keep_first(damaged, content("data/2").start)
    out, written = mended(tmp_path, damaged, allow_loss=True, missing="from", source=str(source))
    found = loaded(out)
    assert torch.equal(found["model"]["first"], state()["model"]["first"])  # this one is whole
    assert torch.equal(found["model"]["row"], torch.full((50,), 8.0))
    assert torch.equal(found["list"][0], torch.full((3,), 9.0))
    assert found["list"][2] is None  # of another shape
    assert "zeros" not in found  # of another type
    assert "rest" not in found["model"]
    assert written is not None
    assert written.replaced == ["model.row", "list.0"]


def test_a_damaged_tensor_of_the_other_step_is_not_taken(tmp_path: Path) -> None:
    source = tmp_path / "other.pt"
    source.write_bytes(corrupt.zero_range(data(), content("data/0").start, 64))
    damaged = corrupt.zero_range(data(), content("data/0").start, 65)
    options = {"allow_loss": True, "missing": "from", "source": str(source)}
    out, written = mended(tmp_path, damaged, **options)
    assert "first" not in loaded(out)["model"]
    assert written is not None
    assert written.replaced == []


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight = torch.arange(30.0)
    whole = saved({"a": weight, "b": weight, "c": torch.ones(9)})
    source = tmp_path / "other.pt"
    source.write_bytes(whole)
    damaged = corrupt.zero_range(whole, corrupt.content_range(whole, "data/0").start + 8, 64)
    options = {"allow_loss": True, "missing": "from", "source": str(source)}
    found = loaded(mended(tmp_path, damaged, **options)[0])
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert torch.equal(found["b"], weight)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about such tensors
def test_sparse_and_quantized_tensors(corpus: Path, tmp_path: Path) -> None:
    for name in ("sparse.pt", "strided.pt", "dtypes_all.pt"):
        whole = (corpus / "torch-2.13.0" / name).read_bytes()
        records = [r for r in corrupt.entry_offsets(whole) if r.startswith("data/")]
        for record in [r for r in records if len(corrupt.content_range(whole, r)) >= 16][:6]:
            start = corrupt.content_range(whole, record).start
            damaged = corrupt.flip_byte(corrupt.flip_byte(whole, start, 0x55), start + 7, 0x33)
            for missing in ("drop", "zeros"):
                out, _ = mended(tmp_path, damaged, allow_loss=True, missing=missing)
                assert loaded(out) is not None, (name, missing)


def test_the_result_is_marked_and_verifies(tmp_path: Path) -> None:
    damaged = corrupt.keep_first(data(), content("data/3").start)
    mended(tmp_path, damaged, allow_loss=True)
    report = verify(tmp_path / "mended.pt")
    assert [f for f in report.findings if f.severity is not Severity.INFO] == []
    noted = mark(tmp_path)
    assert noted["mended_by"] == "ckpttool"
    assert json.dumps(noted)


def test_without_a_pickle_nothing_has_a_name(tmp_path: Path) -> None:
    start = content("data.pkl")
    damaged = corrupt.zero_range(data(), start.start, len(start))
    with pytest.raises(FormatError, match="no tensor has a name"):
        mended(tmp_path, damaged, allow_loss=True)
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert plan.hopeless is not None
        assert "5 storages" in plan.hopeless


def test_a_pickle_that_is_damaged_and_readable(tmp_path: Path) -> None:
    """Two letters of a key are wrong: it can be read, but nothing that it says is proven."""
    at = data().index(b"between")
    damaged = corrupt.put_bytes(data(), at, b"BETween")
    with pytest.raises(RefusedError, match=r"data\.pkl"):
        mended(tmp_path, damaged)
    out, _ = mended(tmp_path, damaged, allow_loss=True)
    assert loaded(out)["list"][1] == "BETween"
    assert mark(tmp_path)["lost"][0]["tensor"] == "data.pkl"


def test_a_lone_tensor_is_all_there_was(tmp_path: Path) -> None:
    whole = saved(torch.ones(40))
    damaged = corrupt.keep_first(whole, corrupt.content_range(whole, "data/0").stop - 1)
    with pytest.raises(FormatError, match="nothing of its content"):
        mended(tmp_path, damaged, allow_loss=True)


@pytest.mark.parametrize("content_of_file", [b"", bytes(5000), b"hello world\n" * 100])
def test_nothing_can_be_got_back(content_of_file: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="nothing can be got back"):
        mended(tmp_path, content_of_file, allow_loss=True)


def test_the_target(tmp_path: Path) -> None:
    path, out = tmp_path / "damaged.pt", tmp_path / "there.pt"
    path.write_bytes(corrupt.drop_directory(small()))
    out.write_bytes(b"mine")
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    with plan_mend(path) as plan:
        with pytest.raises(RefusedError, match="--force"):
            write_mended(plan, out)
        for same in (path, link):
            with pytest.raises(RefusedError, match="never touched"):
                write_mended(plan, same, force=True)
        assert out.read_bytes() == b"mine"
        write_mended(plan, out, force=True)
    assert out.read_bytes() == small()
    assert path.read_bytes() == corrupt.drop_directory(small())


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt"
    path.write_bytes(corrupt.drop_directory(small()))
    with plan_mend(path) as plan:
        path.write_bytes(corrupt.zero_range(path.read_bytes(), 64, 400))
        with pytest.raises(OSError, match="changed"):
            write_mended(plan, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
