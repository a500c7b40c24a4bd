"""Imports go only downward, and the tool never needs torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    "cli",
    "render",
    "actions",
    "mending",
    "converting",
    "checks",
    "model",
    "writing",
    "formats",
    "io",
    "leaves",
)
LEAVES = ("findings", "errors", "exitcodes")
HEAVY = {
    "torch",
    "numpy",
    "ml_dtypes",
    "isal",
    "tabulate",
    "dataclasses",
    "hashlib",
    "subprocess",
    "concurrent",
    "tempfile",
    "zipfile",
    "trainer_core",
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path, *, only_at_start: bool = False) -> Iterator[str]:
    """Full names of what a file imports; with `only_at_start` not what functions import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _imports(tree, only_at_start)


def _imports(node: ast.AST, only_at_start: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if only_at_start and (function or _type_checking(child)):
            continue
        yield from _imports(child, only_at_start)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def layer(name: str) -> str:
    """The layer of a dotted name inside ckpttool (`ckpttool.io.reading.FileReader` gives `io`)."""
    part = name.split(".")[1] if "." in name else ""
    return "leaves" if part in LEAVES else part


def inside(path: Path) -> str:
    return layer(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("name", LAYERS[:-1])
def test_imports_of_a_layer_go_only_downward(name: str) -> None:
    files = [path for path in sources("ckpttool") if inside(path) == name]
    assert files
    allowed = set(LAYERS[LAYERS.index(name) :])
    for path in files:
        for imported in imports(path):
            if imported == "ckpttool" or imported.startswith("ckpttool."):
                assert layer(imported) in allowed, f"{path} imports {imported}"


def test_leaves_import_nothing_of_the_package() -> None:
    files = [path for path in sources("ckpttool") if inside(path) == "leaves"]
    assert len(files) == len(LEAVES)
    for path in files:
        assert not [name for name in imports(path) if name.startswith("ckpttool")], path


def test_the_tool_imports_neither_torch_nor_the_training_core() -> None:
    for path in sources("ckpttool"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops.isdisjoint({"torch", "trainer_core", "pickle"}), path


def test_the_tool_imports_heavy_modules_only_where_it_needs_them() -> None:
    for path in sources("ckpttool"):
        tops = {name.split(".")[0] for name in imports(path, only_at_start=True)}
        assert tops.isdisjoint(HEAVY), f"{path}: {tops & HEAVY}"


def test_the_training_core_uses_only_the_library_of_the_tool() -> None:
    for path in sources("trainer_core"):
        for name in imports(path):
            assert not name.startswith(("ckpttool.cli", "ckpttool.render")), f"{path}: {name}"
