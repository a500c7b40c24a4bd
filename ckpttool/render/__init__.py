"""The only code that prints: text, JSON, progress."""
