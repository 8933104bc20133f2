"""One file an analysis: from a problem, and mostly a plane, to a result."""
