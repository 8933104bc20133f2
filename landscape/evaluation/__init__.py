"""The loss at many weights, fast: the choice of a path, and the paths."""
