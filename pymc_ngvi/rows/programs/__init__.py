"""Rows as programs: straight lines of scalar operations, with derivatives, and what evaluates them on arrays."""
