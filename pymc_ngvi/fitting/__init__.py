"""A fit: options, defaults, start, loop and record. It knows nothing of results."""
