"""Reparametrised variational Bayes for hierarchical models: local coordinates relative to their conditional modes."""

from pymc_ngvi.reparam.target import ReparametrisedDensity, reparametrised
from pymc_ngvi.reparam.transform import Conditional

__all__ = ["Conditional", "ReparametrisedDensity", "reparametrised"]
