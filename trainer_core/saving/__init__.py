"""From a state to a file that no crash can take back: staged, written, checked, named, kept."""
