"""The problem that is analysed: a model, a loss and data at one vector of weights."""
