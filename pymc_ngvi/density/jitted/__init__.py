"""Rows on JAX: expectations as functions that are jitted."""
