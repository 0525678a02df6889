"""Leave-one-group-out predictive densities, from the integrals of the blocks [1]_.

Given the globals, the integral of a block's terms is p(y_i | g), the density of a group's data. Over the globals,
1 / p(y_i | y_-i) is the posterior mean of 1 / p(y_i | g): an importance sample from the posterior without that group.

References
----------
.. [1] A. Vehtari, T. Mononen, V. Tolvanen, T. Sivula, O. Winther (2016). Bayesian leave-one-out cross-validation
   approximations for Gaussian latent variable models. JMLR 17(103). https://jmlr.org/papers/v17/14-540.html
"""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.quadrature import integrate
from pymc_ngvi.marginal.trees import Trees

#: Draws of the globals that are used at most, and numbers that are held for them: of all draws and blocks, and of those
#: that are integrated at a time.
_MOST_DRAWS, _MOST_NUMBERS, _AT_ONCE = 4_000, 2**27, 2**22


class LeftOut(NamedTuple):
    """Predictive densities of groups given all others.

    Parameters
    ----------
    log_density : ndarray, shape (n_blocks,)
    khat : ndarray, shape (n_blocks,)
        Of the weights of the globals; above .7, a density can't be relied on.
    roots : ndarray of int, shape (n_blocks,)
        The coordinate at the root of each block.
    """

    log_density: Array
    khat: Array
    roots: NDArray[np.intp]


def leave_groups_out(state: PoolState) -> LeftOut:
    """Return the predictive density of each group's data given those of all other groups."""
    assert isinstance(state.rest, Trees)
    forest, quadrature = state.rest.forest, state.rest.quadrature
    if quadrature is None:
        raise ValueError("The model has no groups that are independent given the others: none can be left out.")
    terms = quadrature.terms
    if isinstance(terms, FittedDensity):
        terms = terms.of_whole_groups()
    roots = forest.locals_[forest.at_level[0]]
    # The first ones, not those of most weight: without a group, others may have more.
    n = min(_MOST_DRAWS, max(_MOST_NUMBERS // len(roots), 1), len(state.pool.g))
    g, log_weights = state.pool.g[:n], state.log_weights[:n]
    of_blocks, size = np.empty((n, len(roots))), max(1, _AT_ONCE // forest.n_local)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        points = quadrature.reference(g[rows])
        integral = integrate(terms, forest, quadrature.rule, g[rows], points.centres, moments=False, by_block=True)
        assert integral.of_blocks is not None
        of_blocks[rows] = np.where(points.lost[:, None], np.nan, integral.of_blocks)
    log_density, khat = np.empty(len(roots)), np.empty(len(roots))
    for i, of_group in enumerate(of_blocks.T):
        # Draws that are nothing to the posterior are left out, and those whose centres were not found.
        known = np.isfinite(log_weights) & np.isfinite(of_group)
        smooth, khat[i] = smoothed(log_weights[known] - of_group[known])
        # E_{p(g | y_-i)} p(y_i | g) = sum of v p / sum of v with v = w / p.
        log_density[i] = logsumexp(smooth + of_group[known]) - logsumexp(smooth)
    return LeftOut(log_density, khat, roots)
