"""The opcodes of pickle protocol 2 for what has no parts, and the loader's memo."""

from __future__ import annotations

from struct import pack
from typing import Any

from ckpttool.formats.values import GlobalRef
from ckpttool.writing.calls import ENCODE, Unwritable

TUPLE_OPCODES = (b")", b"\x85", b"\x86", b"\x87")
_LONGEST_TEXT = 0xFFFFFFFF
_LONGEST_SHORT_INT = 255
_SMALL_INTS = [b"K" + bytes((number,)) for number in range(256)]


class PickleStream:
    """A pickle being written: `out` is what is there so far, without STOP.

    `memo` has the index in the loader's memo of each object that can be referred to, by identity.
    """

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[int, int] = {}
        self._count = 0  # entries of the loader's memo
        self._kept: list[Any] = []  # so that no identity is given to a second object
        self._names: dict[tuple[str, str], int] = {}
        self._words: dict[str, int] = {}

    def need_protocol_4(self) -> None:
        """Says in the first bytes that there is something in it that protocol 2 does not know."""
        self.out[1] = 4

    # The memo.

    def put(self) -> None:
        """Has the loader remember what it made last, without a way to refer to it here."""
        index = self._count
        self._count = index + 1
        self.out += b"q" + bytes((index,)) if index < 256 else b"r" + pack("<I", index)

    def remember(self, value: Any) -> None:
        """The same, under the identity of `value`."""
        self.memo[id(value)] = self._count
        self._kept.append(value)
        self.put()

    def get(self, index: int) -> None:
        """Has the loader take what it has at `index`."""
        self.out += b"h" + bytes((index,)) if index < 256 else b"j" + pack("<I", index)

    # What has no parts.

    def none(self, value: None) -> None:
        """NONE."""
        self.out += b"N"

    def truth(self, value: bool) -> None:
        """NEWTRUE, NEWFALSE."""
        self.out += b"\x88" if value else b"\x89"

    def real(self, value: float) -> None:
        """BINFLOAT."""
        self.out += b"G" + pack(">d", value)

    def integer(self, value: int) -> None:
        """The shortest opcode that holds it."""
        if 0 <= value < 256:
            self.out += _SMALL_INTS[value]
        elif 0 <= value < 65536:
            self.out += b"M" + pack("<H", value)
        elif -0x80000000 <= value < 0x80000000:
            self.out += b"J" + pack("<i", value)
        else:
            length = (value.bit_length() >> 3) + 1
            raw = value.to_bytes(length, "little", signed=True)
            if value < 0 and raw[-1] == 0xFF and raw[-2] & 0x80:
                raw = raw[:-1]  # -2**63 and the like need no byte for the sign
            short = len(raw) <= _LONGEST_SHORT_INT
            head = b"\x8a" + bytes((len(raw),)) if short else b"\x8b" + pack("<i", len(raw))
            self.out += head + raw

    def text(self, value: str) -> None:
        """BINUNICODE; lone surrogates are kept, as Python's pickles do."""
        self._unicode(value.encode("utf-8", "surrogatepass"))
        self.remember(value)

    def byte_string(self, value: bytes) -> None:
        """_codecs.encode(text, 'latin1').

        Empty ones too: Python spells these `bytes()`, which torch's weights-only loader refuses.
        """
        self.name(ENCODE)
        self._unicode(value.decode("latin-1").encode("utf-8"))
        self.put()
        self.word("latin1")
        self.out += b"\x86"
        self.put()
        self.out += b"R"
        self.remember(value)

    def _unicode(self, raw: bytes) -> None:
        if len(raw) > _LONGEST_TEXT:
            raise Unwritable("text or bytes of more than 4 GiB")
        self.out += b"X" + pack("<I", len(raw))
        self.out += raw

    def word(self, value: str) -> None:
        """Text of which one file has few, each many times: known by its letters."""
        known = self._words.get(value)
        if known is not None:
            self.get(known)
            return
        self._words[value] = self._count
        self.text(value)

    def name(self, value: GlobalRef) -> None:
        """GLOBAL; the names of extensions are codes of their own."""
        known = self._names.get((value.module, value.name))
        if known is not None:
            self.get(known)
            return
        code = _extension_code(value)
        if code is None:
            if "\n" in value.module + value.name:
                raise Unwritable("a global with a line break in its name")
            if "." in value.name:
                self.need_protocol_4()
            line = f"c{value.module}\n{value.name}\n"
            self.out += line.encode("utf-8", "surrogatepass")
        else:
            self.out += b"\x84" + pack("<I", code)
        self._names[value.module, value.name] = self._count
        self.put()


def integers(numbers: tuple[int, ...]) -> bytes:
    """A tuple of integers, without the memo's part."""
    stream = PickleStream()
    many = len(numbers) > 3
    stream.out = bytearray(b"(" if many else b"")
    for number in numbers:
        stream.integer(number)
    return bytes(stream.out) + (b"t" if many else TUPLE_OPCODES[len(numbers)])


def _extension_code(value: GlobalRef) -> int | None:
    """The number in `copyreg.extension(5)`, as the reader calls what is known only by number."""
    number = value.name.removeprefix("extension(").removesuffix(")")
    if value.module == "copyreg" and value.name == f"extension({number})" and number.isdigit():
        return int(number)
    return None
