"""One file a family of analyses: from a problem, and mostly a plane, to a result."""
