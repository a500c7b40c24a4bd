"""Telling texts apart: git-LFS pointers, web pages, error messages, JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpttool.formats.sniff import Sniffed

if TYPE_CHECKING:
    from typing import Any

    from ckpttool.io.reading import FileReader

_JSON_BYTES = 1 << 20
_LONGEST_TITLE = 120
_LFS = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v[^\n]*\n", re.ASCII
)
_LFS_OID = re.compile(rb"^oid (?:sha256:)?([0-9a-f]{64})\s*$", re.MULTILINE)
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,18})\s*$", re.MULTILINE)
_HTML = re.compile(rb"<!doctype\s+html|<html[\s>]|<head[\s>]|<body[\s>]", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]{0,200}>(.{0,2000}?)</title", re.IGNORECASE | re.DOTALL)
_XML_ERROR = re.compile(r"<(Code|Message)>(.{0,500}?)</\1>", re.DOTALL)
_BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


def sniff_text(reader: FileReader, head: bytes) -> Sniffed | None:
    """What kind of text the file begins with; None if it is no text."""
    if _LFS.match(head):
        return _lfs_pointer(head)
    text = _decoded(head)
    if text is None:
        return None
    start = text.lstrip()
    raw = start.encode("utf-8", "replace")
    if start.startswith("<") and _HTML.search(raw[:1024]):
        title = _TITLE.search(text)
        return _titled("html", "a web page (HTML)", title[1] if title else None)
    if start.startswith("<?xml") or (start.startswith("<") and _XML_ERROR.search(text)):
        error = ": ".join(match[2] for match in _XML_ERROR.finditer(text))
        return _titled("xml", "an XML document", error or None)
    if start.startswith(("{", "[")):
        return _json(reader) or Sniffed("text", "a text", {})
    return Sniffed("text", "a text", {})


def _lfs_pointer(head: bytes) -> Sniffed:
    facts: dict[str, Any] = {}
    if oid := _LFS_OID.search(head):
        facts["oid"] = oid[1].decode("ascii")
    if size := _LFS_SIZE.search(head):
        facts["size"] = int(size[1])
    words = "a git-LFS pointer"
    if "size" in facts:
        words += f" to a file of {facts['size']:,} bytes"
    return Sniffed("git-lfs-pointer", words, facts)


def _titled(kind: str, words: str, title: str | None) -> Sniffed:
    """With the title in the words, cleaned: it is somebody else's, and goes to a terminal."""
    if title is None:
        return Sniffed(kind, words, {})
    plain = " ".join("".join(c if c.isprintable() else " " for c in title).split())
    plain = plain[:_LONGEST_TITLE]
    return Sniffed(kind, f"{words}: {plain!r}", {"title": plain})


def _json(reader: FileReader) -> Sniffed | None:
    import json

    if reader.size > _JSON_BYTES:
        return Sniffed("json", "JSON, by its beginning", {})
    try:
        value = json.loads(reader.read(0, reader.size).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return Sniffed("json", f"JSON ({type(value).__name__})", {})


def _decoded(head: bytes) -> str | None:
    """The beginning of a file as text, or None if it is none."""
    encoding, mark = "utf-8", b""
    for mark_bytes, name in _BYTE_ORDER_MARKS:
        if head.startswith(mark_bytes):
            encoding, mark = name, mark_bytes
            break
    try:
        text = head.decode(encoding)
    except UnicodeDecodeError as error:
        # The head may end in the middle of a character.
        if error.start < len(head) - 4:
            return None
        text = head[: error.start].decode(encoding, "ignore")
    text = text.lstrip("\ufeff")
    odd = sum(not (c.isprintable() or c in "\t\n\r\f\x1b") for c in text)
    return text if text and (mark or odd <= len(text) // 100) else None
