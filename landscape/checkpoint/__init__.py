"""Checkpoints of runs, weights of others, and the code that a user names."""
