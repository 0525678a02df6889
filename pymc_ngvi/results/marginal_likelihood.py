"""Marginal likelihoods of exact, nested and moved posteriors: of all data, and of each group given the others."""

import logging

from typing import NamedTuple

import numpy as np
import xarray as xr

from pymc_ngvi.density.new_priors import log_excess, unnormalised
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.trees import IntegratedTrees, leave_groups_out
from pymc_ngvi.results.convert import elpd_attrs
from pymc_ngvi.results.distributions import Posterior

logger = logging.getLogger("pymc.ngvi")

#: k-hat above which the density of a group left out is not reliable.
_MOST_KHAT = 0.7


class LogMarginalLikelihood(NamedTuple):
    """The logarithm of p(y), the density of the data with all parameters integrated out.

    Parameters
    ----------
    value : float
        In nats.
    se : float
        Monte Carlo standard error, from independent sequences of draws; of a nested posterior, with the error of the
        log density of its hyperparameters; of a moved one, that of bridge sampling.
    """

    value: float
    se: float

    def __str__(self) -> str:
        """Return ``-684.54 +- 0.01 (of the mode that was found)``."""
        return f"{self.value:,.2f} +- {self.se:.2g} (of the mode that was found)"


def log_marginal_likelihood(posterior: Posterior) -> LogMarginalLikelihood:
    """Return log p(y); see `NGVIApproximation.log_marginal_likelihood`."""
    state = _pool_of(posterior, PoolState, "log_marginal_likelihood is that")
    if reasons := unnormalised(posterior.model):
        raise ValueError(f"The model has no marginal likelihood: {'; '.join(reasons)}.")
    value, se = state.log_normaliser()
    if np.isnan(value):
        why = "no Gaussian is near enough to its draws"
        raise ValueError(f"The {state.kind} posterior has no log_marginal_likelihood: {why}.")
    return LogMarginalLikelihood(value - log_excess(posterior.model), se)


def leave_one_group_out(posterior: Posterior) -> xr.Dataset:
    """Return the predictive density of each group given the others; see `NGVIApproximation.leave_one_group_out`."""
    left = leave_groups_out(_pool_of(posterior, IntegratedTrees, "leave_one_group_out() goes with"))
    labels = [posterior.layout.label(int(i)) for i in left.roots]
    n = len(labels)
    high = int((left.khat > _MOST_KHAT).sum())
    if high:
        logger.info(f"{high:,} of {n:,} groups have a k-hat above {_MOST_KHAT}: fit again without them.")
    attrs = {**elpd_attrs(left.log_density), "n_high_khat": high}
    values = {"log_density": ("group", left.log_density), "khat": ("group", left.khat)}
    return xr.Dataset(values, coords={"group": labels}, attrs=attrs)


def _pool_of(posterior: Posterior, kind: type, what: str) -> PoolState:
    state = getattr(posterior.distribution, "q", None)
    if not isinstance(state, PoolState) or not (isinstance(state, kind) or isinstance(state.rest, kind)):
        reason = "" if posterior.record is None else posterior.record.posterior
        why = f" ({reason})" if reason else ""
        raise ValueError(f"{what} of an exact posterior, and this is none{why}: pm.fit(..., posterior='exact').")
    return state
