"""Covariances by linear response: correlations that a diagonal or block family leaves out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.sizes import check_cov_size
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import VariationalState
from pymc_ngvi.families import BlockState, DiagonalState
from pymc_ngvi.results.corrections.quantities import Quantities
from pymc_ngvi.results.corrections.response import ElboHessian, covariance, n_solves, products_at
from pymc_ngvi.results.posterior import Posterior


@dataclass(frozen=True, eq=False)
class LinearResponse:
    """Covariances of the posterior by linear response.

    Parameters
    ----------
    cov : xarray.DataArray
        Square; both axes are labelled: ``beta[3]``, ``sd_log__``.
    sd : xarray.Dataset
        Standard deviations by variable, with its dims and coords.
    n_products : int
        Hessian-vector products that the solves took.
    """

    cov: xr.DataArray
    sd: xr.Dataset
    n_products: int


def linear_response(
    posterior: Posterior,
    q: VariationalState,
    names: str | Sequence[str] | None,
    draws: int,
    tol: float,
    rng: np.random.Generator,
) -> LinearResponse:
    """Return covariances by linear response; see `NGVIApproximation.linear_response`."""
    q = _without_correlations(posterior, q)
    if draws != int(draws) or draws < 2 or int(draws) & (int(draws) - 1):
        raise ValueError(f"The draws of linear_response should be a power of 2, at least 2; got {draws!r}.")
    asked = Quantities.of(names, posterior.layout, posterior.constrain, q.mean(), q.sd())
    check_cov_size(len(asked.jacobian))
    z = sobol_draws(int(draws), q.n_dim, rng).z
    products = products_at(posterior.density, q.draws(z), q.sd(), n_solves(asked.jacobian))
    hessian = ElboHessian(q, z, products)
    cov = covariance(hessian, asked.jacobian, tol)
    sd = asked.dataset(np.sqrt(np.maximum(np.diag(cov), 0.0)), posterior.layout, posterior.model)
    return LinearResponse(asked.matrix(cov), sd, hessian.n_products)


def _without_correlations(posterior: Posterior, q: VariationalState) -> DiagonalState | BlockState:
    """Return q; raise ValueError where linear response has nothing to add to it, or nothing to compute it from."""
    if not isinstance(q, DiagonalState | BlockState):
        raise ValueError(
            "linear_response() adds the correlations that family='diagonal' and 'block' leave out, and q is a "
            f"{type(q).__name__}, which has its own: see cov_of()."
        )
    if posterior.density.has_minibatch:
        raise ValueError(
            "The model reads pm.Minibatch data, and linear response needs the Hessian given all of them: build the "
            "model on all of the data."
        )
    posterior.refuse_changed_data("The model's posterior is another one now than q approximates")
    if posterior.record is not None and posterior.record.status is not Status.CONVERGED:
        status = posterior.record.status
        raise ValueError(
            f"Linear response is that of an optimum, and the fit has not converged ({status}). {status.sentence} "
            f"{status.cure}"
        )
    return q
