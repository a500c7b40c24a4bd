"""One flipped bit: where it must be, what it changed, and how sure that is.

The place comes from the checksums alone (`crc_algebra`), so it is found in a record of any content,
one that can't be read included. What the bit stands for is told where it can be: the tensor's
element with its value, or what a pickle says with it and without. Two flipped bits or more are
never guessed: they look like one only as often as the stated odds say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.mending.crc_algebra import odds, single_bits
from ckpttool.mending.damaged import DamagedRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.mending.elements import Element
    from ckpttool.model.tensor import TensorRef

DEFAULT_BIT_ODDS = 0.01
_CONTEXT_BYTES = 12


class BitMend(NamedTuple):
    """A bit that, turned back, gives a record its checksum again.

    `record` has `size` bytes; the bit is `bit` (0 the least significant) of the byte at `offset`.
    `tensors` names all tensors that this byte is part of; `place` is the first of them with the
    element's index, `dtype` its type. `before` is its value in the file and `after` as mended: a
    number, a bool, or the bytes around where it is no tensor's. `change` says both in words.

    `odds` is how likely unrelated damage to the record looks like this, `places` how many bits of
    the record explain the checksum equally well. `refused` says why the mend may not be made; None
    where it may. The SHA-256 of the whole file, where it is known, beats both.
    """

    record: str
    size: int
    offset: int
    bit: int
    tensors: tuple[str, ...]
    place: str | None
    dtype: str | None
    before: Any
    after: Any
    change: str
    odds: float
    places: int
    refused: str | None

    @property
    def tensor(self) -> str | None:
        """The first tensor that the byte is part of, if any."""
        return self.tensors[0] if self.tensors else None

    @property
    def words(self) -> str:
        """Where the bit is and what it changes."""
        where = f"bit {self.bit} of byte {self.offset:,} of {self.record}"
        element = f" ({self.place}, {self.dtype})" if self.place else ""
        return f"{where}{element}: {self.change}"

    @property
    def proof(self) -> str:
        """What speaks for it, with the odds against it."""
        return f"the checksum matches with one bit turned back; {odds_in_words(self.odds)}"

    def as_dict(self) -> dict[str, Any]:
        """All fields, and the words, for JSON."""
        facts = {**self._asdict(), "tensors": list(self.tensors)}
        if isinstance(self.before, complex):
            facts["before"], facts["after"] = str(self.before), str(self.after)
        return {**facts, "words": self.words, "proof": self.proof}


def odds_in_words(likelihood: float) -> str:
    """How likely it is that unrelated damage only looks like a flipped bit."""
    if likelihood >= 1:
        return "which proves nothing: any damage to so large a record looks like that"
    share = share_in_words(likelihood)
    return f"the odds that unrelated damage looks like that are {share} (8 · bytes / 2^32)"


def share_in_words(likelihood: float) -> str:
    """A likelihood in per cent, or as `1 in N` where that is too small to read."""
    if likelihood < 1e-5:
        return f"1 in {1 / likelihood:,.0f}"
    percent = 100 * likelihood
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def find_bits(
    record: DamagedRecord,
    tensors: Iterable[TensorRef] = (),
    *,
    bit_odds: float = DEFAULT_BIT_ODDS,
    limits: ReaderLimits = DEFAULT_LIMITS,
) -> list[BitMend]:
    """Every bit that alone explains a record's checksum: several can in records above 512 MiB.

    `tensors` are those of the checkpoint, to name what changes; none are needed. A mend that is
    not sure enough comes with `refused`: the odds are above `bit_odds`, several bits explain the
    checksum, or a pickle can't be read with the bit turned back. Who knows the file's SHA-256 can
    try them all. Raises UnreadableError, and FormatError if the file is cut meanwhile.
    """
    bits = single_bits(record.difference, record.size)
    known = list(tensors) if bits else []
    return [_mend(record, bit, known, len(bits), bit_odds, limits) for bit in bits]


class _Change(NamedTuple):
    """What a bit stands for; see BitMend. `against` says why the change can't be right."""

    before: Any
    after: Any
    words: str
    against: str | None = None


def _mend(
    record: DamagedRecord,
    bit: int,
    tensors: list[TensorRef],
    places: int,
    bit_odds: float,
    limits: ReaderLimits,
) -> BitMend:
    from ckpttool.mending.elements import elements_at

    elements = list(elements_at(tensors, record, bit))
    if elements:
        change = _change_of_element(record, bit, elements[0])
    else:
        change = _change_of_bytes(record, bit, limits)
    likelihood = odds(record.size)
    return BitMend(
        record.name,
        record.size,
        bit // 8,
        bit % 8,
        tuple(dict.fromkeys(element.name for element in elements)),
        elements[0].place if elements else None,
        elements[0].dtype if elements else None,
        change.before,
        change.after,
        change.words,
        likelihood,
        places,
        change.against or _refusal(record, likelihood, places, bit_odds),
    )


def _refusal(record: DamagedRecord, likelihood: float, places: int, bit_odds: float) -> str | None:
    if places > 1:
        return (
            f"{places} bits explain the checksum; only the file's SHA-256 could tell which it was"
        )
    if likelihood <= bit_odds:
        return None
    enough = min(1.0, round(likelihood + 0.0005, 3))
    return (
        f"unrelated damage to {record.size:,} bytes would look like one flipped bit in "
        f"{share_in_words(likelihood)} of cases, which is above the limit "
        f"(--bit-odds {bit_odds:g}; {enough:g} allows it, and leaves it unproven)"
    )


def _change_of_element(record: DamagedRecord, bit: int, element: Element) -> _Change:
    from ckpttool.mending.elements import change_in_words, read_value

    first, last = element.start // 8, (element.start + element.bits - 1) // 8
    content = _read(record, first, last - first + 1)
    turned = _turned(content, bit - 8 * first)
    before = read_value(content, element, record.byteorder)
    after = read_value(turned, element, record.byteorder)
    return _Change(before.number, after.number, change_in_words(before, after))


def _change_of_bytes(record: DamagedRecord, bit: int, limits: ReaderLimits) -> _Change:
    start = max(0, bit // 8 - _CONTEXT_BYTES)
    stop = min(record.size, bit // 8 + 1 + _CONTEXT_BYTES)
    before = _read(record, start, stop - start)
    after = _turned(before, bit - 8 * start)
    words = f"{_shown(before)} -> {_shown(after)}"
    if not record.name.lower().endswith(".pkl") or record.size > limits.pickle_bytes:
        return _Change(before, after, words)
    more, against = _change_of_pickle(_read(record, 0, record.size), bit, limits)
    return _Change(before, after, f"{words}; {more}", against)


def _change_of_pickle(content: bytes, bit: int, limits: ReaderLimits) -> tuple[str, str | None]:
    """What a pickle says with the bit and without, and what speaks against turning it back."""
    from ckpttool.errors import LimitError
    from ckpttool.formats.static_pickle import read_pickle
    from ckpttool.mending.difference import first_difference

    new = read_pickle(_turned(content, bit), limits=limits)
    if new.error is not None:
        words = "the pickle can't be read with the bit turned back"
        return words, None if isinstance(new.error, LimitError) else words
    old = read_pickle(content, limits=limits)
    if old.error is not None:
        return "the pickle can be read only with the bit turned back", None
    found = first_difference(old.value, new.value)
    if found is None:
        return "the pickle means the same either way", None
    place = found.path or "the whole content"
    return f"{place}: {found.first} -> {found.second}", None


def _read(record: DamagedRecord, offset: int, length: int) -> bytes:
    content = record.read(offset, length)
    if len(content) < length:
        raise FormatError(f"record {record.name!r} was cut while it was read", record=record.name)
    return content


def _turned(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def _shown(content: bytes) -> str:
    """Bytes as text in quotes, what is no plain character as its number."""
    return repr(content)[1:]
