"""The loop of a run, its beginning, and its parts."""
