"""Checkpoints of runs, weights from other programs, and the code that a user names."""
