"""`harden`: what torch loads from its output with weights_only=True, against the file that it was."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.converting.harden import Hardening, plan_harden
from ckpttool.errors import RefusedError
from tests.ckpttool.converting.conftest import Job

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
FILES = sorted(
    path
    for path in CORPUS.rglob("*")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pt2", ".distcp")
)
# Files of the corpus whose content has no plain form, and why.
WITHOUT = {
    "dcp_single/__0_0.distcp": "not a checkpoint but a shard",
    "export.pt2": "not a checkpoint but an exported program",
    "plain_pickle.pkl": "not a checkpoint but a plain pickle",
    "scripted_ts.pt": "code (a TorchScript program)",
    "traced_ts.pt": "code (a TorchScript program)",
    "truncated_legacy.pt": "damaged: truncated",
    "truncated_zip.pt": "damaged: truncated",
}
# Files that torch itself loads only with a package that is not there.
NEEDS_A_PACKAGE = ("training_args.bin",)

Complaints = Callable[[list[Job]], dict[str, list[str]]]


def harden(path: Path, out: Path, **options: Any) -> Hardening:
    with plan_harden(str(path)) as plan:
        plan.write(str(out), **options)
        return plan


def why_not(path: Path) -> str | None:
    return next((why for name, why in WITHOUT.items() if str(path).endswith(name)), None)


def test_every_file_of_the_corpus(tmp_path: Path, complaints: Complaints) -> None:
    """Those that have a plain form load with weights_only=True, with the same tensors and values."""
    jobs = []
    for index, path in enumerate(FILES):
        out, why = tmp_path / f"{index}.pt", why_not(path)
        if why is None:
            harden(path, out)
            only = path.name in NEEDS_A_PACKAGE
            jobs.append({"kind": "harden", "old": str(path), "new": str(out), "only": only})
            continue
        with pytest.raises(RefusedError, match=why.replace("(", r"\(").replace(")", r"\)")):
            harden(path, out)
        assert not out.exists()
    assert len(jobs) == len(FILES) - 11
    masked = f"harden {CORPUS / 'torch-2.13.0' / 'numpy_objects.pt'}"
    assert complaints(jobs) == {masked: ["array ma is no tensor"]}  # it is a dict; see below


def test_every_way_in_which_torch_writes(
    tmp_path: Path, made: Path, complaints: Complaints
) -> None:
    """Layouts, dtypes, views, protocols and the legacy stream, of which torch cannot read all itself."""
    jobs = []
    for path in sorted(made.glob("*.pt")):
        out = tmp_path / path.name
        if path.name.startswith("wrapped") and path.name != "wrapped-ddp.pt":
            with pytest.raises(RefusedError, match=r"two \(a tensor\)"):
                harden(path, out)
            continue
        harden(path, out)
        twin = made / path.name.replace("-legacy", "")
        # What is in those is spelt out below.
        only = path.name.startswith(("everyday", "cyclic"))
        jobs.append({"kind": "harden", "old": str(twin), "new": str(out), "only": only})
    assert len(jobs) > 25
    assert complaints(jobs) == {}


EVERYDAY = {
    "args": "{'lr': 0.1, 'out': '/runs/a', 'seed': 7}",
    "cfg": "{'lr': 0.1, 'layers': [1, 2, {'name': '${lr}', 'todo': '???', 'none': None}]}",
    "layers": "[1, 2, {'name': '${lr}', 'todo': '???', 'none': None}]",
    "simple": "{'a': 1, 'b': ['red']}",
    "best": "0.10000000149011612",
    "half": "0.0999755859375",
    "epoch": "1099511627776",
    "flag": "True",
    "history": "{'loss': [1.5, 2.5]}",
    "window": "[1, 2, 3]",
    "level": "3",
    "keys": "{'red': 1, (1, 3): 2, 4: 3, ('x',): 4}",
    "frozen": "{1, 2}",
    "span": "{'start': 2, 'stop': 10, 'step': 3}",
    "cut": "{'start': None, 'stop': 5, 'step': None}",
    "money": "'1.10'",
    "third": "'1/3'",
    "when": "'2024-02-29T12:30:01.000005+00:00'",
    "day": "'2024-02-29'",
    "long": "{'days': 1, 'seconds': 2, 'microseconds': 3}",
    "id": "'00000000-0000-0000-0000-000000000005'",
    "config": "{'width': 8, 'inner': {'depth': 2}}",
    "pair": "(1, 'x')",
    "numbers": "torch.arange(6, dtype=torch.int32).reshape(2, 3)",
    "turned": "torch.tensor([[0., 3.], [1., 4.], [2., 5.]], dtype=torch.float64).t()",
    "unsigned": "torch.tensor([65535], dtype=torch.uint16)",
    "words": "[['a', 'bc'], ['', 'd']]",
    "raw": "[b'ab\\x00c']",
    "things": "[[1, 'a'], [None, 2.5]]",
    "table": "{'n': torch.tensor([1, 2], dtype=torch.int32), 'v': torch.tensor([2.5, 3.5], dtype=torch.float64), 's': ['x', 'yz']}",
    "days": "['2024-02-29', 'NaT']",
    "masked": "{'data': torch.tensor([1, 2]), 'mask': torch.tensor([False, True]), 'fill_value': 9}",
    "zero": "5",
    "empty": "torch.zeros(0, 3)",
    "dtype": "torch.bfloat16",
    "device": "torch.device('cuda', 1)",
    "size": "torch.Size((2, 3))",
    "layout": "torch.sparse_coo",
    "bytes": "b'\\x00\\xff'",
    "no bytes": "b''",
    "bytearray": "bytearray(b'ab')",
    "set": "{1, 2}",
    "complex": "1 + 2j",
    "counter": "collections.Counter('aab')",
    "big": "2**100",
    "text": "'π\\ud800\\u2028'",
    "class": "'torch.nn.modules.linear.Linear'",
    "nothing": "None",
    "many": "[True, 1.5, -1, inf]",
}


def spelt_out(new: Path) -> list[Job]:
    """Jobs for what `everyday` of `torch_makes.py` must have become."""
    seeded = "torch.Generator().manual_seed(5).get_state()"
    state = "np.random.RandomState(5).get_state()"
    values = {
        **{(key,): value for key, value in EVERYDAY.items()},
        (
            "torch generator",
        ): f"{{'device': torch.device('cpu'), 'seed': 5, 'offset': None, 'state': {seeded}}}",
        ("state",): f"('MT19937', torch.from_numpy({state}[1]), 624, 0, 0.0)",
        ("generator", "state"): "np.random.PCG64(5).state['state']",
        ("model", "row"): "torch.arange(12.).reshape(3, 4)[1]",
    }
    return [
        {
            "kind": "value",
            "old": f"{new.name} {path}",
            "new": str(new),
            "path": path,
            "value": value,
        }
        for path, value in values.items()
    ]


def test_what_people_put_beside_tensors(made: Path, tmp_path: Path, complaints: Complaints) -> None:
    """Each becomes the plain value that is spelt out, whatever way it was written in."""
    jobs = []
    for path in sorted(made.glob("everyday-*.pt")):
        plan = harden(path, tmp_path / path.name)
        assert plan.refused == []
        jobs += spelt_out(tmp_path / path.name)
    assert len(jobs) == 5 * (len(EVERYDAY) + 4)
    assert complaints(jobs) == {}


def test_the_table_tells_what_became_what(made: Path) -> None:
    with plan_harden(str(made / "everyday-5.pt")) as plan:
        told = {change.path: (change.was, change.now) for change in plan.changes}
    assert told[""] == ("pickle protocol 5", "pickle protocol 2")
    assert told["args"] == ("argparse.Namespace", "dict")
    assert told["args.seed"] == ("numpy int64", "int")
    assert told["numbers"] == ("numpy array int32 [2, 3]", "tensor int32")
    assert told["config.inner"] == ("object of __main__.Config", "dict of its attributes")
    assert told["simple.b.0"] == ("object of __main__.Color", "the value that it is made from")
    assert told["class"] == ("the name torch.nn.modules.linear.Linear", "text")
    kept = {"model", "dtype", "device", "size", "layout", "bytes", "set", "counter", "text", "many"}
    assert not kept & {path.split(".")[0] for path in told}


def test_cycles_stay_cycles(made: Path, tmp_path: Path, complaints: Complaints) -> None:
    out = tmp_path / "new.pt"
    harden(made / "cyclic.pt", out)
    paths = {
        ("self", "self", "list", 1, 1, 0): "1",
        ("parent", "child", "up", "child", "up", "child", "up", "child", "depth"): "2",
    }
    jobs = [
        {"kind": "value", "old": str(path), "new": str(out), "path": path, "value": value}
        for path, value in paths.items()
    ]
    assert complaints(jobs) == {}


GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def test_random_generators_go_on_from_what_became_of_them(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    """`bit_generator.state` takes the dictionary, and the next numbers are those that were next."""
    harden(made / "apart" / "generators.pt", out := tmp_path / "new.pt")
    draw = "(g := np.random.Generator(np.random.{0}({1})), {2}, g.random(9).tolist())[-1]"
    jobs = [
        {
            "kind": "value",
            "old": name,
            "new": str(out),
            "path": [name],
            "value": draw.format(name, 3, "g.integers(0, 9, 3, dtype=np.int32)"),
            "look": draw.format(name, 0, "setattr(g.bit_generator, 'state', found)"),
        }
        for name in GENERATORS
    ]
    assert complaints(jobs) == {}


def test_a_module_of_torchs_own_layers_keeps_their_versions(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    harden(made / "apart" / "layers.pt", out := tmp_path / "new.pt")
    layers = (
        "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), "
        "torch.nn.InstanceNorm1d(4), torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2)))"
    )
    value = f"{layers}.state_dict()._metadata"
    job = {"kind": "value", "old": "layers", "new": str(out), "value": value}
    assert complaints([{**job, "look": "found._metadata"}]) == {}


def test_a_whole_module_becomes_its_state_dict(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    """The very one that the module gives: the tied weight twice, no buffer that is not persistent."""
    out = tmp_path / "new.pt"
    plan = harden(made / "module.pt", out)
    assert plan.changes[-1].now == "its state dict of 10 tensors"
    jobs = [{"kind": "harden", "old": str(made / "module.pt"), "new": str(out)}]
    assert complaints(jobs) == {}


# Content without a plain form. The pickles are Python's own; no tensor is needed.


class Runs:
    def __reduce__(self) -> Any:
        return eval, ("1 + 1",)


class Unknown:
    """Pickled as a call of a function that nobody knows, with a state of its own form."""

    def __reduce__(self) -> Any:
        return make_unknown, (1, 2), ("a", "state")


def make_unknown(*args: Any) -> Any:
    raise AssertionError("nothing may be called")


def save(path: Path, content: Any) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, 2))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return path


def load_plain(path: Path) -> Any:
    """What Python's own unpickler makes of a file without tensors."""
    with zipfile.ZipFile(path) as archive:
        return pickle.loads(archive.read("archive/data.pkl"))


def test_what_runs_code_is_named_and_never_goes_over(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pt", {"a": 1, "hooks": [Runs(), 2], "f": eval})
    out = tmp_path / "new.pt"
    with pytest.raises(RefusedError, match=r"hooks\.0 \(builtins\.eval\), f \(builtins\.eval\)"):
        harden(source, out)
    assert not out.exists()
    harden(source, out, allow_loss=True)
    assert load_plain(out) == {"a": 1, "hooks": [None, 2]}
    with zipfile.ZipFile(out) as archive:
        assert b"eval" not in archive.read("archive/data.pkl")


def test_what_has_no_plain_form_is_named_in_every_place(tmp_path: Path) -> None:
    one = Unknown()
    source = save(tmp_path / "old.pt", {"a": one, "b": {"c": one}, "d": (1, one)})
    with plan_harden(str(source)) as plan:
        assert [refusal.path for refusal in plan.refused] == ["a", "b.c", "d.1"]
        assert {refusal.what for refusal in plan.refused} == {f"{__name__}.make_unknown"}
        with pytest.raises(RefusedError, match="--allow-loss"):
            plan.write(str(tmp_path / "new.pt"))
        plan.write(str(tmp_path / "new.pt"), allow_loss=True)
    assert load_plain(tmp_path / "new.pt") == {"b": {}, "d": (1, None)}


def test_content_that_is_nothing_else_is_refused_altogether(tmp_path: Path) -> None:
    source = save(tmp_path / "old.pt", Unknown())
    with pytest.raises(RefusedError, match="the whole content has no plain form"):
        harden(source, tmp_path / "new.pt", allow_loss=True)


def test_keys_that_would_become_one_are_refused(tmp_path: Path) -> None:
    import numpy as np

    source = save(
        tmp_path / "old.pt",
        {"ok": 1, "table": {"1.5": 0, 1.5: 1}, "both": [{np.str_("k"): 1, "k": 2}]},
    )
    harden(
        source, tmp_path / "new.pt"
    )  # a number and a text are two keys, and so is one text twice


def test_the_source_is_never_touched(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "old.pt"
    shutil.copyfile(made / "everyday-2.pt", source)
    before = source.read_bytes(), source.stat().st_mtime_ns
    harden(source, tmp_path / "new.pt")
    assert (source.read_bytes(), source.stat().st_mtime_ns) == before


def test_a_file_that_is_plain_already_keeps_its_content(
    made: Path, tmp_path: Path, complaints: Complaints
) -> None:
    plan = harden(made / "views.pt", tmp_path / "new.pt")
    assert plan.changes == []
    again = harden(tmp_path / "new.pt", tmp_path / "again.pt")
    assert again.changes == []
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "new.pt").read_bytes()
