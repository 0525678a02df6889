"""Discrete free variables: summed out of a model by pymc_extras, and drawn given each draw of the others."""
