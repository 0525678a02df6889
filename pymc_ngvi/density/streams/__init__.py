"""Models whose data come in batches: an iterable gives them, and one is in memory at a time."""
