"""Draws of a Gaussian with large weights, followed to where log p is highest: some may have hit another mode."""

import numpy as np

from pymc_ngvi.core.psis import Weights, WeightVerdict
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.one_mode import has_one_mode
from pymc_ngvi.families import traits_of
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.fitting.modes.climbs import Curvature, cost, modes_from
from pymc_ngvi.results.diagnosis.budget import Budget
from pymc_ngvi.results.diagnosis.missed_mass import MissedMass, outside
from pymc_ngvi.results.diagnosis.weights import first_weighed
from pymc_ngvi.results.posterior import Posterior

#: Draws that are followed, and the part of the gradients that this may take.
_N_FOLLOWED, _OF_GRADIENTS = 4, 0.2


def followed(
    posterior: Posterior,
    budget: Budget,
    weights: Weights,
    ratio: Array | None,
    again: np.random.Generator | None,
    elbo: float,
    rng: np.random.Generator,
) -> list[MissedMass]:
    """Return the modes that draws of a Gaussian with large weights lead to, and that it does not cover.

    Parameters
    ----------
    posterior : Posterior
    budget : Budget
    weights : Weights
    ratio : ndarray, shape (n_draws,), or None
        Their logarithms.
    again : Generator or None
        Makes the draws again; None for those that belong to the fit.
    elbo : float
    rng : Generator
    """
    density, q = posterior.density, posterior.distribution
    gaussian, record = q.gaussian, posterior.record
    uneven = weights.verdict(q.n_dim) in (WeightVerdict.UNEVEN, WeightVerdict.FAR)
    is_gaussian = record is not None and traits_of(record.family).is_gaussian and isinstance(gaussian, Gaussian)
    if ratio is None or not uneven or not is_gaussian or record is None or record.reparam is not None:
        return []
    if _N_FOLLOWED * cost(q.n_dim) > _OF_GRADIENTS * budget.n_gradients or has_one_mode(density):
        return []
    heaviest = np.argsort(-np.where(np.isfinite(ratio), ratio, -np.inf))[:_N_FOLLOWED]
    theta = first_weighed(posterior, len(ratio), len(ratio), again)[heaviest]
    scales = np.broadcast_to(q.sd(), theta.shape)
    curvature: Curvature = "rows" if record.estimator == "quadrature" else "hessians"
    modes, _ = modes_from(density, gaussian, theta, scales, curvature=curvature)
    found = [outside(density, q, elbo, mode.gaussian, rng) for mode in modes]
    return sorted((place for place in found if place is not None), key=lambda place: -place.share)
