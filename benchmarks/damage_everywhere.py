"""Thousands of places of a file damaged, and each found: `python -m benchmarks.damage_everywhere`.

The same as `tests/acceptance/test_damage_everywhere.py`, with more places: bytes changed in the
records' data and outside of it, and cuts; and each bit of two small files. Ends with an
AssertionError at what is not found.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.acceptance import test_damage_everywhere as damage
from tests.ckpttool.formats import test_torch_zip_damage as small


def main() -> None:
    """Tries each kind and says how many there were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, default=2000, metavar="N", help="bytes of each kind")
    places = parser.parse_args().places
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, damage.NAME)
        damage.change_contents(path, places)
        print(f"{places:,} bytes changed in the data of records: all found, each with its place")
        damage.change_the_rest(path, places)
        print(f"{places:,} bytes changed elsewhere: all found")
        damage.cut(path, places // 4)
        print(f"{places // 4:,} cuts: all found")
        for data in (small.SMALL, small.OLD):
            for bit in range(8):
                small.flip_each_byte(path, data, lambda offset, bit=bit: bit)
            print(f"{8 * len(data):,} bits of a small file, each flipped: all found")


if __name__ == "__main__":
    main()
