import dataclasses
import logging

import pytest
import torch

from trainer_core import PrecisionPlan, resolve_precision

FP32 = PrecisionPlan("fp32", autocast_enabled=False, use_scaler=False)
BF16 = PrecisionPlan("bf16", autocast_enabled=True, use_scaler=False)
FP16 = PrecisionPlan("fp16", autocast_enabled=True, use_scaler=True)


@pytest.mark.parametrize(
    ("mode", "device", "plan"),
    [
        ("auto", "cpu", FP32),
        ("fp32", "cpu", FP32),
        ("bf16", "cpu", BF16),
        ("fp32", "cuda", FP32),
        ("bf16", "cuda:1", BF16),
        ("fp16", "cuda", FP16),
        ("auto", "mps", FP32),
        ("bf16", "mps", BF16),
    ],
)
def test_what_each_wish_comes_to(mode: str, device: str, plan: PrecisionPlan) -> None:
    assert resolve_precision(mode, device) == plan
    assert resolve_precision(mode, torch.device(device)) == plan


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_fp16_without_loss_scaling_becomes_fp32_and_says_so(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_precision("fp16", device) == FP32
    assert "fp16" in caplog.text
    assert device in caplog.text


@pytest.mark.parametrize(("native", "plan"), [(True, BF16), (False, FP16)])
def test_auto_on_cuda_asks_the_device(
    native: bool, plan: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert resolve_precision("auto", "cuda:0") == plan
    assert asked == [False]


class NoDevice:
    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("mode", ["", "fp64", "BF16", None, 16])
def test_an_unknown_mode_is_a_value_error(mode: str) -> None:
    with pytest.raises(ValueError, match="unknown precision mode"):
        resolve_precision(mode, "cpu")


@pytest.mark.parametrize("plan", [FP32, BF16, FP16])
def test_a_plan_survives_being_plain_data(plan: PrecisionPlan) -> None:
    plain = plan.as_dict()
    assert set(plain) == {"mode", "autocast_enabled", "use_scaler"}
    assert PrecisionPlan.from_dict(plain) == plan


@pytest.mark.parametrize(
    "value",
    [{}, {"mode": "fp32"}, {**FP32.as_dict(), "use_scaler": 1}, {**FP32.as_dict(), "mode": 3}],
)
def test_anything_else_is_no_plan(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a precision plan"):
        PrecisionPlan.from_dict(value)


def test_a_plan_is_frozen_knows_its_dtype_and_is_never_auto() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP32.mode = "bf16"  # type: ignore[misc]
    assert [plan.dtype for plan in (FP32, BF16, FP16)] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    with pytest.raises(ValueError, match="unknown precision mode"):
        PrecisionPlan("auto", autocast_enabled=False, use_scaler=False)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_autocast_under_the_plan_computes_in_its_dtype(mode: str) -> None:
    plan = resolve_precision(mode, "cpu")
    with torch.autocast("cpu", dtype=plan.dtype, enabled=plan.autocast_enabled):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == plan.dtype
