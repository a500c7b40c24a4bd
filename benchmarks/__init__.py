"""Every figure that this project claims, as a ratio measured side by side in one run.

`python -m benchmarks` (or `make bench`) runs them all; `python -m benchmarks verify` only those
whose module name contains "verify". Each module has `run()`, which gives `Row`s.
CKPTTOOL_BENCH_GB sets the size of the file with real bytes (default 2), TMPDIR where it is made.
"""
