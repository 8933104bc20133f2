"""Experiments that train: sweeps, continued runs, and the limits of stability."""
