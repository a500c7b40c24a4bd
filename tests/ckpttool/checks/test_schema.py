"""SCH: training checkpoints written by torch, each with one thing wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.checks.verify import Report, verify
from ckpttool.findings import Finding, Severity
from tests.ckpttool.checks.builders import name, put, saved, step_bytes, training_state

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def of_file(report: Report) -> list[Finding]:
    return [item for item in report.findings if item.place.path.endswith(name(6))]


def with_state(run: Path, **changes: Any) -> Report:
    """The report on the run after its newest step was saved with other parts."""
    put(run, 6, saved({**training_state(6), **changes}))
    return verify(run)


def only(report: Report) -> tuple[str, Severity, str | None]:
    (finding,) = of_file(report)
    return finding.id, finding.severity, finding.place.key


@pytest.mark.parametrize("content", [None, [1, 2], {}, {"model": {}}, torch.zeros(3)])
def test_sch101_readable_but_no_training_checkpoint(run: Path, content: Any) -> None:
    put(run, 6, saved(content))
    report = verify(run)
    assert only(report) == ("SCH101", ERROR, None)
    assert report.files[-1].state == "not-a-checkpoint"
    assert report.newest_valid == 4


def test_sch101_is_an_info_for_a_lone_file_of_another_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(3)}, path)
    path.chmod(0o644)
    report = verify(path)
    assert [(item.id, item.severity) for item in report.findings] == [("SCH101", INFO)]
    assert report.files[0].state == "intact"
    assert report.newest_valid is None


def test_a_lone_training_checkpoint_of_another_name_is_judged_by_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    torch.save({**training_state(6), "samples": -1}, path)
    path.chmod(0o644)
    assert [item.id for item in verify(path).findings] == ["SCH105"]


def test_a_lone_step_file_is_judged_as_one(run: Path) -> None:
    report = verify(run / name(6))
    assert report.findings == []
    assert (report.newest_valid, report.newest_valid_path) == (6, str(run / name(6)))


def test_sch102_renamed_to_another_step(run: Path) -> None:
    (run / name(6)).rename(run / name(8))
    report = verify(run)
    finding = next(item for item in report.findings if item.id == "SCH102")
    assert finding.severity is ERROR
    assert finding.facts == {"step": 6, "name_step": 8}
    assert finding.remedy == f"mv -n -- '{run / name(8)}' '{run / name(6)}'"
    assert report.files[-1].state == "wrong-step"
    assert report.newest_valid == 4


def test_sch102_copied_over_another_step(run: Path) -> None:
    shutil.copy(run / name(4), run / name(6))
    finding = next(item for item in verify(run).findings if item.id == "SCH102")
    assert finding.remedy is not None
    assert finding.remedy.startswith("move it away")


def test_sch103_no_model(run: Path) -> None:
    state = training_state(6)
    del state["model"]
    put(run, 6, saved(state))
    assert only(verify(run)) == ("SCH103", ERROR, "model")


def test_sch104_other_sections_missing(run: Path) -> None:
    state = training_state(6)
    del state["rng"], state["scheduler"]
    put(run, 6, saved(state))
    report = verify(run)
    assert only(report) == ("SCH104", WARNING, "scheduler")
    assert of_file(report)[0].words == "missing: scheduler, rng"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": "many"}, ("SCH105", ERROR, "tokens")),
        ({"rng": {"python": "garbage", "torch": torch.zeros(5056, dtype=torch.uint8)}},
         ("SCH107", ERROR, "rng.python")),
        ({"rng": {}}, ("SCH108", WARNING, "rng")),
        ({"coordinator": []}, ("SCH109", ERROR, "coordinator")),
        ({"model": [1]}, ("SCH111", ERROR, "model")),
        ({"precision": {}}, ("SCH112", WARNING, None)),
        ({"optimizer": {"state": {}}}, ("SCH113", ERROR, "optimizer.param_groups")),
        ({"precision": {"mode": "fp16", "autocast_enabled": True, "use_scaler": True}},
         ("SCH114", WARNING, "scaler")),
        ({"config": {"api_key": "abc"}}, ("SCH115", WARNING, "config")),
    ],
)  # fmt: skip
def test_one_wrong_part(run: Path, changes: Any, expected: tuple[str, Severity, str]) -> None:
    findings = of_file(with_state(run, **changes))
    assert {(item.id, item.severity) for item in findings} == {expected[:2]}
    if expected[2] is not None:
        assert [item.place.key for item in findings] == [expected[2]]


def test_sch105_a_step_of_another_type_is_no_training_checkpoint(run: Path) -> None:
    report = with_state(run, step="6")
    assert only(report) == ("SCH105", ERROR, "step")
    assert report.files[-1].state == "not-a-checkpoint"


def test_the_value_of_a_secret_is_in_no_part_of_the_report(run: Path) -> None:
    report = with_state(run, config={"deep": [{"hf_token": "SESAME"}]})
    assert "SESAME" not in str(report.as_dict())
    assert "config.deep.0.hf_token" in of_file(report)[0].words


def test_sch106_counters_that_fall(run: Path) -> None:
    report = with_state(run, tokens=100)  # step 4 has seen 256
    (finding,) = of_file(report)
    assert (finding.id, finding.severity, finding.place.key) == ("SCH106", WARNING, "tokens")
    assert finding.words == "tokens falls from 256 at step 4 to 100"
    assert report.newest_valid == 6


def coordinator(step: int, *, generation: int = 1) -> dict[str, Any]:
    model = training_state(step)["model"]
    baseline = {key: value + 0.1 for key, value in model.items()}
    return {
        "node_id": "w1",
        "role": "worker",
        "local_step": step,
        "last_global_step": 3,
        "last_uploaded_step": None,
        "last_dispatched_step": step,
        "last_skipped_step": None,
        "baseline": baseline,
        "baseline_generation": 1,
        "pending_upload": {
            "step": step,
            "base_outer_step": 3,
            "generation": generation,
            "delta": {key: baseline[key] - value for key, value in model.items()},
            "target_state": dict(model),
        },
        "pending_delta": None,
        "pending_delta_step": None,
        "outer": None,
    }


def test_sch110_a_right_pending_delta(run: Path) -> None:
    state = coordinator(6)
    state["baseline"]["1.bias"][:] = torch.tensor([float("nan"), float("inf"), -0.0])
    delta = state["baseline"]["1.bias"] - state["pending_upload"]["target_state"]["1.bias"]
    state["pending_upload"]["delta"]["1.bias"] = delta
    assert of_file(with_state(run, coordinator=state)) == []


def test_sch110_a_delta_that_is_off_by_one_bit(run: Path) -> None:
    state = coordinator(6)
    delta = state["pending_upload"]["delta"]["0.bias"]
    delta.view(torch.int32)[1] ^= 1
    report = with_state(run, coordinator=state)
    assert only(report) == ("SCH110", ERROR, "coordinator.pending_upload.delta")
    assert of_file(report)[0].facts["tensors"] == ["0.bias"]
    assert verify(run, quick=True).findings == []


def test_sch110_a_delta_from_an_older_baseline_is_not_compared(run: Path) -> None:
    state = coordinator(6, generation=0)
    state["pending_upload"]["delta"]["0.bias"] += 1
    assert of_file(with_state(run, coordinator=state)) == []


def test_sch110_a_delivered_upload_whose_job_was_not_cleared_yet(run: Path) -> None:
    state = coordinator(6)
    state["baseline"] = {key: value.clone() for key, value in training_state(6)["model"].items()}
    assert of_file(with_state(run, coordinator=state)) == []
    state["baseline"]["0.bias"] += 1
    assert only(with_state(run, coordinator=state))[0] == "SCH110"


def test_sch110_bfloat16_parts_are_compared_in_float32(run: Path) -> None:
    state = coordinator(6)
    job, baseline = state["pending_upload"], state["baseline"]
    model = {key: value.bfloat16() for key, value in training_state(6)["model"].items()}
    for key, value in model.items():
        baseline[key] = baseline[key].bfloat16()
        job["target_state"][key] = value
        job["delta"][key] = baseline[key].float() - value.float()
    assert of_file(with_state(run, coordinator=state, model=model)) == []


@pytest.mark.parametrize("directory", ["plain", "master", "worker", "pending"])
def test_real_directories_have_no_warning_and_no_error(
    corpus: Path, tmp_path: Path, directory: str
) -> None:
    copy = Path(shutil.copytree(corpus / "seed-runs" / directory, tmp_path / directory))
    for path in copy.iterdir():
        path.chmod(0o644)
    copy.chmod(0o755)
    report = verify(copy, finite=True)
    assert [item for item in report.findings if item.severity is not INFO] == []
    assert report.newest_valid == max(file.step or 0 for file in report.files)
    assert {file.state for file in report.files} == {"valid"}
    # Their numpy states need an allow-list, which is worth an info.
    assert {item.id for item in report.findings} == {"TRU103"}


def test_the_pending_job_of_a_real_worker_is_really_compared(corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(corpus / "seed-runs" / "pending", tmp_path / "pending"))
    state = torch.load(copy / name(6), weights_only=False)
    state["coordinator"]["pending_upload"]["delta"]["lm_head.weight"][3, 4] += 1
    torch.save(state, copy / name(6))
    found = [item for item in verify(copy).findings if item.id == "SCH110"]
    # lm_head and the embedding are one tensor under two names.
    tied = ["lm_head.weight", "transformer.wte.weight"]
    assert sorted(found[0].facts["tensors"]) in (tied, tied[:1])


def test_step_bytes_are_those_of_a_valid_checkpoint(run: Path) -> None:
    assert torch.load(run / name(6), weights_only=True)["step"] == 6
    assert step_bytes(6) == (run / name(6)).read_bytes()
