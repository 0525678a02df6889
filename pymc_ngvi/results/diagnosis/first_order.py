"""By how much functionals of an approximate nested posterior are off, to first order in what its Gaussians miss.

Given hyperparameters, the mean of a function f under p differs from that under q by Cov_q(f, h), with h = log p - log
q, and terms of higher order. At the optimum of q it vanishes where f is linear or quadratic; for totals of exponentials
and the like it does not.
"""

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis.functionals import Functionals
from pymc_ngvi.results.diagnosis.moment_drift import Estimates


def first_order_of(functionals: Functionals, theta: Array, log_ratio: Array) -> Estimates:
    """Return estimates of E_p[f] - E_q[f], in standard deviations under q, of each column.

    Parameters
    ----------
    functionals : Functionals
    theta : ndarray, shape (n, m, n_dim)
        Draws of q: ``m`` at each of ``n`` values of the hyperparameters, all of equal weight.
    log_ratio : ndarray, shape (n, m)
        log p - log q there.
    """
    n, m, n_dim = theta.shape
    values = functionals.at(theta.reshape(n * m, n_dim))
    sd = values.std(axis=0)
    values = values.reshape(n, m, -1)
    apart, h = values - values.mean(axis=1, keepdims=True), log_ratio - log_ratio.mean(axis=1, keepdims=True)
    covariances = np.einsum("nmk,nm->nk", apart, h) / (m - 1)
    with np.errstate(all="ignore"):
        value, se = covariances.mean(axis=0) / sd, covariances.std(axis=0, ddof=1) / np.sqrt(n) / sd
    known = np.isfinite(value) & np.isfinite(se)
    return Estimates(np.where(known, value, 0.0), np.where(known, se, 1.0))
