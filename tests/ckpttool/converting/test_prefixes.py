"""Prefixes of wrappers: seen, and taken off on request."""

from __future__ import annotations

import pytest

from ckpttool.converting.prefixes import counts, seen, strip, strip_all

BOTH = ["module.", "_orig_mod."]


@pytest.mark.parametrize(
    ("names", "prefixes", "wanted"),
    [
        (["module.a.w", "module.b"], ["module."], ["a.w", "b"]),
        (["module.module.a", "module.module.b"], ["module."], ["a", "b"]),
        # Under a wrapper, a layer that somebody called `module` keeps its name.
        (["module.module.w", "module.head.w"], ["module."], ["module.w", "head.w"]),
        (["module._orig_mod.a", "module._orig_mod.b"], BOTH, ["a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], BOTH, ["a", "b"]),
        (["net._orig_mod.0.w", "_orig_mod.head"], ["_orig_mod."], ["net.0.w", "head"]),
        # Asked for, it is taken off where it stands, though others have it not.
        (["module.w", "head.w", "net.module.w"], ["module."], ["w", "head.w", "net.module.w"]),
        (["module.w"], [], ["module.w"]),
        (["my_orig_mod.w", "net._orig_mod"], ["_orig_mod."], ["my_orig_mod.w", "net._orig_mod"]),
        (["module.", "module.a"], ["module."], ["module.", "a"]),
        (["bert_a", "bert_b"], ["bert_"], ["a", "b"]),
        (["a"], [""], ["a"]),
        ([], ["module."], []),
    ],
)
def test_taking_prefixes_off(names: list[str], prefixes: list[str], wanted: list[str]) -> None:
    assert strip(names, prefixes) == wanted


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["module.a", "module.b.c"], ["module."]),
        (["module._orig_mod.a", "module._orig_mod.b"], ["module.", "_orig_mod."]),
        (["module.weight", "head.weight"], []),  # a layer called module, beside another
        (["net._orig_mod.w", "head.w"], ["_orig_mod."]),
        (["a", "b"], []),
        ([], []),
    ],
)
def test_prefixes_that_are_shown(names: list[str], wanted: list[str]) -> None:
    assert seen(names) == wanted


def test_names_that_would_collide_are_told_in_pairs() -> None:
    renamed, collisions = strip_all(["module.a", "b", "a", "module.b"], ["module."])
    assert collisions == [("module.a", "a"), ("b", "module.b")]
    assert renamed == {"module.a": "a", "b": "b"}


@pytest.mark.parametrize(
    ("names", "prefixes", "wanted"),
    [
        (["module.a", "module.b"], ["module.", "net."], {"module.": 2, "net.": 0}),
        (["module.a", "b", "module."], ["module."], {"module.": 1}),
        (["_orig_mod.module.a", "_orig_mod.module.b"], BOTH, {"module.": 2, "_orig_mod.": 2}),
        (["a._orig_mod.b", "c"], ["_orig_mod."], {"_orig_mod.": 1}),
        (["a"], [], {}),
    ],
)
def test_from_how_many_names(names: list[str], prefixes: list[str], wanted: dict[str, int]) -> None:
    assert counts(names, prefixes) == wanted
