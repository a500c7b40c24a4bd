"""CRC-32 as algebra: which bits must have turned for the checksum to change as it did.

CRC-32 (IEEE 802.3; 0xEDB88320 with its bits reflected) is the remainder of the message, times x^32,
modulo a polynomial P over GF(2). Start value and final complement cancel out between two messages
of equal length, so the exclusive-or of their checksums depends only on the bits that differ: one
that has d bits behind it adds x^(32+d) mod P (Peterson and Brown, "Cyclic Codes for Error
Detection", Proc. IRE 49, 1961). P is primitive: the powers of x run through all 2^32-1 nonzero
remainders before they repeat. Where one bit turned, its place is thus a discrete logarithm to the
base x (so located by Grymel, "Error Control with Binary Cyclic Codes", Manchester 2012).

The order 2^32-1 = 3*5*17*257*65537 has small factors only. So the logarithm is found modulo each of
them (Pohlig and Hellman, IEEE Trans. Information Theory 24, 1978), by baby-step giant-step (Shanks,
Proc. Symp. Pure Math. 20, 1971) in groups of at most 65537 elements, and put together by the
Chinese remainder theorem: some hundreds of multiplications, whatever the length of the message.

Remainders are integers with reflected bits, as in zlib: bit 31 is the coefficient of x^0. Bits of a
message count as CRC-32 takes them, the least significant of each byte first: bit b of byte n is bit
8n+b.
"""

from __future__ import annotations

POLYNOMIAL = 0xEDB88320
ORDER = (1 << 32) - 1
FACTORS = (3, 5, 17, 257, 65537)

_ONE = 1 << 31
_X = 1 << 30
_MASK = (1 << 32) - 1

_squares: list[int] = []
_steps: dict[int, _Steps] = {}


class _Steps:
    """Shanks' tables for the subgroup of one prime order: made once, some hundred entries each."""

    __slots__ = ("baby", "base", "giant", "prime", "width")

    def __init__(self, prime: int) -> None:
        self.prime = prime
        self.base = power_of_x(ORDER // prime)
        self.width = 1
        while self.width * self.width < prime:
            self.width += 1
        self.baby: dict[int, int] = {}
        value = _ONE
        for exponent in range(self.width):
            self.baby.setdefault(value, exponent)
            value = multiply(value, self.base)
        # `value` is base^width; one giant step goes back by it.
        self.giant = _power(value, prime - 1)

    def logarithm(self, value: int) -> int:
        """k with base^k = value, below the prime. `value` must lie in the subgroup."""
        for step in range(self.width + 1):
            found = self.baby.get(value)
            if found is not None:
                return (step * self.width + found) % self.prime
            value = multiply(value, self.giant)
        raise ValueError("the value is not in the subgroup")


# Arithmetic modulo P.


def multiply(a: int, b: int) -> int:
    """The product of two remainders modulo P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & _MASK
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
    return product


def power_of_x(exponent: int) -> int:
    """x^exponent mod P, for any integer; negative ones divide."""
    if not _squares:
        square = _X
        for _ in range(32):
            _squares.append(square)
            square = multiply(square, square)
    exponent %= ORDER
    result = _ONE
    for square in _squares:
        if exponent & 1:
            result = multiply(result, square)
        exponent >>= 1
    return result


def logarithm(value: int) -> int:
    """The exponent below 2^32-1 with x^exponent = value mod P. Raises ValueError for 0."""
    if not 0 < value <= _MASK:
        raise ValueError(f"{value:#x} is no power of x")
    exponent, modulus = 0, 1
    for prime in FACTORS:
        steps = _steps.get(prime)
        if steps is None:
            steps = _steps[prime] = _Steps(prime)
        rest = steps.logarithm(_power(value, ORDER // prime))
        exponent += modulus * ((rest - exponent) * pow(modulus, -1, prime) % prime)
        modulus *= prime
    return exponent


def _power(value: int, exponent: int) -> int:
    result = _ONE
    while exponent:
        if exponent & 1:
            result = multiply(result, value)
        value = multiply(value, value)
        exponent >>= 1
    return result


# Damage from its difference.


def single_bits(difference: int, length: int) -> list[int]:
    """Every bit of a message of `length` bytes that alone explains the difference, in order:
    8 * byte + bit, bit 0 the least significant.

    `difference` is the recorded CRC-32, exclusive-or the one that was computed now. No place gives
    an empty list. Up to 512 MiB there is at most one place; above, the powers of x repeat, and
    there may be one more for each 512 MiB.
    """
    if not 0 < difference <= _MASK:
        return []
    # The exponent is 32 + the number of bits behind the one that turned.
    behind = (logarithm(difference) - 32) % ORDER
    return [8 * length - 1 - bits for bits in range(behind, 8 * length, ORDER)][::-1]


def burst(difference: int, length: int, start_bit: int, bits: int = 32) -> int | None:
    """Which of `bits` neighbouring bits (32 at most) must have turned, when their place is known.

    `start_bit` is the first of them, counted as `single_bits` does. Bit j of the result stands for
    the message's bit `start_bit + j`; exclusive-or it to the message, as a little-endian number, to
    mend it. None where no change there explains the difference. There is never more than one
    solution, and for 32 bits always one: see `burst_odds` for what it proves. Raises ValueError if
    the place isn't in the message.
    """
    if not 0 < bits <= 32 or start_bit < 0 or start_bit + bits > 8 * length:
        raise ValueError(f"no {bits} bits at bit {start_bit} of {length} bytes")
    behind = 8 * length - start_bit - bits
    # Take away what the bits behind did; then the difference spells the mask, last bit first.
    quotient = multiply(difference, power_of_x(-32 - behind))
    if quotient & (_MASK >> bits):
        return None  # of degree `bits` or more: some other bit turned, too
    mask = 0
    for index in range(bits):
        # x^0 (bit 31) is the last bit of the run.
        mask |= (quotient >> (31 - index) & 1) << (bits - 1 - index)
    return mask


def odds(length: int) -> float:
    """How likely unrelated damage to `length` bytes looks like one flipped bit: 8 * length / 2^32.

    Of the 2^32 differences that such damage leads to with equal likelihood, so many belong to some
    single bit. From 512 MiB on all do, and the odds are 1: there the checksum proves nothing. Two
    flipped bits never look like one in up to 11,450 bytes, nor three in up to 371 (Koopman, "32-Bit
    Cyclic Redundancy Codes for Internet Applications", DSN 2002).
    """
    return min(1.0, 8 * length / 2**32)


def burst_odds(bits: int) -> float:
    """How likely unrelated damage is explained by a run of `bits` bits at one place: 2^bits/2^32.

    For 32 bits that is 1: there is always a solution, and the checksum proves nothing. Each place
    that is tried adds as much.
    """
    return 2.0 ** (bits - 32)
