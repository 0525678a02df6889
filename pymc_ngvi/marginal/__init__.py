"""Exact posteriors of hierarchical models: effects integrated by quadrature, globals sampled by importance."""
