"""Approximations in files: what is written, how it is read back, and what is checked then."""
