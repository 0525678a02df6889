"""When a noisy ELBO has stopped rising: means over windows of iterations, and the slope through the last three.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from pymc_ngvi.core.stored import stored

#: Nats per window below which the slope of the ELBO counts as none.
_LEAST_SLOPE = 0.01
#: Window means that the line goes through.
_N_MEANS = 3


@stored("stochastic.windows")
@dataclass(frozen=True)
class Windows:
    """Means of a noisy figure over windows of iterations; of the past, only the last three means are kept.

    Parameters
    ----------
    size : int
        Iterations in a window.
    n : int
        Iterations in the current one.
    mean, squares : float
        Of the figure over the current window: the mean, and the sum of squared deviations from it.
    means : tuple of float
        Of the last complete windows, at most three.
    se : float
        Standard error of the last of them, from the scatter within the window.
    """

    size: int
    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    means: tuple[float, ...] = ()
    se: float = np.inf

    def with_value(self, value: float) -> Self:
        """Return these windows with one more value; one that is not finite is left out."""
        if not np.isfinite(value):
            return self
        n = self.n + 1
        apart = value - self.mean
        mean = self.mean + apart / n
        squares = self.squares + apart * (value - mean)
        if n < self.size:
            return type(self)(self.size, n, mean, squares, self.means, self.se)
        se = float(np.sqrt(squares / (n - 1) / n)) if n > 1 else np.inf
        return type(self)(self.size, means=(*self.means, mean)[-_N_MEANS:], se=se)

    @property
    def just_completed(self) -> bool:
        """Whether the last value completed a window."""
        return self.n == 0 and bool(self.means)

    @property
    def slope(self) -> float:
        """Slope per window of the least-squares line through the last three means; inf before there are three."""
        # Through three equidistant points, the middle one has no say.
        return 0.5 * (self.means[-1] - self.means[0]) if len(self.means) == _N_MEANS else np.inf

    @property
    def has_levelled(self) -> bool:
        """Whether the figure has stopped rising, as the last complete windows tell."""
        return self.just_completed and bool(self.slope < _LEAST_SLOPE)
