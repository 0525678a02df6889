"""Modes of log p beside the one that a fit came to: looked for, fitted, and told of."""
