"""Text for people: escaped, aligned, coloured on a terminal only.

Every name, key and message that may come from a file goes through `escape` before it is printed:
a file must not be able to move the cursor, hide a line or crash the terminal.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

from ckpttool.errors import WriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

OUTPUT = "standard output"

COLOURS = {"error": "31;1", "warning": "33", "info": "36", "ok": "32", "bold": "1", "dim": "2"}
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def escape(text: str) -> str:
    r"""Text that prints on one line and does nothing else: what is not printable becomes `\x1b`.

    That covers control characters, line and paragraph separators, marks of direction, invisible
    characters, lone surrogates, and the bytes of a file name that is not UTF-8 (`\xff`).
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape_char(char) for char in text)


def _escape_char(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # a byte that os.fsdecode could not decode (PEP 383)
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def size_text(count: int) -> str:
    """A number of bytes for people: `812 B`, `79.0 KiB`, `1.9 GiB`."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        # 1023.95 would print as 1024.0, which is one of the next unit.
        if value < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def shorten_middle(text: str, width: int) -> str:
    """At most `width` characters of `text`, with `…` in the middle where some are left out."""
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "…" + text[len(text) - tail :]


def writer(stream: TextIO) -> Callable[[str], None]:
    """A function that writes to `stream`, and raises WriteError where that cannot be done.

    A pipe whose reader has gone stays a BrokenPipeError: nobody needs to be told.
    """

    def write(text: str) -> None:
        try:
            stream.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WriteError(OUTPUT, error.strerror or str(error)) from error

    return write


class Printer:
    """Writes lines to one stream; knows whether it is a terminal, its width, and colour."""

    __slots__ = ("_colour", "_write", "is_terminal", "width")

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self._write = writer(stream)
        self.is_terminal = stream.isatty()
        self.width = _terminal_width() if self.is_terminal else None
        self._colour = self.is_terminal and wants_colour()

    def line(self, text: str = "") -> None:
        """Writes one line. `text` is escaped already."""
        self._write(text + "\n")

    def colour(self, text: str, name: str) -> str:
        """`text` in the colour of `COLOURS[name]` where colours are wanted."""
        return f"\x1b[{COLOURS[name]}m{text}\x1b[0m" if self._colour else text

    def heading(self, text: str) -> None:
        """An empty line and a heading."""
        self.line()
        self.line(self.colour(text, "bold"))

    def facts(self, pairs: Iterable[tuple[str, str]], indent: str = "") -> None:
        """Aligned lines `label  value`; long values are wrapped under themselves on a terminal."""
        rows = [(label, value) for label, value in pairs if value]
        margin = max((len(label) for label, _ in rows), default=0) + 2
        for label, value in rows:
            self.wrapped(value, first=indent + label.ljust(margin), rest=indent + " " * margin)

    def wrapped(self, text: str, first: str = "", rest: str = "") -> None:
        """One line when piped; broken between words to the terminal's width otherwise."""
        if self.width is None or len(first) + len(text) <= self.width:
            self.line(first + text)
            return
        from textwrap import TextWrapper

        wrapper = TextWrapper(
            width=max(self.width, len(rest) + 20),
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        for line in wrapper.wrap(text):
            self.line(line)

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        right: Sequence[int] = (),
        shrink: int | None = None,
        indent: str = "",
    ) -> None:
        """A table of escaped cells. Columns in `right` are right-aligned.

        On a terminal too narrow for it, column `shrink` is shortened in the middle of its cells.
        """
        import tabulate

        tabulate.MIN_PADDING = 0  # its two extra columns for each header would not fit
        if shrink is not None and self.width is not None:
            rows = _fit(headers, rows, shrink, self.width - len(indent))
        text = tabulate.tabulate(
            rows,
            headers=list(headers),
            tablefmt="simple",
            disable_numparse=True,
            colalign=["right" if i in right else "left" for i in range(len(headers))],
        )
        for line in text.splitlines():
            self.line((indent + line).rstrip())


def wants_colour() -> bool:
    """False where NO_COLOR (https://no-color.org) is set or the terminal is dumb."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _terminal_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], shrink: int, width: int
) -> Sequence[Sequence[str]]:
    widths = [max([len(headers[i]), *(len(row[i]) for row in rows)]) for i in range(len(headers))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    if excess <= 0:
        return rows
    room = max(widths[shrink] - excess, len(headers[shrink]), 12)
    return [
        [shorten_middle(cell, room) if i == shrink else cell for i, cell in enumerate(row)]
        for row in rows
    ]
