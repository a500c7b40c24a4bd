"""From a file back to a run: looked at, loaded, compared, and only then put in place."""
