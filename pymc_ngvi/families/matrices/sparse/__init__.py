"""Sparse symmetric matrices of any pattern: elimination orders, Cholesky factors, parts of the inverse."""
