"""Reading files, checksums, and durable writing: the only code that touches the disk."""
