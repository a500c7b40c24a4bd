"""Escaping, sizes, tables and colour."""

from __future__ import annotations

import io
import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.checks.base import plural
from ckpttool.render.text import Printer, escape, shorten_middle, size_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.0.weight", "model.0.weight"),
        ("тест 模型 é", "тест 模型 é"),
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2066\u200f\u200b", r"\u2066\u200f\u200b"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("\u2028", r"\u2028"),
        ("\ud800", r"\ud800"),
        (os.fsdecode(b"step\xff.pt"), r"step\xff.pt"),
        ("\U000e0001", r"\U000e0001"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert escape(text) == shown


@given(st.text())
def test_what_is_escaped_is_harmless(text: str) -> None:
    shown = escape(text)
    # Cc control, Cf format (bidi, invisible), Cs surrogate, Zl and Zp line ends.
    assert not {"Cc", "Cf", "Cs", "Zl", "Zp"} & {unicodedata.category(char) for char in shown}
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (80929, "79.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (2_000_000_000, "1.9 GiB"),
        (5 * 1024**4, "5.0 TiB"),
        (1024**7, "1024.0 EiB"),
    ],
)
def test_size_text(count: int, text: str) -> None:
    assert size_text(count) == text


def test_plural() -> None:
    assert [plural(n, "tensor") for n in (0, 1, 3000)] == ["0 tensors", "1 tensor", "3,000 tensors"]
    assert plural(2, "entry", "entries") == "2 entries"


@given(st.text(), st.integers(0, 30))
def test_shorten_middle(text: str, width: int) -> None:
    short = shorten_middle(text, width)
    assert len(short) <= width or short == text == ""
    if len(text) <= width:
        assert short == text
    else:
        head, _, tail = short.partition("…")
        assert text.startswith(head)
        assert text.endswith(tail)


def test_piped_output_has_no_colour_and_is_not_cut() -> None:
    stream = io.StringIO()
    printer = Printer(stream)
    long = "x" * 500
    printer.table(["name"], [[long]], shrink=0)
    printer.facts([("a", long), ("bcd", ""), ("ef", "2")])
    printer.line(printer.colour("e", "error"))
    assert stream.getvalue().splitlines() == ["name", "-" * 500, long, f"a   {long}", "ef  2", "e"]


def test_terminal_is_coloured_and_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    printer = Printer(stream)
    assert printer.colour("e", "error") == "\x1b[31;1me\x1b[0m"
    printer.table(["name", "n"], [["a" * 60, "1"], ["b", "2"]], shrink=0)
    printer.facts([("label", "some words " * 10)])
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert "a…a" in lines[2]
    assert lines[3].split() == ["b", "2"]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert Printer(Terminal()).colour("e", "error") == "e"


def test_numbers_in_tables_stay_as_they_are() -> None:
    stream = io.StringIO()
    Printer(stream).table(["name", "n"], [["1e5", "007"], ["nan", "1"]], right=[1])
    assert stream.getvalue().splitlines()[2:] == ["1e5   007", "nan     1"]
