"""Who averages with whom."""
