"""Natural gradients of mixtures: each component is a Gaussian problem of its own, the weights are another."""

from pymc_ngvi.mixtures.component import ComponentTarget
from pymc_ngvi.mixtures.weights import WEIGHT_UPDATES

__all__ = ["WEIGHT_UPDATES", "ComponentTarget"]
