"""Thousands of places of a file damaged, and each found: `python -m benchmarks.damage_everywhere`.

The same as `tests/acceptance/test_damage_everywhere.py`, with more places: bytes changed in the
records' data and outside of it, and cuts. Ends with an AssertionError at what is not found.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.acceptance import test_damage_everywhere as damage


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


if __name__ == "__main__":
    main()
