"""Sharded steps, healthy and damaged: what `verify` says of each."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpttool.actions.repair.deeds import Options
from ckpttool.actions.repair.run import Repair
from ckpttool.checks.verify import Report, verify
from ckpttool.cli.main import main
from tests.corrupt import append, corrupt, cut_end, flip_bit, zero_range

FOUR = "step_000000000004"
# Entries of the stored shards, by arithmetic in model/test_sharded.py: `model.block.linear.weight`
# of rank 0 begins at 1,833 and has 1,705 bytes.
WEIGHT_AT, WEIGHT_BYTES = 1833, 1705


@pytest.fixture
def step(fixtures: Path, tmp_path: Path) -> Path:
    """A healthy sharded step of two ranks, in a run's directory of its own."""
    return Path(shutil.copytree(fixtures / "sharded" / FOUR, tmp_path / FOUR))


def ids(report: Report) -> set[str]:
    return {finding.id for finding in report.findings}


def state(report: Report) -> str:
    (verdict,) = report.files
    return verdict.state


def shard(step: Path, rank: int = 0) -> Path:
    return step / f"__{rank}_0.distcp"


def change_metadata(step: Path, change: Callable[[Any], None]) -> None:
    """Lets torch's own classes read `.metadata` of our own fixture, changes it, and writes it."""
    path = step / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, 4))


def test_a_healthy_step_is_valid_by_its_name_and_intact_by_another(step: Path) -> None:
    report = verify(step)
    assert (state(report), ids(report), report.newest_valid) == ("valid", set(), 4)
    assert report.files[0].checksums == "checked"
    assert report.files[0].size == sum(path.stat().st_size for path in step.iterdir())
    other = step.rename(step.with_name("my checkpoint"))
    assert (state(verify(other)), ids(verify(other))) == ("intact", set())
    assert state(verify(f"{other}/")) == "intact"
    assert verify(other, finite=True).files[0].state == "intact"


def test_what_everybody_may_write_is_said(step: Path) -> None:
    """Of the shards together, of the directory unless its sticky bit keeps others off."""
    shard(step, 0).chmod(0o666)
    shard(step, 1).chmod(0o646)
    step.chmod(0o777)
    words = [one.words for one in verify(step).findings if one.id == "TRU108"]
    names = f"{shard(step, 0).name}, {shard(step, 1).name}"
    assert words == [
        "everybody may add and replace files here",
        f"2 shards may be written by everybody: {names}",
    ]
    step.chmod(0o1777)
    shard(step, 0).chmod(0o644)
    shard(step, 1).chmod(0o644)
    assert "TRU108" not in ids(verify(step))


def test_a_quick_look_opens_no_shard(step: Path) -> None:
    for rank in (0, 1):
        shard(step, rank).write_bytes(bytes(shard(step, rank).stat().st_size))
    report = verify(step, quick=True)
    assert (state(report), ids(report)) == ("valid", set())
    assert state(verify(step)) == "damaged"


def _flip_weight(step: Path) -> None:
    data = shard(step).read_bytes()[WEIGHT_AT : WEIGHT_AT + WEIGHT_BYTES]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
        content = archive.read(info)
    place = shard(step).read_bytes().index(content, WEIGHT_AT)
    corrupt(shard(step), flip_bit, place + 21, 3)


def _swap_shards(step: Path) -> None:
    one, other = shard(step).read_bytes(), shard(step, 1).read_bytes()
    shard(step).write_bytes(other)
    shard(step, 1).write_bytes(one)


def _swap_ranks(step: Path) -> None:
    one, other = step / "rank_00000.pt", step / "rank_00001.pt"
    one.rename(step / "away")
    other.rename(one)
    (step / "away").rename(other)


def _link_shard(step: Path) -> None:
    shard(step).rename(step.parent / "elsewhere")
    shard(step).symlink_to(step.parent / "elsewhere")


DAMAGE: dict[str, tuple[Callable[[Path], object], str, set[str]]] = {
    "metadata missing": (lambda s: (s / ".metadata").unlink(), "incomplete", {"SHD101"}),
    "metadata empty": (lambda s: (s / ".metadata").write_bytes(b""), "damaged", {"FIL102"}),
    "metadata zeros": (
        lambda s: corrupt(s / ".metadata", zero_range, 0, 5176),
        "damaged",
        {"FIL103"},
    ),
    "metadata cut": (lambda s: corrupt(s / ".metadata", cut_end, 900), "damaged", {"FIL123"}),
    "metadata is something else": (
        lambda s: (s / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "damaged",
        {"SHD102"},
    ),
    "shard missing": (lambda s: shard(s, 1).unlink(), "incomplete", {"SHD103"}),
    "shard empty": (lambda s: shard(s, 1).write_bytes(b""), "damaged", {"SHD104", "SHD113"}),
    "shard cut": (lambda s: corrupt(shard(s, 1), cut_end, 100), "damaged", {"SHD104", "SHD113"}),
    "shard longer": (
        lambda s: corrupt(shard(s), append, b"x" * 9),
        "damaged",
        {"SHD112", "SHD113"},
    ),
    "a bit of a weight": (_flip_weight, "damaged", {"FIL109", "SHD113"}),
    "an entry zeroed": (
        lambda s: corrupt(shard(s), zero_range, WEIGHT_AT, WEIGHT_BYTES),
        "damaged",
        {"SHD106", "SHD113"},
    ),
    "shards swapped": (_swap_shards, "damaged", {"SHD114"}),
    "a stale shard": (
        lambda s: shutil.copy(shard(s, 1), shard(s, 2)),
        "valid",
        {"SHD108"},
    ),
    "a shard is a link": (_link_shard, "damaged", {"SHD105"}),
    "trainer.pt missing": (lambda s: (s / "trainer.pt").unlink(), "incomplete", {"SHD109"}),
    "trainer.pt cut": (lambda s: corrupt(s / "trainer.pt", cut_end, 500), "damaged", set()),
    "a rank missing": (lambda s: (s / "rank_00001.pt").unlink(), "incomplete", {"SHD110"}),
    "ranks swapped": (_swap_ranks, "damaged", {"SHD110"}),
    "a rank cut": (lambda s: corrupt(s / "rank_00001.pt", cut_end, 500), "damaged", set()),
    "a rank too many": (
        lambda s: shutil.copy(s / "rank_00001.pt", s / "rank_00002.pt"),
        "valid",
        {"SHD108"},
    ),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_each_damage_is_found(step: Path, name: str) -> None:
    """Cases D11 (a stale shard) and D12 (a shard missing) among them."""
    damage, expected, found = DAMAGE[name]
    damage(step)
    report = verify(step)
    assert state(report) == expected
    assert found <= ids(report)
    if found:
        assert not {id for id in ids(report) if id.startswith("SHD")} - found
    else:  # said as of any file
        assert {"FIL105"} <= ids(report)
    assert (report.newest_valid == 4) == (expected == "valid")


def _forget_digests(step: Path) -> None:
    """As steps were saved before the ranks recorded their shards."""
    import torch

    for path in step.glob("rank_*.pt"):
        own = torch.load(path, weights_only=True)
        del own["shards"]
        torch.save(own, path)


def test_shards_of_two_steps_are_never_taken_for_one(fixtures: Path, tmp_path: Path) -> None:
    """They have the same sizes, names, shapes and sound checksums: only their digests differ."""
    run = Path(shutil.copytree(fixtures / "sharded", tmp_path / "run"))
    two, four = run / "step_000000000002", run / FOUR
    own = shard(four).read_bytes()
    shutil.copy(shard(two), shard(four))
    report = verify(run)
    (found,) = (one for one in report.findings if one.id == "SHD113")
    assert found.place.path == str(shard(four))
    assert "is not the shard that this step was saved with" in found.words
    assert {file.step: file.state for file in report.files} == {2: "valid", 4: "damaged"}
    assert report.newest_valid == 2
    shard(two).write_bytes(own)  # exchanged: neither is whole any more
    report = verify(run)
    words = {one.place.path: one.words for one in report.findings if one.id == "SHD114"}
    assert words == {
        str(
            shard(step)
        ): f"it lies in {other.name}, by the size and SHA-256 that are recorded of it"
        for step, other in ((two, four), (four, two))
    }
    assert {file.state for file in report.files} == {"damaged"} and report.newest_valid is None
    # Sizes alone say nothing here, and a quick look opens no shard.
    assert {file.state for file in verify(run, quick=True).files} == {"valid"}
    _forget_digests(four)
    assert {file.step: file.state for file in verify(run).files} == {2: "damaged", 4: "valid"}


def test_records_of_shards_that_do_not_fit(step: Path) -> None:
    import torch

    path = step / "rank_00001.pt"
    own = torch.load(path, weights_only=True)
    whole = own["shards"]["__1_0.distcp"]
    for shards, expected in (
        ({}, {"SHD113"}),  # nobody wrote a shard that the metadata names
        ({"__1_0.distcp": whole, "__1_1.distcp": whole}, {"SHD113"}),  # one is gone, unnoticed
        ({"__1_0.distcp": whole["sha256"]}, {"SHD110"}),
        ({"__1_0.distcp": {**whole, "sha256": "0"}}, {"SHD110"}),
        ([whole], {"SHD110"}),
    ):
        torch.save({**own, "shards": shards}, path)
        report = verify(step)
        assert (state(report), ids(report)) == ("damaged", expected)
    torch.save(own, path)
    corrupt(shard(step), append, b"x")
    assert {"SHD113"} <= ids(verify(step, quick=True))


def test_another_name_says_that_the_step_is_another(step: Path) -> None:
    renamed = step.rename(step.with_name("step_000000000005"))
    report = verify(renamed)
    assert state(report) == "wrong-step"
    assert ids(report) == {"SCH102"}


def _rename_shard(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            if place.relative_path == "__1_0.distcp":
                place.relative_path = name

    return change


def _chunk(metadata: Any, name: str, number: int) -> Any:
    return metadata.state_dict_metadata[name].chunks[number]


def _drop_chunk(metadata: Any) -> None:
    gone = metadata.state_dict_metadata["model.embed.weight"].chunks.pop()
    index = next(
        i
        for i in metadata.storage_data
        if (i.fqn, i.offset) == ("model.embed.weight", gone.offsets)
    )
    del metadata.storage_data[index]


def _other_dtype(metadata: Any) -> None:
    import torch

    metadata.state_dict_metadata["model.steps"].properties.dtype = torch.float64


def _other_shape(metadata: Any) -> None:
    """Both pieces of [4, 8] become [2, 16] of a tensor [4, 16], with the same bytes."""
    import torch

    entry = metadata.state_dict_metadata["model.block.linear.weight"]
    entry.size = torch.Size((4, 16))
    places = {
        index.offset: index
        for index in metadata.storage_data
        if index.fqn.endswith("model.block.linear.weight")
    }
    for chunk in entry.chunks:
        index = places[chunk.offsets]
        place = metadata.storage_data.pop(index)
        chunk.sizes = torch.Size((2, 16))
        chunk.offsets = torch.Size((chunk.offsets[0] // 2, 0))
        object.__setattr__(index, "offset", chunk.offsets)
        metadata.storage_data[index] = place


def _zero_bytes(metadata: Any) -> None:
    for index, place in metadata.storage_data.items():
        if index.fqn == "model.steps":
            place.length = 0


def _lose_place(metadata: Any) -> None:
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if index.fqn != "model.steps"
    }


def _transform(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


def _field(target: str, **values: Any) -> Callable[[Any], None]:
    """Sets fields of one of the objects that no tensor is found by."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.steps"]
        index = next(index for index in metadata.storage_data if index.fqn == "model.steps")
        objects = {"meta": metadata.storage_meta, "properties": entry.properties}
        found = {"metadata": metadata, "index": index, **objects}[target]
        for name, value in values.items():
            object.__setattr__(found, name, value)

    return change


def _rename_field(target: str, old: str, new: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        found = metadata if target == "metadata" else metadata.storage_meta
        found.__dict__[new] = found.__dict__.pop(old)

    return change


# What torch's classes declare of each field; torch itself loads tensors without a look at these.
FIELDS: dict[str, Callable[[Any], None]] = {
    "other keys for a name": lambda m: m.planner_data.update({"model.steps": ("model", "stepz")}),
    "no keys for a name": lambda m: m.planner_data.pop("model.steps"),
    "keys for nothing": lambda m: m.planner_data.update({"more": ("more",)}),
    "keys that are no tuple": lambda m: m.planner_data.update({"model.steps": 3}),
    "a number as version": _field("metadata", version=1),
    "words as version": _field("metadata", version="1.0.x"),
    "another field": _rename_field("metadata", "version", "versjon"),
    "another field of storage_meta": _rename_field("meta", "save_id", "save_ie"),
    "a list as storage_meta": _field("metadata", storage_meta=[]),
    "a number as save_id": _field("meta", save_id=5),
    "numbers as modules": _field("meta", modules=[1]),
    "a number as checkpoint_id": _field("meta", checkpoint_id=7),
    "words as index": _field("index", index="0"),
    "a number for yes": _field("properties", requires_grad=1),
    "words for no": _field("properties", pin_memory="no"),
}


@pytest.mark.parametrize("name", list(FIELDS))
def test_fields_that_no_tensor_is_found_by(step: Path, name: str) -> None:
    change_metadata(step, FIELDS[name])
    for quick in (True, False):
        report = verify(step, quick=quick)
        assert (state(report), ids(report)) == ("damaged", {"SHD102"})


def test_what_another_planner_keeps_is_its_own(step: Path) -> None:
    for data in (None, "mine", {"model": [1, 2]}, 3):
        change_metadata(step, _field("metadata", planner_data=data))
        assert (state(verify(step)), ids(verify(step))) == ("valid", set())
    change_metadata(step, _field("metadata", later_field=1))
    assert state(verify(step)) == "valid"


def test_damage_in_the_metadata_of_a_plain_directory_is_seen(
    fixtures: Path, tmp_path: Path
) -> None:
    """Nothing records a digest of it. What stays unseen is of no use to any reader, or free text.

    Of 40 single bits two may pass: lengths that only the shards belie (a quick look reads none),
    deprecated switches, hints, the name that the directory had.
    """
    copy = Path(shutil.copytree(fixtures / "corpus/torch-2.13.0/dcp_single", tmp_path / "mine"))
    data = (copy / ".metadata").read_bytes()
    dice = random.Random(9)
    unseen = []
    for _ in range(40):
        at = dice.randrange(len(data))
        corrupt(copy / ".metadata", flip_bit, at, dice.randrange(8))
        if state(verify(copy, quick=True)) == "intact":
            unseen.append(at)
        (copy / ".metadata").write_bytes(data)
    assert len(unseen) <= 2
    assert state(verify(copy)) == "intact"


def _replaced(step: Path, name: str, kind: str) -> None:
    path = step / name
    if kind == "link":
        path.rename(step.parent / "elsewhere")
        path.symlink_to(step.parent / "elsewhere")
        return
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@pytest.mark.parametrize(
    ("name", "id"), [(".metadata", "SHD102"), ("trainer.pt", "SHD109"), ("rank_00001.pt", "SHD110")]
)
def test_what_is_no_file_is_called_that_and_never_opened(
    step: Path, name: str, id: str, kind: str
) -> None:
    """A pipe would block for ever; a link leads to a file that somebody else controls."""
    _replaced(step, name, kind)
    report = verify(step)
    assert (state(report), ids(report)) == ("damaged", {id})
    (found,) = report.findings
    words = {"link": "a symbolic link", "pipe": "a named pipe", "directory": "a directory"}
    assert found.words == f"it is {words[kind]}, no regular file, and is not followed"
    assert found.place.path == str(step / name)
    assert verify(step.parent).files[0].state == "damaged"


def test_many_wrong_entries_of_a_shard_are_one_finding(step: Path) -> None:
    def change(metadata: Any) -> None:
        import torch

        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "properties") and entry.properties.dtype == torch.float32:
                entry.properties.dtype = torch.int32

    change_metadata(step, change)
    report = verify(step)
    places = [(one.id, one.place.path) for one in report.findings]
    assert places == [("SHD106", str(shard(step))), ("SHD106", str(shard(step, 1)))]
    first = report.findings[0]
    # embed, weight, bias and two moments of each, but for the bias's, which rank 1 has.
    assert first.facts["count"] == len(first.place.tensors) >= 6
    assert f"{first.facts['count']} in all: " in first.words
    _swap_shards(step)
    places = [(one.id, one.place.path) for one in verify(step).findings]
    assert len(places) == len(set(places))


def test_a_shard_is_read_once_for_checksums_and_hash(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, int] = {}
    pread, preadv = os.pread, os.preadv

    def note(descriptor: int, count: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        read[name] = read.get(name, 0) + count
        return count

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        data = pread(descriptor, length, offset)
        note(descriptor, len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: note(fd, preadv(fd, *rest)))
    assert state(verify(step)) == "valid"
    sizes = {f"__{rank}_0.distcp": shard(step, rank).stat().st_size for rank in (0, 1)}
    assert {name: read[name] for name in sizes} == sizes


CHANGED: dict[str, tuple[Callable[[Any], None], str, set[str]]] = {
    "an absolute path": (_rename_shard("/etc/passwd"), "damaged", {"SHD105", "SHD108"}),
    "a path that leads out": (_rename_shard("../../x.bin"), "damaged", {"SHD105", "SHD108"}),
    "a path below": (_rename_shard("more/__1_0.distcp"), "damaged", {"SHD105", "SHD108"}),
    "backslashes": (_rename_shard("..\\x"), "damaged", {"SHD105", "SHD108"}),
    "a piece left out": (_drop_chunk, "damaged", {"SHD107", "SHD112"}),
    "another dtype": (_other_dtype, "damaged", {"SHD106"}),
    "another shape": (_other_shape, "damaged", {"SHD106"}),
    "no bytes for a number": (_zero_bytes, "damaged", {"SHD106", "SHD112"}),
    "no place for a tensor": (_lose_place, "damaged", {"SHD102", "SHD112"}),
    "compressed": (_transform, "unreadable", {"SHD111"}),
}


@pytest.mark.parametrize("name", list(CHANGED))
def test_metadata_that_says_something_else(step: Path, name: str) -> None:
    change, expected, found = CHANGED[name]
    change_metadata(step, change)
    report = verify(step)
    assert (state(report), ids(report)) == (expected, found)
    assert report.could_not_check == (expected == "unreadable")


def test_metadata_that_runs_code_is_dangerous_and_never_run(step: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    change_metadata(step, lambda metadata: setattr(metadata, "planner_data", Payload()))
    for quick in (True, False):
        report = verify(step, quick=quick)
        assert (state(report), ids(report)) == ("dangerous", {"TRU101"})
        (found,) = report.findings
        how = "torch.distributed.checkpoint unpickles it without an allow-list, which can run code"
        assert found.words == f"{how}: posix.system"
        assert found.remedy == "do not load it; find out where it came from"
    assert not (tmp_path / "ran").exists()


class Foreign:
    """A class that nobody knows. `MetadataIndex` and the like hold what they are given."""


def _function_of_torch(metadata: Any) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata.planner_data = FileSystemReader  # reads other files, unpickling these


UNKNOWN: dict[str, Callable[[Any], None]] = {
    "planner data": lambda m: setattr(m, "planner_data", Foreign()),
    "within planner data": lambda m: m.planner_data.update({"model.steps": (Foreign(),)}),
    "the id": lambda m: setattr(m.storage_meta, "checkpoint_id", Foreign()),
    "a place": lambda m: m.storage_data.update({next(iter(m.storage_data)): Foreign()}),
    "an entry": lambda m: m.state_dict_metadata.update({"model.steps": Foreign()}),
    "a later field": lambda m: setattr(m, "later", [Foreign()]),
    "a function of torch's": _function_of_torch,
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_metadata_with_a_class_that_is_not_known_is_never_called_good(
    step: Path, name: str
) -> None:
    """torch's reader calls `pickle.load`: there is no allow-list that would stop it."""
    change_metadata(step, UNKNOWN[name])
    for quick in (True, False):
        report = verify(step, quick=quick)
        (found,) = [one for one in report.findings if one.id == "TRU102"]
        assert (state(report), report.newest_valid) == ("dangerous", None)
        assert found.severity.value == "error"
        assert "torch.distributed.checkpoint unpickles it without an allow-list" in found.words
        assert "weights_only" not in f"{found.words} {found.remedy}"
        assert "safe_globals" not in str(found.remedy)


def _as_torch_2_2(metadata: Any) -> None:
    """Until torch 2.3 the properties were of a class of sharded tensors; no `StorageMeta` either."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    del metadata.storage_meta, metadata.version
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = TensorProperties(dtype=entry.properties.dtype)


def _as_an_os_path(kind: str) -> Callable[[Any], None]:
    return lambda metadata: setattr(
        metadata.storage_meta, "checkpoint_id", getattr(pathlib, kind)()
    )


HONEST: dict[str, Callable[[Any], None]] = {
    "torch 2.2": _as_torch_2_2,
    "a path": _as_an_os_path("Path"),
    "a pure path": _as_an_os_path("PurePath"),
    "a path of Windows": _as_an_os_path("PureWindowsPath"),
    "no planner data": lambda m: setattr(m, "planner_data", None),
    "an ordered dictionary": lambda m: setattr(m, "planner_data", OrderedDict(m.planner_data)),
    "channels last": lambda m: setattr(
        m.state_dict_metadata["model.steps"].properties,
        "memory_format",
        __import__("torch").channels_last,
    ),
    "sparse": lambda m: setattr(
        m.state_dict_metadata["model.steps"].properties, "layout", __import__("torch").sparse_coo
    ),
}


@pytest.mark.parametrize("name", list(HONEST))
def test_metadata_as_torch_writes_it_is_not_refused(step: Path, name: str) -> None:
    change_metadata(step, HONEST[name])
    report = verify(step)
    assert (state(report), ids(report)) == ("valid", set())


@pytest.mark.filterwarnings("ignore")  # of one process without a process group
def test_what_torch_saves_by_itself_is_intact_and_an_unknown_object_is_told(tmp_path: Path) -> None:
    """Objects are loaded with `weights_only=False`, but only where a program asks for them."""
    import torch
    import torch.distributed.checkpoint as dcp

    plain = {"model": {"w": torch.ones(3, dtype=torch.bfloat16)}, "a": [1, None, (2.5, "x")]}
    dcp.save({**plain, "d": OrderedDict(b=True)}, checkpoint_id=tmp_path / "plain")
    report = verify(tmp_path / "plain")
    assert (state(report), ids(report)) == ("intact", set())
    dcp.save({**plain, "mine": Foreign()}, checkpoint_id=tmp_path / "other")
    report = verify(tmp_path / "other")
    (found,) = report.findings
    assert (state(report), found.id, found.severity.value) == ("intact", "TRU102", "warning")
    how = "torch.distributed.checkpoint unpickles it without an allow-list, which imports"
    assert found.words == f"{how} 1 unknown name: {__name__}.Foreign"
    assert found.place.tensors == ("mine",)
    assert "safe_globals" not in str(found.remedy)


def test_metadata_of_each_rank_is_not_called_missing(fixtures: Path, tmp_path: Path) -> None:
    """As `dcp.save(use_collectives=False)` leaves it, which torch loads again."""
    mine = Path(shutil.copytree(fixtures / "corpus/torch-2.13.0/dcp_single", tmp_path / "mine"))
    (mine / ".metadata").rename(mine / "__0.metadata")
    report = verify(mine)
    assert (state(report), ids(report), report.could_not_check) == ("unreadable", {"SHD111"}, True)
    shown = CliRunner().invoke(main, ["inspect", str(mine)])
    assert shown.exit_code == 3
    assert "1 rank wrote metadata each (use_collectives=False)" in " ".join(shown.output.split())


def test_inspect_does_not_recommend_to_load_what_runs_code(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "sharded", tmp_path / "run"))
    change_metadata(run / FOUR, UNKNOWN["planner data"])
    shown = CliRunner().invoke(main, ["inspect", str(run / FOUR)])
    assert shown.exit_code == 1
    lines = [line for line in shown.output.splitlines() if line.split()[:1] == ["load"]]
    runs = "torch.distributed.checkpoint.load unpickles .metadata, which runs code that the file"
    assert lines and f"do not: {runs} chooses" in " ".join(shown.output.split())
    row = CliRunner().invoke(main, ["inspect", str(run), "--json"]).output
    needs = {one["name"]: one["load_need"] for one in json.loads(row)["steps"]}
    assert needs == {"step_000000000002": "distributed", FOUR: "distributed-runs-code"}


def test_other_names_in_a_step_are_a_note_unless_a_system_made_them(step: Path) -> None:
    for name in (".DS_Store", "._x", "Thumbs.db", "desktop.ini", ".nfs00000000000000aa00000001"):
        (step / name).touch()
    (step / "@eaDir").mkdir()
    assert ids(verify(step)) == set()
    (step / "sub").mkdir()
    (step / "notes.txt").write_text("mine")
    (step / ".metadata.tmp").write_bytes(b"")
    (found,) = verify(step).findings
    assert (found.id, found.severity.value, found.place.path) == ("SHD108", "info", str(step))
    names = ".metadata.tmp, notes.txt, sub/"
    assert found.words == f"3 names in it that are no part of the step: {names}"
    assert state(verify(step)) == "valid"
    assert ids(verify(step, quick=True)) == {"SHD108"}
    # Under another name it is another program's, with whatever that keeps there.
    assert ids(verify(step.rename(step.with_name("mine")))) == set()


def test_an_entry_that_runs_code_is_dangerous(step: Path, tmp_path: Path) -> None:
    """The object `optimizer.param_groups.0.lr` is the first entry of rank 1's shard."""
    import torch

    class Payload:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    evil = io.BytesIO()
    torch.save(Payload(), evil)
    data = shard(step, 1).read_bytes()
    shard(step, 1).write_bytes(data + evil.getvalue())

    def point(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn == "optimizer.param_groups.0.lr":
                place.offset, place.length = len(data), len(evil.getvalue())

    change_metadata(step, point)
    report = verify(step)
    assert state(report) == "dangerous"
    (found,) = [finding for finding in report.findings if finding.id == "TRU101"]
    assert found.place.path == str(shard(step, 1))
    assert found.place.tensors == ("optimizer.param_groups.0.lr",)
    assert not (tmp_path / "ran").exists()


def test_a_newer_pickle_protocol_and_slots_read_the_same(step: Path) -> None:
    path = step / ".metadata"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), 5))
    assert (state(verify(step)), ids(verify(step))) == ("valid", set())


def test_a_directory_with_both_kinds(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "sharded", run)
    shutil.copy(fixtures / "healthy" / "step_000000000006.pt", run)
    report = verify(run)
    assert [(file.step, file.state) for file in report.files] == [
        (2, "valid"),
        (4, "valid"),
        (6, "valid"),
    ]
    assert report.newest_valid_path == str(run / "step_000000000006.pt")
    assert "PTR104" in ids(report)
    shutil.copy(fixtures / "healthy" / "step_000000000004.pt", run)
    assert "DIR106" in ids(verify(run))


def test_the_pointer_records_the_metadata(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "sharded", run)
    assert ids(verify(run)) == set()
    change_metadata(run / FOUR, lambda metadata: setattr(metadata, "version", "1.0.1"))
    report = verify(run)
    assert {"PTR109"} <= ids(report)
    assert report.files[-1].state == "not-as-recorded"
    assert report.newest_valid == 2


@pytest.mark.parametrize(
    "file", ["step_000000000004/", "./step_000000000004", "../run/step_000000000004", "step_4"]
)
def test_a_pointer_names_a_sharded_step_plainly_or_is_not_followed(
    fixtures: Path, tmp_path: Path, file: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "sharded", run)
    (run / "latest.json").write_text(f'{{"step": 4, "file": "{file}"}}')
    assert ids(verify(run)) == {"PTR103"}


def test_a_step_that_is_a_link_is_told_and_set_aside(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "sharded", run)
    link = run / "step_000000000008"
    link.symlink_to(FOUR)
    found = [one for one in verify(run).findings if one.id == "DIR105"]
    assert [(one.place.path, one.severity.value) for one in found] == [(str(link), "error")]
    work = Repair(str(run), Options())
    assert work.make_plan().deeds
    work.carry_out()
    assert not link.is_symlink() and (run / FOUR).is_dir()
    assert "DIR105" not in ids(verify(run))


def test_a_pointer_to_a_link_is_not_followed(fixtures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "sharded", run)
    (run / FOUR).rename(tmp_path / "elsewhere")
    (run / FOUR).symlink_to(tmp_path / "elsewhere")
    report = verify(run)
    assert {"PTR103", "DIR105"} <= ids(report)
    assert [file.step for file in report.files if file.state == "valid"] == [2]


def test_the_leftover_that_has_what_the_step_lacks_is_named(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "sharded-damaged", tmp_path / "run"))
    assert "DIR116" not in ids(verify(run))  # what is proven is said of the step: SHD114
    _forget_digests(run / FOUR)
    report = verify(run)
    (found,) = [finding for finding in report.findings if finding.id == "DIR116"]
    assert found.facts["files"] == ["__1_0.distcp"]
    assert found.remedy is not None
    subprocess.run(["sh", "-c", found.remedy], check=True)
    assert {file.step: file.state for file in verify(run).files}[4] == "valid"


def test_torch_free(step: Path) -> None:
    """Nothing of it needs torch, nor imports what only values need."""
    code = "import sys; from ckpttool.checks.verify import verify; r = verify(sys.argv[1]);"
    code += "assert r.newest_valid == 4; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(step)], check=True)
