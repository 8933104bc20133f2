"""Combinations of model, loss and data against dense float64 references: each right, or refused with a reason."""
