"""`ckpttool harden` as a person uses it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

from tests.ckpttool.cli.support import CORPUS, ckpttool, ckpttool_json, names

TRAIN = CORPUS / "torch-2.13.0" / "train_proto4.pt"
MODULE = CORPUS / "torch-2.13.0" / "whole_module_sequential.pt"


class Touch:
    """Unpickled, it creates a file."""

    def __reduce__(self) -> Any:
        return eval, ("open('ran', 'w')",)


def save(path: Path, content: Any) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(content, 2))
        archive.writestr("a/version", "3\n")
    return path


def test_a_table_tells_what_became_what(tmp_path: Path) -> None:
    done = ckpttool("harden", TRAIN, "-o", tmp_path / "new.pt")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["where", "was", "is"]
    assert ["(the", "whole)", "pickle", "protocol", "4", "pickle", "protocol", "2"] in lines
    assert ["config", "argparse.Namespace", "dict"] in lines
    assert "loads with weights_only=True" in done.stdout.splitlines()[-1]
    assert names(tmp_path) == ["new.pt"]
    shown = ckpttool("inspect", tmp_path / "new.pt").stdout
    assert "torch.load(weights_only=True), the default since torch 2.6, takes it" in shown


def test_the_document(tmp_path: Path) -> None:
    out = tmp_path / "new.pt"
    document = ckpttool_json("harden", MODULE, "-o", out)
    assert document["changes"] == [
        {
            "path": "",
            "was": "module torch.nn.modules.container.Sequential",
            "now": "its state dict of 6 tensors",
        }
    ]
    assert (document["path"], document["out"], document["dry_run"]) == (
        str(MODULE),
        str(out),
        False,
    )
    assert document["refused"] == []
    assert document["written"] == {"path": str(out), "size": out.stat().st_size}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = ckpttool("harden", TRAIN, "-o", tmp_path / "new.pt", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.endswith("dry run: nothing was written\n")
    assert ckpttool_json("harden", TRAIN, "-o", tmp_path / "new.pt", "--dry-run")["written"] is None
    assert names(tmp_path) == []


def test_what_runs_code_is_refused_by_name(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pt", {"a": 1, "evil\x1b[2J": Touch()})
    done = ckpttool("harden", source, "-o", tmp_path / "new.pt", cwd=tmp_path)
    assert done.returncode == 4
    assert "a call that can run code" in done.stdout
    assert r"evil\x1b[2J (builtins.eval); --allow-loss leaves that out" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    document = ckpttool_json("harden", source, "-o", tmp_path / "new.pt", code=4, cwd=tmp_path)
    assert document["written"] is None
    assert [one["what"] for one in document["refused"]] == ["builtins.eval"]
    assert names(tmp_path) == ["old.pt"]
    done = ckpttool("harden", source, "-o", tmp_path / "new.pt", "--allow-loss", cwd=tmp_path)
    assert done.returncode == 0
    assert "left out" in done.stdout
    assert names(tmp_path) == ["new.pt", "old.pt"]


def test_targets(tmp_path: Path) -> None:
    out = tmp_path / "new.pt"
    out.write_text("mine")
    assert ckpttool("harden", TRAIN, "-o", out).returncode == 4
    assert out.read_text() == "mine"
    assert ckpttool("harden", TRAIN, "-o", out, "--force").returncode == 0
    done = ckpttool("harden", out, "-o", out, "--force")
    assert (done.returncode, "the very file" in done.stderr) == (4, True)
    assert ckpttool("harden", TRAIN).returncode == 2
    assert ckpttool("harden", TRAIN, "-o", tmp_path / "no" / "new.pt").returncode == 3
    assert ckpttool("harden", tmp_path / "missing.pt", "-o", tmp_path / "x.pt").returncode == 3


def test_a_damaged_file_is_sent_to_mend(tmp_path: Path) -> None:
    damaged = CORPUS / "torch-2.13.0" / "truncated_zip.pt"
    done = ckpttool("harden", damaged, "-o", tmp_path / "new.pt")
    assert done.returncode == 4
    assert f"ckpttool mend {damaged} -o OUT" in done.stderr
    assert names(tmp_path) == []


def test_a_long_table_is_cut_and_the_document_is_not(tmp_path: Path) -> None:
    from fractions import Fraction

    source = save(tmp_path / "old.pt", [Fraction(i, 7) for i in range(100)])
    done = ckpttool("harden", source, "-o", tmp_path / "new.pt")
    assert "and 60 more; --json lists all" in done.stdout
    document = ckpttool_json("harden", source, "-o", tmp_path / "new.pt", "--force")
    assert len(document["changes"]) == 100
