"""`repair`: looks at a directory, plans what mends it, and carries that out under a journal."""
