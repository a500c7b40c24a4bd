"""Every file of the corpus: what `inspect` and `verify` say, against torch itself and the corpus page."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ckpttool
from ckpttool.cli.main import main
from tests.ckpttool.model.conftest import Said

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
FILES = sorted(
    str(path.relative_to(CORPUS))
    for path in CORPUS.rglob("*")
    if path.is_file() and path.name != "README.md"
)
# Names that the corpus page has for containers, and the tool's own.
KINDS = {
    "zip": "torch-zip",
    "zip-corrupt": "torch-zip",
    "legacy": "torch-legacy",
    "torchscript": "torchscript",
    "pt2": "pt2",
    "pickle": "pickle",
    "DCP .metadata (pickle)": "dcp-metadata",
    "DCP shard (concatenated zips)": "dcp-shard",
}
CUT = ("torch-2.13.0/truncated_zip.pt", "torch-2.13.0/truncated_legacy.pt")


@cache
def page() -> dict[str, list[str]]:
    """The rows of the corpus page by file, as cells."""
    rows = {}
    for line in (CORPUS / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0].startswith("torch-"):
            rows[cells[0]] = cells
    return rows


@cache
def inspect(file: str) -> dict[str, Any]:
    """The document of `inspect --json`."""
    done = CliRunner().invoke(
        main, ["inspect", "--json", str(CORPUS / file)], catch_exceptions=False
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_page_lists_what_is_there() -> None:
    assert set(page()) <= set(FILES)
    assert len(page()) == 60


@pytest.mark.parametrize("file", FILES)
def test_tensors_are_those_that_torch_finds(file: str, torch_says: Said) -> None:
    """Names, dtypes, shapes, layouts; where torch loads nothing, the tool names the kind."""
    document, answer = inspect(file), torch_says[str(CORPUS / file)]
    # torch.load hands safetensors to the package of that name where it is installed.
    if not answer["loads"] or document["kind"] in ("pickle", "safetensors"):
        assert document["kind"] in document_kinds(file)
        return
    facts = ("name", "dtype", "shape", "layout", "requires_grad", "subclass")
    ours = [[tensor[fact] for fact in facts] for tensor in document["tensors"]]
    assert ours == [[tensor[fact] for fact in facts] for tensor in answer["tensors"]]
    if file in page() and page()[file][8].isdigit():
        assert len(ours) == int(page()[file][8])  # the walk of those who made the corpus


def document_kinds(file: str) -> set[str]:
    """Kinds that a file may be said to be: as the page says, or by its suffix where it says nothing."""
    if file in page():
        return {KINDS[page()[file][2]]}
    return {".json": {"json"}, ".safetensors": {"safetensors"}}.get(Path(file).suffix, {"text"})


@pytest.mark.parametrize("file", page())
def test_containers_are_those_of_the_page(file: str) -> None:
    cells, document = page()[file], inspect(file)
    assert document["kind"] == KINDS[cells[2]]
    notes = cells[9]
    if "prefix='" in notes:
        assert document["container"]["prefix"] == notes.partition("prefix='")[2].partition("'")[0]
    if "crc0" in notes:
        assert document["container"]["has_checksums"] is False
    references = cells[7].split("/")[0].strip()
    if (
        references.isdigit()
        and document["kind"] in ("torch-zip", "torch-legacy")
        and file not in CUT
    ):
        assert len({storage_of(t) for t in walk(document)} - {None}) <= int(references)


def walk(document: dict[str, Any]) -> list[dict[str, Any]]:
    tensors: list[dict[str, Any]] = document["tensors"]
    return tensors


def storage_of(tensor: dict[str, Any]) -> str | None:
    key: str | None = tensor["storage"]
    return key


@pytest.mark.parametrize("file", FILES)
def test_what_torch_load_takes_is_predicted(file: str, torch_says: Said) -> None:
    answer, need = torch_says[str(CORPUS / file)], inspect(file)["load_need"]
    if file in CUT or file.endswith(".safetensors"):
        return  # readable enough to be shown, and not by torch, or by another package than torch
    assert (need == "weights-only") == answer["weights_only"], answer.get("why")
    if not answer["loads"] and file in page() and page()[file][5].startswith("ERR"):
        return  # a class or a package that is not here
    if need in ("allow-list", "weights_only=False"):
        assert answer["loads"] or "No module named" in answer["error"]
    if file in page() and "ERR Unsupported global" in page()[file][4]:
        assert need in ("allow-list", "weights_only=False")


@pytest.mark.parametrize("file", [file for file in FILES if file not in CUT])
def test_no_honest_file_is_called_damaged_or_dangerous(file: str) -> None:
    report = ckpttool.verify(CORPUS / file)
    (verdict,) = report.files
    known = page()[file][2] if file in page() else ""
    if KINDS.get(known) in ("torch-zip", "torch-legacy", "torchscript") or file.startswith(
        "seed-runs/"
    ):
        others = () if file.endswith((".pt", ".bin", ".ckpt", ".pth")) else ("not-a-checkpoint",)
        assert verdict.state in ("valid", "intact", *others)
    else:
        assert verdict.state in ("intact", "not-a-checkpoint")
    assert {f.id for f in report.findings if f.severity.value == "error"} <= {"FIL106"}


@pytest.mark.parametrize("file", CUT)
def test_cut_files_are_called_cut(file: str) -> None:
    report = ckpttool.verify(CORPUS / file)
    assert report.files[0].state == "damaged"
    assert "FIL105" in {finding.id for finding in report.findings}
    assert len(inspect(file)["tensors"]) == 44


@pytest.mark.parametrize("run", ["plain", "master", "worker", "pending"])
def test_whole_directories_of_the_seed_system(run: str, torch_says: Said) -> None:
    report = ckpttool.verify(CORPUS / "seed-runs" / run)
    assert {file.state for file in report.files} == {"valid"}
    assert [f for f in report.findings if f.severity.value == "error"] == []
    assert report.newest_valid == max(file.step for file in report.files if file.step is not None)
