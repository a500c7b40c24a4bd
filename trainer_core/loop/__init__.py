"""One optimizer step after the other: batches, arithmetic, averages, signals, progress."""
