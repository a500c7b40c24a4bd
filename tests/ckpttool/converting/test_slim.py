"""`slim`: smaller, with the same values, and memory shared as before; torch compares."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.checks.verify import verify
from ckpttool.converting.checked import is_danger
from ckpttool.converting.sections import SectionError
from ckpttool.converting.slim import Slimming, plan_slim
from ckpttool.errors import CkptToolError, RefusedError
from tests.ckpttool.converting.conftest import Job
from tests.ckpttool.converting.test_harden import (
    FILES,
    NEEDS_A_PACKAGE,
    Runs,
    load_plain,
    save,
    why_not,
)

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
VIEW = CORPUS / "torch-2.13.0" / "small_view_of_big_storage.pt"
MASTER = CORPUS / "seed-runs" / "master" / "step_000000000006.pt"

Complaints = Callable[[list[Job]], dict[str, list[str]]]


def slim(
    path: Path, out: Path, *, keep: tuple[str, ...] = (), drop: tuple[str, ...] = ()
) -> Slimming:
    with plan_slim(str(path), keep=keep, drop=drop) as plan:
        plan.write(str(out))
        return plan


def records(path: Path) -> dict[str, int]:
    """Sizes of the records below the root folder."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}


def test_every_file_of_the_corpus_keeps_its_values(tmp_path: Path, complaints: Complaints) -> None:
    jobs = []
    for index, path in enumerate(FILES):
        out = tmp_path / f"{index}.pt"
        if why_not(path) is not None:
            with pytest.raises(RefusedError):
                slim(path, out)
            continue
        plan = slim(path, out)
        if path.name in NEEDS_A_PACKAGE:
            continue
        jobs.append({"kind": "slim", "old": str(path), "new": str(out)})
        data = sum(size for name, size in records(out).items() if name.startswith("data/"))
        assert data + plan.saved == plan._checkpoint.stored_bytes + unreferenced(plan)
    assert len(jobs) > 50
    assert complaints(jobs) == {}


def unreferenced(plan: Slimming) -> int:
    return sum(saving.nbytes for saving in plan.savings if saving.kind == "record")


def test_all_that_torch_writes_keeps_its_values(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    jobs = []
    for path in sorted(made.glob("*.pt")):
        if path.name.startswith("cyclic"):
            continue
        slim(path, tmp_path / path.name)
        twin = made / path.name.replace("-legacy", "").replace("everyday.pt", "everyday-2.pt")
        jobs.append({"kind": "slim", "old": str(twin), "new": str(tmp_path / path.name)})
    assert complaints(jobs) == {}


def test_a_small_view_of_a_big_storage_shrinks(tmp_path: Path, complaints: Complaints) -> None:
    """Of 20,000 numbers of four bytes three are used."""
    out = tmp_path / "new.pt"
    plan = slim(VIEW, out)
    view = plan._checkpoint.tensors[""]
    assert view.nbytes < 100
    assert records(out)["data/0"] == view.nbytes
    assert plan.saved == records(VIEW)["data/0"] - view.nbytes
    assert out.stat().st_size < 2000 < 80_000 < VIEW.stat().st_size
    assert complaints([{"kind": "slim", "old": str(VIEW), "new": str(out)}]) == {}


def test_a_slice_no_longer_brings_the_whole_tensor(made: Path, tmp_path: Path) -> None:
    plan = slim(made / "slice.pt", tmp_path / "new.pt")
    assert records(tmp_path / "new.pt")["data/0"] == 10 * 4
    assert [tuple(saving) for saving in plan.savings] == [("cut", "weight", 4_000_000 - 40)]


def test_chunks_of_one_storage_are_cut_apart_where_they_do_not_overlap(
    made: Path, tmp_path: Path
) -> None:
    """[0, 8) and [4, 12) of float32 share a run of 12; the others have runs of their own."""
    slim(made / "chunks.pt", tmp_path / "new.pt")
    sizes = [
        size for name, size in records(tmp_path / "new.pt").items() if name.startswith("data/")
    ]
    column = (99 * 200 + 1) * 4
    assert sizes == [12 * 4, 10 * 4, 6 * 4, column]


def test_keep_means_exactly_that(tmp_path: Path, complaints: Complaints) -> None:
    out = tmp_path / "new.pt"
    plan = slim(MASTER, out, keep=("model",))
    assert plan.dropped == [
        *("optimizer", "scaler", "scheduler", "step", "samples", "tokens", "config", "rng"),
        *("coordinator", "precision"),
    ]
    saved = {saving.name: saving.nbytes for saving in plan.savings}
    assert saved["rng"] == 5056  # the state of torch's generator on the CPU
    jobs = [{"kind": "slim", "old": str(MASTER), "new": str(out), "dropped": plan.dropped}]
    assert complaints(jobs) == {}


def test_what_a_section_shares_with_one_that_stays_is_not_saved(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    """`both` holds nothing but views of `whole`, of which other sections use all."""
    out = tmp_path / "new.pt"
    plan = slim(made / "views.pt", out, drop=("both", "bits"))
    assert {(one.kind, one.name, one.nbytes) for one in plan.savings if one.kind == "section"} == {
        ("section", "both", 0),
        ("section", "bits", 12),
    }
    jobs = [
        {
            "kind": "slim",
            "old": str(made / "views.pt"),
            "new": str(out),
            "dropped": ["both", "bits"],
        }
    ]
    assert complaints(jobs) == {}


def test_unknown_sections_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(SectionError, match="no section 'modle'; there are: model, optimizer, "):
        slim(MASTER, tmp_path / "new.pt", keep=("modle", "step"))
    with pytest.raises(SectionError, match="nor any other"):
        slim(VIEW, tmp_path / "new.pt", drop=("model",))
    assert not list(tmp_path.iterdir())


def test_records_that_nothing_refers_to_are_left_out(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pt", {"a": 1})
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("archive/data/7", b"x" * 1000)
        archive.writestr("archive/.ckpttool/mended.json", b"{}")
    plan = slim(source, tmp_path / "new.pt")
    assert [tuple(saving) for saving in plan.savings] == [("record", "data/7", 1000)]
    assert "data/7" not in records(tmp_path / "new.pt")
    assert (
        records(tmp_path / "new.pt")[".ckpttool/mended.json"] == 2
    )  # the mark goes with the content


def test_content_that_runs_code_goes_only_with_its_section(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pt", {"a": [1.5], "evil": {"deep": (Runs(),)}})
    with pytest.raises(RefusedError, match=r"builtins\.eval can run code"):
        slim(source, tmp_path / "new.pt")
    assert not (tmp_path / "new.pt").exists()
    slim(source, tmp_path / "new.pt", drop=("evil",))
    assert load_plain(tmp_path / "new.pt") == {"a": [1.5]}


def nested(path: Path, inside: bytes, **more: bytes) -> Path:
    """{"a": 5, "x": torch.storage._load_from_bytes(inside)}, in opcodes; `more` are records."""
    load = b"ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(inside)) + inside
    pickled = b"\x80\x03}(X\1\0\0\0aK\5X\1\0\0\0x" + load + b"\x85Ru."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, content in more.items():
            archive.writestr(f"archive/{name}", content)
    return path


EVIL = pickle.dumps(Runs(), 2)


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (EVIL, r"can run code: __builtin__\.eval"),
        (b"nobody can read this", "cannot be read here and so not be judged"),
    ],
)
def test_what_a_nested_load_would_run_goes_only_with_its_section(
    inside: bytes, why: str, tmp_path: Path
) -> None:
    source, out = nested(tmp_path / "old.pt", inside), tmp_path / "new.pt"
    for chosen in ({}, {"keep": ("a", "x")}, {"drop": ("a",)}):
        with pytest.raises(RefusedError, match=why):
            slim(source, out, **chosen)
    assert not out.exists()
    slim(source, out, drop=("x",))
    assert load_plain(out) == {"a": 5}
    slim(source, out := tmp_path / "kept.pt", keep=("a",))
    assert load_plain(out) == {"a": 5}


def test_a_nested_load_two_levels_down(tmp_path: Path) -> None:
    inner = nested(tmp_path / "inner.pt", EVIL).read_bytes()
    with pytest.raises(RefusedError, match=r"__builtin__\.eval"):
        slim(nested(tmp_path / "old.pt", inner), tmp_path / "new.pt", keep=("x",))
    harmless = nested(
        tmp_path / "old.pt", nested(tmp_path / "inner.pt", pickle.dumps({"a": 1}, 2)).read_bytes()
    )
    slim(harmless, tmp_path / "new.pt")  # a warning of `verify`, and no more


def test_a_hidden_pickle_goes_away_with_no_section(tmp_path: Path) -> None:
    for name in ("notes", ".ckpttool/mended.json"):
        source = save(tmp_path / "old.pt", {"a": 1, "b": 2})
        with zipfile.ZipFile(source, "a") as archive:
            archive.writestr(f"archive/{name}", EVIL)
        for chosen in ({}, {"keep": ("a",)}):
            with pytest.raises(RefusedError, match=r"nothing refers to.*__builtin__\.eval"):
                slim(source, tmp_path / "new.pt", **chosen)


def test_nothing_that_verify_calls_dangerous_is_written(tmp_path: Path) -> None:
    hostile = sorted((CORPUS.parent / "hostile-files").glob("*.pt"))
    called = [path for path in hostile if any(map(is_danger, verify(path).findings))]
    assert len(called) > 10
    for path in called:
        with pytest.raises(CkptToolError):
            slim(path, tmp_path / "new.pt")
    assert not list(tmp_path.iterdir())
