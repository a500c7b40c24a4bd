"""A hostile or malformed pickle is never carried over; and what leaving things out does to a tree."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import RefusedError
from ckpttool.formats.globals import Trust
from ckpttool.formats.values import GlobalRef, Opaque, OrderedMap
from ckpttool.mending.plan import plan_mend
from ckpttool.mending.prune import prune
from ckpttool.model.checkpoint import open_checkpoint
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import mended, small

HOSTILE = (
    *("reduce-os-system.pt", "reduce-eval.pt", "newobj-opcode.pt", "getattr-chain.pt"),
    *("build-opcode.pt", "stack-global.pt", "second-pickle.pt"),
    *("pickle-in-pickle.pt", "two-names.pt"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_file_is_carried_over(name: str, fixtures: Path, tmp_path: Path) -> None:
    data = (fixtures / "hostile-files" / name).read_bytes()
    for damaged in (data, corrupt.drop_end_record(data)):
        out, _ = mended(tmp_path, damaged, allow_loss=True)
        assert out is not None
        with open_checkpoint(tmp_path / "mended.pt") as checkpoint:
            assert checkpoint.trust is not Trust.DANGEROUS
            assert not [item for item in checkpoint.anomalies if "pickle" in item.code]


class Evil:
    """What would run a command, did anybody load it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch evil",)


def test_what_is_left_out_is_listed_and_must_be_allowed(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"evil": Evil(), "t": torch.ones(2)}, buffer)
    with pytest.raises(RefusedError, match=r"posix\.system|os\.system"):
        mended(tmp_path, buffer.getvalue())
    out, _ = mended(tmp_path, buffer.getvalue(), allow_loss=True)
    assert out is not None
    assert list(torch.load(io.BytesIO(out), weights_only=True)) == ["t"]


def test_a_trailing_pickle_vanishes(fixtures: Path, tmp_path: Path) -> None:
    """Nothing is lost with it, so nothing needs to be allowed."""
    data = (fixtures / "hostile-files" / "second-pickle.pt").read_bytes()
    out, _ = mended(tmp_path, data)
    assert out is not None
    with plan_mend(tmp_path / "mended.pt") as plan:
        assert plan.healthy


def test_classes_that_are_benign_are_kept(corpus: Path, tmp_path: Path) -> None:
    """A cut file gets a new pickle; argparse.Namespace and numpy's scalars stay in it."""
    data = (corpus / "torch-2.13.0" / "train_zip.pt").read_bytes()
    last = [r for r in corrupt.entry_offsets(data) if r.startswith("data/")][-1]
    damaged = corrupt.keep_first(data, corrupt.content_range(data, last).start)
    mended(tmp_path, damaged, allow_loss=True)
    script = "import sys, torch; print(sorted(torch.load(sys.argv[1], weights_only=False)))"
    paths = [str(corpus / "torch-2.13.0" / "train_zip.pt"), str(tmp_path / "mended.pt")]
    before, after = (
        subprocess.run([sys.executable, "-c", script, path], capture_output=True, check=True)
        for path in paths
    )
    assert set(eval(after.stdout)) <= set(eval(before.stdout))
    assert after.stdout.strip() != b"[]"


class Thing:
    """Some class of the user's, with a state."""

    def __init__(self) -> None:
        self.value = 3


def test_unknown_classes_go_over_with_a_whole_pickle(tmp_path: Path) -> None:
    """They were in the file, whose pickle is proven: byte for byte the same again."""
    buffer = io.BytesIO()
    torch.save({"thing": Thing(), "t": torch.ones(2)}, buffer)
    data = buffer.getvalue()
    assert mended(tmp_path, corrupt.drop_directory(data))[0] == data


def test_unknown_classes_do_not_go_into_a_new_pickle(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"thing": Thing(), "t": torch.ones(2), "u": torch.ones(3)}, buffer)
    data = buffer.getvalue()
    damaged = corrupt.keep_first(data, corrupt.content_range(data, "data/1").start)
    out, _ = mended(tmp_path, damaged, allow_loss=True)
    assert out is not None
    assert list(torch.load(io.BytesIO(out), weights_only=True)) == ["t"]
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert [item.split(":")[0] for item in plan.dropped] == ["thing"]


def test_a_record_that_nothing_refers_to(fixtures: Path, tmp_path: Path) -> None:
    """It goes over as it is; but not if it holds a pickle that would run code."""
    records = [*corrupt.read_records(small()), ("archive/notes", b"by hand")]
    data = corrupt.torch_zip(records)
    assert mended(tmp_path, corrupt.drop_end_record(data))[0] == data
    data = (fixtures / "hostile-files" / "unreferenced-record.pt").read_bytes()
    out, _ = mended(tmp_path, corrupt.drop_end_record(data), allow_loss=True)
    assert out is not None
    assert "data/7" not in corrupt.entry_offsets(out)


# Leaving things out of a tree.


def never(_: Any) -> bool:
    return False


def bad() -> Opaque:
    return Opaque(GlobalRef("os", "system"), ("true",), opcode="REDUCE")


def test_dictionaries_lose_keys_and_lists_get_none() -> None:
    tree = {"a": 1, "b": bad(), "c": [1, bad(), 2], "d": (bad(), 4), "e": {"f": bad()}}
    kept, dropped = prune(tree, never)
    assert kept == {"a": 1, "c": [1, None, 2], "d": (None, 4), "e": {}}
    assert [item.split(":")[0] for item in dropped] == ["b", "c.1", "d.0", "e.f"]


def test_sharing_and_cycles_stay() -> None:
    shared = [bad()]
    tree: dict[str, Any] = {"x": shared, "y": (shared, bad())}
    tree["self"] = tree
    kept, _ = prune(tree, never)
    assert kept["x"] is kept["y"][0]
    assert kept["self"] is kept
    assert kept["x"] == [None]


def test_nothing_is_copied_where_nothing_is_left_out() -> None:
    tree = {"a": (1, (2, 3)), "b": frozenset((1, 2)), "c": OrderedMap(x=1)}
    before = (tree["a"], tree["b"], tree["c"])
    kept, dropped = prune(tree, never)
    assert kept is tree
    assert all(a is b for a, b in zip(before, kept.values(), strict=True))
    assert dropped == []


def test_a_call_that_lacks_an_argument_goes_too() -> None:
    call = Opaque(GlobalRef("argparse", "Namespace"), (bad(),), opcode="NEWOBJ")
    plain = Opaque(GlobalRef("argparse", "Namespace"), (), opcode="NEWOBJ")
    plain.state = {"lr": 0.1, "evil": bad()}
    kept, dropped = prune({"call": call, "plain": plain}, never)
    assert list(kept) == ["plain"]
    assert kept["plain"].state == {"lr": 0.1}
    assert len(dropped) == 3


def test_all_is_lost() -> None:
    assert prune(bad(), never)[0] is None


def test_any_depth() -> None:
    tree: list[Any] = [bad()]
    for _ in range(50_000):
        tree = [tree]
    kept, dropped = prune(tree, never)
    assert len(dropped) == 1
    for _ in range(50_000):
        kept = kept[0]
    assert kept == [None]


def test_a_pickle_of_another_protocol(corpus: Path, tmp_path: Path) -> None:
    """torch refuses some opcodes; a new pickle has none of them."""
    data = (corpus / "torch-2.13.0" / "train_proto4.pt").read_bytes()
    last = [r for r in corrupt.entry_offsets(data) if r.startswith("data/")][-1]
    damaged = corrupt.keep_first(data, corrupt.content_range(data, last).start)
    mended(tmp_path, damaged, allow_loss=True)
    with open_checkpoint(tmp_path / "mended.pt") as checkpoint:
        assert checkpoint.load_need != "weights_only=False"
