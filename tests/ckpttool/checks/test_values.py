"""VAL: NaN and infinities, counted in every format that has them, against torch's own count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.checks.verify import Report, verify
from ckpttool.findings import Severity
from tests import corrupt
from tests.ckpttool.checks.builders import name, put, saved, training_state

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL = [torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz]


def counted(run: Path, **tensors: Any) -> dict[tuple[str, str], int]:
    report = report_on(run, **tensors)
    found = (item for item in report.findings if item.id.startswith("VAL"))
    return {(item.id, item.place.tensors[0]): item.facts["count"] for item in found}


def report_on(run: Path, **tensors: Any) -> Report:
    put(run, 6, saved({**training_state(6), "extra": tensors}))
    return verify(run, finite=True)


def by_torch(**tensors: torch.Tensor) -> dict[tuple[str, str], int]:
    expected: dict[tuple[str, str], int] = {}
    for key, tensor in tensors.items():
        wide = tensor.to(torch.float64) if not tensor.is_complex() else torch.view_as_real(tensor)
        for id, count in (("VAL101", wide.isnan().sum()), ("VAL102", wide.isinf().sum())):
            if int(count):
                expected[id, f"extra.{key}"] = int(count)
    return expected


def test_a_healthy_run_has_none(run: Path) -> None:
    assert verify(run, finite=True).findings == []


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_plain_format(run: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, NAN, 1.5, INF, -INF, NAN, -NAN, -0.0, 65504.0], dtype=dtype)
    expected = {("VAL101", "extra.t"): 3, ("VAL102", "extra.t"): 2}
    assert counted(run, t=tensor) == expected == by_torch(t=tensor)


@pytest.mark.parametrize("dtype", [*SMALL, torch.float8_e8m0fnu])
def test_every_pattern_of_eight_bits(run: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(256, dtype=torch.uint8).view(dtype)
    expected = by_torch(t=tensor)
    assert expected
    assert counted(run, t=tensor) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_sixteen_bits(run: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    assert counted(run, t=tensor) == by_torch(t=tensor)


def test_complex_numbers_count_by_part(run: Path) -> None:
    tensor = torch.tensor([complex(NAN, INF), complex(1, NAN), 0j])
    assert counted(run, t=tensor) == {("VAL101", "extra.t"): 2, ("VAL102", "extra.t"): 1}


def test_integers_and_booleans_have_none(run: Path) -> None:
    assert counted(run, a=torch.full((4,), -1), b=torch.tensor([True]), c=torch.tensor([])) == {}


def test_views_count_only_what_they_show(run: Path) -> None:
    base = torch.zeros(6, 5)
    base[0, 0], base[3, 2], base[5, 4] = NAN, NAN, INF
    views = {"row": base[3], "column": base[:, 2], "t": base.t(), "none": base[1:3], "base": base}
    views |= {"spread": base[3, 2].expand(7), "step": base[::3, ::2], "one": base[5, 4]}
    assert counted(run, **views) == by_torch(**views)


def test_a_parameter_and_tied_tensors_each_have_their_name(run: Path) -> None:
    weight = torch.nn.Parameter(torch.tensor([NAN]))
    assert set(counted(run, a=weight, b=weight)) == {("VAL101", "extra.a"), ("VAL101", "extra.b")}


def test_severities_and_words(run: Path) -> None:
    report = report_on(run, t=torch.tensor([NAN, INF, 1.0]))
    nan, inf = (item for item in report.findings if item.id.startswith("VAL"))
    assert (nan.severity, inf.severity) == (Severity.ERROR, Severity.WARNING)
    assert nan.words == "extra.t holds 1 NaN of 3 values"
    assert nan.place.path.endswith(name(6))
    assert report.newest_valid == 6  # the file is what was written


def test_it_is_looked_for_only_when_asked(run: Path) -> None:
    put(run, 6, saved({**training_state(6), "extra": torch.tensor([NAN])}))
    assert verify(run).findings == []
    assert verify(run, finite=True, quick=True).findings == []


def test_legacy_streams_are_counted_too(run: Path) -> None:
    state = {**training_state(6), "extra": {"t": torch.tensor([NAN, 0.0])}}
    put(run, 6, saved(state, _use_new_zipfile_serialization=False))
    ids = [item.id for item in verify(run, finite=True).findings]
    assert sorted(ids) == ["FIL126", "VAL101"]


def test_a_tensor_larger_than_the_buffer(run: Path) -> None:
    tensor = torch.zeros(3_000_000)
    tensor[2_999_999], tensor[1_048_576] = NAN, INF
    assert counted(run, t=tensor, u=tensor[::2], v=tensor.view(1000, 3000).t()) == by_torch(
        t=tensor, u=tensor[::2], v=tensor.view(1000, 3000).t()
    )


def test_the_byte_order_of_the_file_is_kept_to(corpus: Path, tmp_path: Path) -> None:
    data = (corpus / "torch-2.13.0" / "big_endian.pt").read_bytes()
    old = dict(corrupt.read_records(data))["big_endian/data/0"]
    path = tmp_path / "big.pt"
    # As little-endian words, the first would be a tiny number, the second a NaN.
    path.write_bytes(
        corrupt.replace_record(data, "data/0", b"\x7f\xc0\0\0" + b"\x01\0\xc0\x7f" + old[8:])
    )
    report = verify(path, finite=True)
    found = [item for item in report.findings if item.id.startswith("VAL")]
    assert [(item.id, item.facts["count"]) for item in found] == [("VAL101", 1)]
    assert found[0].place.record == "data/0"


def test_compressed_records_are_counted_too(run: Path) -> None:
    state = {**training_state(6), "extra": {"t": torch.tensor([[NAN, 0.0], [INF, NAN]])}}
    put(run, 6, corrupt.rezip(saved(state), deflate=True))
    found = [item for item in verify(run, finite=True).findings if item.id.startswith("VAL")]
    assert [(item.id, item.facts["count"]) for item in found] == [("VAL101", 2), ("VAL102", 1)]


def test_sparse_tensors_are_counted_by_their_values(run: Path) -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [NAN, 1.0], (4,), check_invariants=True)
    assert counted(run, s=sparse) == {("VAL101", "extra.s.values"): 1}
