"""`--from`: what shares bytes goes on sharing them, and never gets other values than its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from ckpttool.mending.plan import plan_mend
from ckpttool.mending.write import Written, write_mended
from tests import corrupt


def tied(seed: int) -> dict[str, Any]:
    """A weight under two names, transposed, and a row of it: one storage, `data/0`."""
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return {"a": weight, "tied": weight, "t": weight.t(), "row": weight[5], "x": torch.ones(3)}


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def taken(tmp_path: Path, damaged: bytes, other: bytes) -> tuple[dict[str, Any], Written]:
    """What comes of a damaged file with the tensors of another."""
    path, source, out = (tmp_path / f"{name}.pt" for name in ("damaged", "other", "out"))
    path.write_bytes(damaged)
    source.write_bytes(other)
    with plan_mend(path) as plan:
        written = write_mended(plan, out, allow_loss=True, missing="from", source=str(source))
    assert written is not None
    return torch.load(out, weights_only=True), written


def damaged(state: object) -> bytes:
    data = saved(state)
    return corrupt.put_bytes(data, corrupt.content_range(data, "data/0").start, bytes(range(64)))


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_all_views_of_a_storage_stay_together(tmp_path: Path) -> None:
    other = tied(2)
    found, written = taken(tmp_path, damaged(tied(1)), saved(other))
    assert sorted(written.replaced) == ["a", "row", "t", "tied"]
    for name, tensor in other.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride()
    assert len({place(found[name]) for name in ("a", "tied", "t", "row")}) == 1
    found["a"][5, 0] = 9
    assert found["row"][0] == found["t"][0, 5] == found["tied"][5, 0] == 9


def test_what_is_tied_here_and_differs_there_stays_lost(tmp_path: Path) -> None:
    other = {**tied(2), "tied": torch.zeros(8, 4)}
    found, written = taken(tmp_path, damaged(tied(1)), saved(other))
    assert written.replaced == []
    assert list(found) == ["x"]


def test_a_tie_that_the_other_file_lacks_comes_along(tmp_path: Path) -> None:
    other = {"a": tied(2)["a"]}
    found, written = taken(tmp_path, damaged(tied(1)), saved(other))
    assert sorted(written.replaced) == ["a", "row", "t", "tied"]
    assert torch.equal(found["t"], other["a"].t())
    assert place(found["t"]) == place(found["a"])


def test_parts_of_one_buffer_that_stand_alone_there(tmp_path: Path) -> None:
    buffer = torch.arange(20.0)
    other = {"p": torch.zeros(8), "q": torch.ones(12)}
    found, written = taken(tmp_path, damaged({"p": buffer[:8], "q": buffer[8:]}), saved(other))
    assert written.replaced == ["p", "q"]
    assert torch.equal(found["p"], other["p"])
    assert torch.equal(found["q"], other["q"])


def test_tied_tensors_in_another_order_of_elements(tmp_path: Path) -> None:
    weight, turned = torch.ones(8, 4), torch.randn(4, 8).t()
    other = {"a": turned, "tied": turned}
    found, _ = taken(tmp_path, damaged({"a": weight, "tied": weight}), saved(other))
    assert torch.equal(found["a"], turned)
    assert torch.equal(found["tied"], turned)
    assert place(found["a"]) == place(found["tied"])


def test_another_file_that_is_cut_itself(tmp_path: Path) -> None:
    """What it still has whole is taken; what it has not stays lost."""
    state = {"first": torch.ones(40), "second": torch.zeros(50) + 2}
    data = saved(state)
    other = corrupt.keep_first(data, corrupt.content_range(data, "data/1").start + 30)
    start = corrupt.content_range(data, "data/0").start
    broken = corrupt.keep_first(other, len(other) - 4)
    broken = corrupt.put_bytes(broken, start, bytes(range(64)))
    found, written = taken(tmp_path, broken, other)
    assert written.replaced == ["first"]
    assert torch.equal(found["first"], state["first"])
    assert "second" not in found


def test_a_tie_of_another_shape_there_stays_lost_with_all_that_share_it(tmp_path: Path) -> None:
    other = {**tied(2), "a": torch.zeros(4, 8)}
    found, written = taken(tmp_path, damaged(tied(1)), saved(other))
    assert written.replaced == []
    assert list(found) == ["x"]
