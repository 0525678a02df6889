"""The line search of exact expectations, several iterations in one call of JAX."""
