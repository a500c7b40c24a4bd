"""Changes on disk: each verb makes a plan of small actions, then applies it."""
