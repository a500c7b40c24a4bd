"""Members of a tar archive: POSIX.1-1988 ustar headers, GNU long names and base-256 numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.io.reading import FileReader

BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_LONG_NAME = b"L"
_PAX = (b"x", b"g")
_LONGEST_NAME = 1 << 16


class TarMember(NamedTuple):
    """A member: its name, its type flag, where its header and its content begin, and its size."""

    name: str
    kind: bytes
    header: int
    content: int
    size: int

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file, not a directory or a link."""
        return self.kind in _REGULAR


def tar_members(reader: FileReader, *, most: int) -> Iterator[TarMember]:
    """The archive's members, at most `most`; ends at the end mark, or at what is no header.

    A member's size is as declared: it may reach beyond the end of the file.
    """
    position, long_name = 0, None
    for _ in range(2 * most):  # each may have a header for its long name before it
        member = parse_header(reader.read(position, BLOCK), position)
        if member is None:
            return
        if member.kind == _LONG_NAME:
            content = reader.read(member.content, min(member.size, _LONGEST_NAME))
            long_name = content.rstrip(b"\0").decode("utf-8", "backslashreplace")
        elif member.kind not in _PAX:
            yield member if long_name is None else member._replace(name=long_name)
            long_name = None
        position = member.content + -(-member.size // BLOCK) * BLOCK
        if position >= reader.size:
            return


def parse_header(block: bytes, position: int) -> TarMember | None:
    """The member whose header is `block`, if the header's checksum is right."""
    if len(block) < BLOCK or not block[:100].strip(b"\0"):
        return None
    declared = _number(block[148:156])
    if declared != sum(block[:148]) + sum(block[156:BLOCK]) + 8 * ord(" "):
        return None
    size = _number(block[124:136])
    if size is None:
        return None
    name = block[:100].split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].split(b"\0", 1)[0]):
        name = f"{prefix.decode('utf-8', 'backslashreplace')}/{name}"
    return TarMember(name, block[156:157], position, position + BLOCK, size)


def _number(field: bytes) -> int | None:
    """Octal digits, or base 256 if the first bit is set; None if it is neither, or negative."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits.isdigit() else None
    except ValueError:
        return None
