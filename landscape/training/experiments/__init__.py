"""Experiments that train: escape from saddles, stability of minima, continued runs."""
