"""The manifest, the pointer's record, and what stays true of them when a step is saved again."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_core.test_checkpoint import name_of, state_at, steps
from trainer_core import CheckpointManager
from trainer_core.saving import saver as saver_module
from trainer_core.saving.kept_steps import KeptSteps
from trainer_core.saving.publishing import Written


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "manifest.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def facts(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_line_for_each_step_that_is_kept_and_the_pointer_says_the_same(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (2, 4, 6, 8):
        manager.save(step, state_at(step))
    found = lines(tmp_path)
    assert [(line["step"], line["file"]) for line in found] == [(6, name_of(6)), (8, name_of(8))]
    for line in found:
        path = tmp_path / line["file"]
        assert line.items() >= facts(path).items()
        assert (line["run_id"], line["parent"]) == (manager.run_id, line["step"] - 2)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line["saved"])
    assert json.loads((tmp_path / "latest.json").read_text()) == {
        "step": 8,
        "file": name_of(8),
        **facts(tmp_path / name_of(8)),
        "run_id": manager.run_id,
    }


def test_pointing_to_an_older_step_keeps_what_is_known_of_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (2, 4):
        manager.save(step, state_at(step))
    manager.point_to(2)
    pointer = json.loads((tmp_path / "latest.json").read_text())
    assert pointer.items() >= {"step": 2, **facts(tmp_path / name_of(2))}.items()
    (tmp_path / "manifest.jsonl").unlink()
    CheckpointManager(tmp_path).point_to(4)
    pointer = json.loads((tmp_path / "latest.json").read_text())
    assert pointer == {"step": 4, "file": name_of(4)}


def test_a_step_that_is_saved_again_has_one_line_and_the_new_facts(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for value in (1, 2):
        manager.save(4, {**state_at(4), "config": {"value": "x" * value * 1000}})
    assert [line["step"] for line in lines(tmp_path)] == [4]
    assert lines(tmp_path)[0].items() >= facts(tmp_path / name_of(4)).items()
    pointer = json.loads((tmp_path / "latest.json").read_text())
    assert pointer.items() >= facts(tmp_path / name_of(4)).items()


@pytest.mark.parametrize("moment", ["before the file", "after the file"])
def test_a_crash_while_a_step_is_saved_again_leaves_nothing_that_belies_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_at(4))
    before = facts(tmp_path / name_of(4))
    plain = saver_module.publish

    class Crash(BaseException):
        pass

    def publish(content: Any, path: Any, **options: Any) -> Any:
        is_step = str(path).endswith(".pt")
        if is_step and moment == "before the file":
            raise Crash
        written = plain(content, path, **options)
        if is_step:
            raise Crash
        return written

    monkeypatch.setattr(saver_module, "publish", publish)
    with pytest.raises(Crash):
        manager.save(4, {**state_at(4), "config": {"other": 1}})
    assert (facts(tmp_path / name_of(4)) == before) == (moment == "before the file")
    assert json.loads((tmp_path / "latest.json").read_text()) == {
        "step": 4,
        "file": name_of(4),
        "run_id": manager.run_id,
    }
    assert lines(tmp_path) == []
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] == 4


def test_the_old_file_is_there_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_at(4))
    before = (tmp_path / name_of(4)).read_bytes()
    plain = os.replace

    def replace(source: str, target: str) -> None:
        if target.endswith(".pt"):
            assert Path(target).read_bytes() == before
            assert len(Path(source).read_bytes()) > 1000
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    manager.save(4, {**state_at(4), "config": {"other": 1}})


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    manager.save(2, state_at(2))
    with (tmp_path / "manifest.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "file": "step_0000')
    manager.save(4, state_at(4))
    kept = KeptSteps(tmp_path)
    assert sorted(kept.entries()) == [name_of(2), name_of(4)]
    kept.forget(name_of(2))
    assert [line["step"] for line in lines(tmp_path)] == [4]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]\nnull\n7\n{}\n", b"[" * 100_000])
def test_whatever_is_there_is_no_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.jsonl").write_bytes(content)
    kept = KeptSteps(tmp_path)
    assert kept.entries() == {}
    assert kept.find("x") is None
    kept.add(4, name_of(4), Written(10, "ab"), "run", None)
    entry = kept.find(name_of(4))
    assert entry is not None
    assert (entry["size"], entry["sha256"], entry["parent"]) == (10, "ab", None)


def test_the_last_line_counts(tmp_path: Path) -> None:
    kept = KeptSteps(tmp_path)
    for size in (10, 20):
        kept.add(4, name_of(4), Written(size, "ab"), "run", None)
    entry = kept.find(name_of(4))
    assert entry is not None
    assert entry["size"] == kept.entries()[name_of(4)]["size"] == 20


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "manifest.jsonl").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        KeptSteps(tmp_path).add(4, name_of(4), Written(10, "ab"), "run", None)
    assert (tmp_path / "precious").read_text() == "keep"


def test_without_a_manifest_a_save_is_a_save_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "manifest.jsonl").mkdir()
    CheckpointManager(tmp_path).save(4, state_at(4))
    assert steps(tmp_path) == [4]
    assert "step 4 has no line in it" in caplog.text


def test_the_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, line, pointer, and only then what is old goes, with its line last of all."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(2, state_at(2))
    events: list[str] = []
    replace, unlink, write = os.replace, Path.unlink, os.write

    def replaced(source: str, target: str) -> None:
        events.append(f"rename {os.path.basename(target)}")
        replace(source, target)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        events.append(f"unlink {path.name}")
        unlink(path, missing_ok)

    def wrote(descriptor: int, data: bytes) -> int:
        if data.startswith(b'{"step": '):
            events.append("line")
        return write(descriptor, data)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    monkeypatch.setattr(os, "write", wrote)
    manager.save(4, state_at(4))
    assert events == [
        f"rename {name_of(4)}",
        "line",
        "rename latest.json",
        f"unlink {name_of(2)}",
        "rename manifest.jsonl",
    ]
