"""`ckpttool export` as a person uses it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.ckpttool.cli.support import CORPUS, ckpttool, ckpttool_json, names

NANOGPT = CORPUS / "torch-2.13.0" / "ckpt_nanogpt.pt"
QUANT = CORPUS / "torch-2.13.0" / "quant.pt"
STRIDED = CORPUS / "torch-2.13.0" / "strided.pt"


def tensors(path: Path) -> set[str]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return set(json.loads(data[8 : 8 + length])) - {"__metadata__"}


def test_prefixes_are_shown_and_taken_off_on_request(tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    done = ckpttool("export", NANOGPT, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("section model: 13 tensors, 18.7 KiB\n")
    assert "to take it off: --strip-prefix _orig_mod." in done.stdout
    assert "opened again, every byte compared" in done.stdout
    assert "_orig_mod.emb.weight" in tensors(out)
    done = ckpttool("export", NANOGPT, "-o", out, "--force", "--strip-prefix", "_orig_mod.")
    assert done.returncode == 0
    assert "to take it off" not in done.stdout
    assert "emb.weight" in tensors(out)


def test_the_document(tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    document = ckpttool_json("export", NANOGPT, "-o", out, "--strip-prefix", "_orig_mod.")
    assert (document["section"], document["tensors"], document["nbytes"]) == ("model", 13, 19176)
    assert document["renamed"]["_orig_mod.emb.weight"] == "emb.weight"
    assert document["written"] == {"path": str(out), "size": out.stat().st_size}


def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    done = ckpttool("export", STRIDED, "-o", out)
    assert done.returncode == 4
    assert "v1 (a tensor: another view of the memory of alias1" in done.stderr
    assert names(tmp_path) == []
    assert ckpttool("export", STRIDED, "-o", out, "--allow-loss").returncode == 0
    assert "v1" not in tensors(out)
    document = ckpttool_json("export", QUANT, "-o", tmp_path / "q", "--allow-loss", code=4)
    assert {one["why"] for one in document["refused"]} == {"a tensor of layout quantized"}


def test_sections_that_are_not_there(tmp_path: Path) -> None:
    optimizer = CORPUS / "torch-2.13.0" / "hf_trainer" / "checkpoint-10" / "optimizer.pt"
    done = ckpttool("export", optimizer, "-o", tmp_path / "new")
    assert done.returncode == 2
    assert "which section? none is called model or state_dict; there are: state" in done.stderr
    assert ckpttool("export", NANOGPT, "-o", tmp_path / "new", "--section", "ema").returncode == 2
    assert names(tmp_path) == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = ckpttool("export", NANOGPT, "-o", tmp_path / "new", "--dry-run")
    assert done.returncode == 0
    assert names(tmp_path) == []


def test_a_prefix_that_not_all_names_have_is_said(tmp_path: Path) -> None:
    options = ["--strip-prefix", "nope.", "--strip-prefix", "_orig_mod.emb."]
    done = ckpttool("export", NANOGPT, "-o", tmp_path / "new", *options)
    assert done.returncode == 0, done.stderr
    assert "--strip-prefix nope. is taken off no name: none has it" in done.stdout
    assert "--strip-prefix _orig_mod.emb. is taken off 1 of 13 names" in done.stdout
