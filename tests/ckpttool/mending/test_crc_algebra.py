from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.mending import crc_algebra as algebra
from ckpttool.mending.crc_algebra import (
    burst,
    burst_odds,
    logarithm,
    multiply,
    odds,
    power_of_x,
    single_bits,
)

PERIOD = 2**32 - 1
LIMIT = 2**29  # bytes up to which one bit at most explains a difference
words = st.integers(0, 2**32 - 1)
nonzero = st.integers(1, 2**32 - 1)


class Zeros:
    """What zero bytes do to a difference, as a matrix made with zlib alone and squared."""

    def __init__(self) -> None:
        one = [zlib.crc32(b"\0", 1 << i) ^ zlib.crc32(b"\0") for i in range(32)]
        self.powers = [one]
        for _ in range(60):
            self.powers.append([self._times(self.powers[-1], c) for c in self.powers[-1]])

    @staticmethod
    def _times(matrix: list[int], vector: int) -> int:
        result = 0
        for i, column in enumerate(matrix):
            result ^= column if vector >> i & 1 else 0
        return result

    def behind(self, difference: int, count: int) -> int:
        for i, matrix in enumerate(self.powers):
            if count >> i & 1:
                difference = self._times(matrix, difference)
        return difference


ZEROS = Zeros()


def difference_of(bit: int, length: int) -> int:
    """The difference that one flipped bit makes in `length` bytes, by zlib and the matrix."""
    one = zlib.crc32(bytes((1 << bit % 8,))) ^ zlib.crc32(b"\0")
    return ZEROS.behind(one, length - 1 - bit // 8)


# Arithmetic.


def test_the_oracle_of_these_tests_is_zlib() -> None:
    data = bytes(5000)
    for bit in (0, 7, 8, 12345, 39_999):
        assert difference_of(bit, 5000) == zlib.crc32(data) ^ zlib.crc32(_flipped(data, bit))


def test_the_powers_of_x_reach_every_remainder() -> None:
    # The order of x divides 2^32-1; it is no smaller if no prime factor can be left out.
    assert algebra.FACTORS == (3, 5, 17, 257, 65537)
    product = 1
    for prime in algebra.FACTORS:
        product *= prime
        assert power_of_x(PERIOD // prime) != power_of_x(0)
    assert product == PERIOD
    assert power_of_x(PERIOD) == power_of_x(0) == 1 << 31


@given(nonzero, nonzero, nonzero)
def test_multiplication_is_that_of_a_field(a: int, b: int, c: int) -> None:
    assert multiply(a, b) == multiply(b, a)
    assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)
    assert multiply(multiply(a, b), c) == multiply(a, multiply(b, c))
    assert multiply(a, 0) == multiply(0, a) == 0


@given(st.integers(0, PERIOD - 1))
def test_logarithm_undoes_the_power(exponent: int) -> None:
    assert logarithm(power_of_x(exponent)) == exponent


@given(nonzero)
def test_every_remainder_has_a_logarithm(value: int) -> None:
    assert power_of_x(logarithm(value)) == value


@pytest.mark.parametrize("value", [0, -1, 2**32])
def test_what_is_no_remainder_has_none(value: int) -> None:
    with pytest.raises(ValueError, match="no power of x"):
        logarithm(value)


# One bit.


@given(st.binary(min_size=1, max_size=4000), st.data())
def test_finds_any_bit_of_any_message(message: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    difference = zlib.crc32(message) ^ zlib.crc32(_flipped(message, bit))
    assert single_bits(difference, len(message)) == [bit]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 64, 100])
def test_finds_every_bit_of_short_messages(length: int) -> None:
    message = random.Random(length).randbytes(length)
    for bit in range(8 * length):
        difference = zlib.crc32(message) ^ zlib.crc32(_flipped(message, bit))
        assert single_bits(difference, length) == [bit]


@pytest.mark.parametrize("length", [10**6, 10**8, 123_456_789, LIMIT - 1])
def test_finds_bits_of_long_messages(length: int) -> None:
    for bit in (0, 1, 8 * length // 3, 8 * length - 2, 8 * length - 1):
        assert single_bits(difference_of(bit, length), length) == [bit]


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 2 * 10**9, 2**33 + 5, 10**12])
def test_names_every_place_where_the_powers_repeat(length: int) -> None:
    for bit in (0, 17, 8 * length // 2 + 3, 8 * length - 1):
        difference = difference_of(bit, length)
        expected = list(range(bit % PERIOD, 8 * length, PERIOD))
        found = single_bits(difference, length)
        assert found == expected
        assert {difference_of(place, length) for place in found[:50]} == {difference}


def test_a_message_of_512_mib_has_one_pair_of_bits_that_look_alike() -> None:
    # 2^32 bits, and 2^32-1 differences: the first bit and the last are told apart by nothing.
    assert single_bits(difference_of(0, LIMIT), LIMIT) == [0, 8 * LIMIT - 1]
    assert single_bits(difference_of(1, LIMIT), LIMIT) == [1]


def test_nothing_changed_is_no_bit() -> None:
    assert single_bits(0, 1000) == []


@pytest.mark.parametrize("difference", [-1, 2**32, 2**40 + 1])
def test_what_is_no_difference_of_checksums_is_no_bit(difference: int) -> None:
    assert single_bits(difference, 2**40) == []


def test_an_empty_message_has_no_bit() -> None:
    assert single_bits(0x1234, 0) == []


@given(nonzero, st.integers(1, 100_000))
def test_a_place_that_is_found_makes_that_very_difference(difference: int, length: int) -> None:
    for bit in single_bits(difference, length):
        assert difference_of(bit, length) == difference


def test_a_bit_outside_of_the_message_is_not_found() -> None:
    for length in (1, 10, 1000):
        # The last bit of the byte before the message's first one.
        difference = difference_of(7, length + 1)
        assert single_bits(difference, length) == []
        assert single_bits(difference, length + 1) == [7]


@given(st.binary(min_size=2, max_size=200), st.data())
def test_two_bits_of_a_short_message_are_never_taken_for_one(
    message: bytes, data: st.DataObject
) -> None:
    # Up to 91,607 bits any two words of the code differ in four bits or more: P. Koopman, "32-Bit
    # Cyclic Redundancy Codes for Internet Applications", DSN 2002.
    bits = st.integers(0, 8 * len(message) - 1)
    first, second = data.draw(st.tuples(bits, bits).filter(lambda pair: pair[0] != pair[1]))
    damaged = _flipped(_flipped(message, first), second)
    assert single_bits(zlib.crc32(message) ^ zlib.crc32(damaged), len(message)) == []


# Runs of bits.


@given(st.binary(min_size=4, max_size=500), st.data())
def test_finds_the_mask_of_a_run(message: bytes, data: st.DataObject) -> None:
    bits = data.draw(st.integers(1, 32))
    start = data.draw(st.integers(0, 8 * len(message) - bits))
    mask = data.draw(st.integers(1, 2**bits - 1))
    damaged = _xored(message, mask << start)
    difference = zlib.crc32(message) ^ zlib.crc32(damaged)
    assert burst(difference, len(message), start, bits) == mask
    wider = min(32, 8 * len(message) - start)
    assert burst(difference, len(message), start, wider) == mask


@pytest.mark.parametrize("length", [10**9, 2**31 + 1, 10**12])
def test_finds_the_mask_in_huge_messages(length: int) -> None:
    for start, mask in ((0, 0xDEADBEEF), (8 * length - 32, 1), (8 * length // 2 + 3, 2**31 + 1)):
        difference = 0
        for index in range(32):
            if mask >> index & 1:
                difference ^= difference_of(start + index, length)
        assert burst(difference, length, start) == mask


@given(nonzero, st.integers(0, 968))
def test_thirty_two_bits_explain_any_difference(difference: int, start: int) -> None:
    message = bytes(125)
    mask = burst(difference, 125, start)
    assert mask
    assert zlib.crc32(_xored(message, mask << start)) ^ zlib.crc32(message) == difference


def test_a_wrong_place_explains_nothing() -> None:
    message = random.Random(3).randbytes(100)
    difference = zlib.crc32(message) ^ zlib.crc32(_xored(message, 0b1011 << 300))
    assert burst(difference, 100, 300, 4) == 0b1011
    assert burst(difference, 100, 299, 4) is None
    assert burst(difference, 100, 301, 4) is None
    assert burst(difference, 100, 300, 3) is None


@pytest.mark.parametrize(("start", "bits"), [(-1, 8), (0, 0), (0, 33), (793, 8), (800, 1)])
def test_a_run_must_lie_in_the_message(start: int, bits: int) -> None:
    with pytest.raises(ValueError, match="of 100 bytes"):
        burst(1, 100, start, bits)


# Odds.


def test_odds_are_the_share_of_differences_that_one_bit_explains() -> None:
    assert odds(1 << 20) == 2**23 / 2**32
    assert odds(5_368_709) < 0.01 < odds(5_368_710)
    assert odds(LIMIT) == odds(10**15) == 1
    assert burst_odds(32) == 1
    assert burst_odds(16) == 1 / 65_536


def _flipped(message: bytes, bit: int) -> bytes:
    return _xored(message, 1 << bit)


def _xored(message: bytes, mask: int) -> bytes:
    return (int.from_bytes(message, "little") ^ mask).to_bytes(len(message), "little")
