"""Reparametrised variational Bayes for hierarchical models: local coordinates relative to their conditional modes."""

from pymc_ngvi.reparam.target import Conditional, ReparametrisedDensity, reparametrised

__all__ = ["Conditional", "ReparametrisedDensity", "reparametrised"]
