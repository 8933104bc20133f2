"""The problem that is analyzed: a model, a loss and data at one vector of weights."""
