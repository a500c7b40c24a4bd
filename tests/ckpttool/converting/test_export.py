"""`export`: against the safetensors library on what torch loads."""

from __future__ import annotations

import builtins
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.converting import safetensors as ours
from ckpttool.converting.export import Exporting, plan_export
from ckpttool.converting.sections import SectionError
from ckpttool.errors import CkptToolError, RefusedError, WriteError
from tests.ckpttool.converting.conftest import Job
from tests.ckpttool.converting.test_harden import FILES

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
NANOGPT = CORPUS / "torch-2.13.0" / "ckpt_nanogpt.pt"
STRIDED = CORPUS / "torch-2.13.0" / "strided.pt"

Complaints = Callable[[list[Job]], dict[str, list[str]]]


def export(path: Path, out: Path, *, allow_loss: bool = False, **options: Any) -> Exporting:
    with plan_export(str(path), **options) as plan:
        plan.write(str(out), allow_loss=allow_loss)
        return plan


def job(path: Path, out: Path, plan: Exporting) -> Job:
    return {
        "kind": "export",
        "old": str(path),
        "new": str(out),
        "section": plan.section,
        "names": plan.renamed,
        "aliases": plan.aliases,
        "without": [*plan.aliases, *(one.path for one in plan.refused)],
    }


def header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return dict(json.loads(file.read(length)))


def test_every_file_with_a_model_equals_what_the_library_writes(
    tmp_path: Path, made: Path, complaints: Complaints
) -> None:
    jobs, without = [], []
    for index, path in enumerate([*FILES, *sorted(made.glob("*.pt"))]):
        out = tmp_path / f"{index}.safetensors"
        try:
            plan = export(path, out, allow_loss=True)
        except (RefusedError, SectionError):
            without.append(path.name)
            assert not out.exists()
            continue
        twin = path.with_name(
            path.name.replace("everyday-legacy", "everyday-2").replace("-legacy", "")
        )
        jobs.append(job(twin if path.parent == made else path, out, plan))
    assert len(jobs) > 45
    assert not [
        name for name in without if name.startswith(("train_", "whole_module", "ckpt", "dtypes"))
    ]
    assert complaints(jobs) == {}


def test_a_tied_module_goes_the_way_of_save_model(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    """The library loads it into a fresh module, and writes the same names and metadata itself."""
    out = tmp_path / "new.safetensors"
    plan = export(made / "module.pt", out)
    assert plan.aliases == {"head.weight": "embed.weight"}
    assert plan.refused == []
    jobs: list[Job] = [{"kind": "load_model", "old": str(made / "module.pt"), "new": str(out)}]
    assert complaints(jobs) == {}


def test_sections(made: Path, tmp_path: Path) -> None:
    assert export(made / "ddp.pt", tmp_path / "a").section == "model"
    assert export(made / "wrapped-ddp.pt", tmp_path / "b").section == "module"
    assert (
        export(CORPUS / "torch-2.13.0" / "lightning.ckpt", tmp_path / "c").section == "state_dict"
    )
    assert export(made / "state.pt", tmp_path / "d").section is None
    with pytest.raises(SectionError, match="no section 'ema'; there are: model, step"):
        export(made / "ddp.pt", tmp_path / "e", section="ema")
    with pytest.raises(SectionError, match="which section?.*there are: state, param_groups"):
        export(
            CORPUS / "torch-2.13.0" / "hf_trainer" / "checkpoint-10" / "optimizer.pt",
            tmp_path / "f",
        )


def test_prefixes_are_shown_and_stripped_on_request(made: Path, tmp_path: Path) -> None:
    """DataParallel puts `module.` before every name; the layer that is called so keeps its name."""
    plan = export(made / "ddp.pt", tmp_path / "with")
    assert plan.prefixes == ["module."]
    assert "module.module.weight" in header(tmp_path / "with")
    export(made / "ddp.pt", tmp_path / "without", strip_prefixes=["module."])
    assert {"module.weight", "embed.weight"} <= header(tmp_path / "without").keys()
    plan = export(made / "state.pt", tmp_path / "bare")
    assert plan.prefixes == []
    assert "module.weight" in header(tmp_path / "bare")
    export(NANOGPT, tmp_path / "stripped", strip_prefixes=["_orig_mod."])
    assert not [name for name in header(tmp_path / "stripped") if "_orig_mod" in name]


def test_names_that_collide_are_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"module\.w and w would both become w"):
        export(state_dict(tmp_path, "module.w", "w"), tmp_path / "new", strip_prefixes=["module."])
    assert not (tmp_path / "new").exists()


def test_what_the_format_has_no_place_for_is_named(tmp_path: Path) -> None:
    with plan_export(str(CORPUS / "torch-2.13.0" / "dtypes_all.pt")) as plan:
        why = {one.path: one.why for one in plan.refused}
        assert why == {
            "complex32": "the format has no dtype complex32",
            "complex128": "the format has no dtype complex128",
        }
        with pytest.raises(RefusedError, match="complex32"):
            plan.write(str(tmp_path / "new"))
    with plan_export(str(CORPUS / "torch-2.13.0" / "quant.pt")) as plan:
        assert {one.why for one in plan.refused} == {"a tensor of layout quantized"}
    with plan_export(str(CORPUS / "torch-2.13.0" / "sparse.pt")) as plan:
        assert "a tensor of layout sparse_csr" in {one.why for one in plan.refused}


def test_another_view_of_what_is_kept_is_never_dropped_in_silence(tmp_path: Path) -> None:
    with plan_export(str(STRIDED)) as plan:
        assert {one.path for one in plan.refused} == {"step", "v1", "v2", "v3"}
        with pytest.raises(RefusedError, match="another view of the memory of transpose"):
            plan.write(str(tmp_path / "new"))
        plan.write(str(tmp_path / "new"), allow_loss=True)
    found = header(tmp_path / "new")
    assert found.pop("__metadata__") == {
        "format": "pt",
        "alias2": "alias1",
    }  # others have not the values of what is kept
    assert not {"step", "v1"} & set(found)


@pytest.mark.parametrize("order", [("a", "format", "z"), ("z", "format", "a")])
def test_a_tied_tensor_called_format_is_kept(order: tuple[str, ...], tmp_path: Path) -> None:
    """The metadata says `format: pt`, and so has no room to say which tensor it is."""
    plan = export(state_dict(tmp_path, *order, tied=True), tmp_path / "new")
    assert plan.aliases == {"a": "format", "z": "format"}
    found = header(tmp_path / "new")
    assert found.pop("__metadata__") == {"format": "pt", "a": "format", "z": "format"}
    assert list(found) == ["format"]


def test_how_many_names_lost_a_prefix_is_counted(tmp_path: Path) -> None:
    source = state_dict(tmp_path, "net.a", "net.b", "head")
    plan = export(source, tmp_path / "new", strip_prefixes=["net.", "module."])
    assert plan.stripped == {"net.": 2, "module.": 0}
    assert set(plan.tensors) == {"a", "b", "head"}


def test_elements_are_aligned_and_the_header_is_plain_json(tmp_path: Path) -> None:
    export(CORPUS / "torch-2.13.0" / "dtypes_all.pt", tmp_path / "new", allow_loss=True)
    data = (tmp_path / "new").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    assert length % 8 == 0
    entries = header(tmp_path / "new")
    assert entries.pop("__metadata__") == {"format": "pt"}
    at = 0
    widths = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4}
    widths |= dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    for entry in entries.values():
        start, stop = entry["data_offsets"]
        assert start == at
        assert (8 + length + start) % widths.get(entry["dtype"], 1) == 0
        at = stop
    assert len(data) == 8 + length + at


def state_dict(folder: Path, *names: str, tied: bool = False) -> Path:
    """A bare state dict of one float32 each, or one for all, made without torch."""
    parts = [b"\x80\x02}("]
    for index, name in enumerate(names):
        storage = pickle.dumps(("storage", 0, str(0 if tied else index), "cpu", 1), 2)[2:-1]
        storage = storage.replace(b"K\x00", b"ctorch\nFloatStorage\n", 1)
        parts += [
            pickle.dumps(name, 2)[2:-1], b"ctorch._utils\n_rebuild_tensor_v2\n(", storage, b"Q",
            b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR",
        ]  # fmt: skip
    path = folder / "state.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"".join([*parts, b"u."]))
        archive.writestr("archive/byteorder", "little")
        for index in range(1 if tied else len(names)):
            archive.writestr(f"archive/data/{index}", struct.pack("<f", index + 0.5))
        archive.writestr("archive/version", "3\n")
    return path


def test_names_of_every_kind(tmp_path: Path) -> None:
    names = ("plain", "π☃", 'quo"te\\', "line\nbreak\x7f\x01", "", "a.b")
    export(state_dict(tmp_path, *names), tmp_path / "new")
    from safetensors import safe_open

    with safe_open(tmp_path / "new", framework="numpy") as file:
        assert {name: file.get_tensor(name)[0] for name in names} == {
            name: index + 0.5 for index, name in enumerate(names)
        }


def test_a_name_that_the_format_keeps_or_cannot_spell_is_refused(tmp_path: Path) -> None:
    with plan_export(str(state_dict(tmp_path, "__metadata__", "ok"))) as plan:
        assert [(one.path, one.why) for one in plan.refused] == [
            ("__metadata__", "the format keeps this name for itself")
        ]


def test_damage_in_what_was_written_is_found(made: Path, tmp_path: Path) -> None:
    """The proof reads the file: one changed bit, one byte more, a header of another kind."""
    with plan_export(str(made / "state.pt")) as plan:
        plan.write(str(tmp_path / "new"))
        entries = ours.ordered(plan._entries())
        metadata = {"format": "pt", **plan.aliases}
        ours.prove("out", str(tmp_path / "new"), entries, metadata, None)
        data = (tmp_path / "new").read_bytes()
        for damaged in (
            data[:-1] + bytes([data[-1] ^ 1]),
            data + b"\0",
            data[:-1],
            data.replace(b"F32", b"I32"),
        ):
            shutil.copyfile(tmp_path / "new", tmp_path / "bad")
            (tmp_path / "bad").write_bytes(damaged)
            with pytest.raises(WriteError):
                ours.prove("out", str(tmp_path / "bad"), entries, metadata, None)


def test_without_the_library_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, made: Path, tmp_path: Path
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "safetensors":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CkptToolError, match=r"pip install 'ckpttool\[export\]'"):
        export(made / "state.pt", tmp_path / "new")
