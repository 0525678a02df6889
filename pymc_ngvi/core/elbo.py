"""Evidence lower bounds, and how nats are shown."""

import math

from typing import NamedTuple

from pymc_ngvi.core.stored import stored

#: Numbers from here on are shown by their order of magnitude.
_HUGE = 1e9


@stored("fit.elbo")
class Elbo(NamedTuple):
    """Evidence lower bound, estimated on draws that had no part in the fit, or found by quadrature.

    Parameters
    ----------
    value : float
        In nats.
    se : float
        Monte Carlo standard error; of quadrature, the error at most.
    """

    value: float
    se: float

    def __str__(self) -> str:
        """Return ``-625.61 +- 0.01``."""
        if math.isinf(self.se):
            return f"{format_elbo(self.value)} (its error is not known)"
        return f"{format_elbo(self.value)} +- {self.se:{'.2f' if self.se < _HUGE else '.1g'}}"


def format_elbo(nats: float) -> str:
    """Return an ELBO as text: to a hundredth, or, where it is huge, to its order of magnitude."""
    return f"{nats:,.2f}" if abs(nats) < _HUGE else f"{nats:.3g}"


def format_gap(nats: float, unit: str = "") -> str:
    """Return a gap in nats as text: to a thousandth, or, where it is large, to its order of magnitude."""
    if math.isnan(nats):
        return "unknown"
    return (f"{nats:.3f}" if nats < 100 else f"{nats:.1e}") + unit
