"""The distributions of fits, as reports read them."""

from pymc_ngvi.results.distributions import exact as _exact  # noqa: F401 (registers the exact posterior)
from pymc_ngvi.results.distributions.variational import distribution_of

__all__ = ["distribution_of"]
