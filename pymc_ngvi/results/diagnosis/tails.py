"""k-hat of the weighted moments of each coordinate."""

import numpy as np

from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.core.types import Array


def coordinate_khats(log_ratio: Array, standardised: Array) -> Array:
    """Return k-hat of the weighted mean and second moment of each coordinate, the worse of the two.

    Parameters
    ----------
    log_ratio : ndarray, shape (n_draws,)
        log p - log q at draws of q, finite.
    standardised : ndarray, shape (n_draws, n_coordinates)
        The draws, less the mean of q, in its standard deviations.

    Returns
    -------
    ndarray, shape (n_coordinates,)

    References
    ----------
    .. [1] A. Vehtari, D. Simpson, A. Gelman, Y. Yao and J. Gabry (2024). Pareto smoothed importance sampling.
       JMLR 25(72). https://doi.org/10.48550/arXiv.1507.02646

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).standard_normal((10_000, 2))
    >>> log_ratio = 0.45 * x[:, 0] ** 2  # p is wider than q in the first coordinate
    >>> khats = coordinate_khats(log_ratio, x)
    >>> bool(khats[0] > khats[1])
    True
    """
    with np.errstate(divide="ignore"):
        sizes = np.log(np.abs(standardised.T))
    return np.array([max(smoothed(log_ratio + size)[1], smoothed(log_ratio + 2.0 * size)[1]) for size in sizes])
