"""Shared values, protocols and numerics: linear algebra, draws, statuses."""
