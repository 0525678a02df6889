"""Step rules: how far to go, and when to stop. One file and one row each."""

from pymc_ngvi.steps.adam import Adam
from pymc_ngvi.steps.adaptive import Adaptive
from pymc_ngvi.steps.constant import Constant
from pymc_ngvi.steps.decay import Decay
from pymc_ngvi.steps.proximal import Proximal
from pymc_ngvi.steps.scale_mixture import ScaleMixture
from pymc_ngvi.steps.sgd import SGD
from pymc_ngvi.steps.snngm import SNNGM
from pymc_ngvi.steps.trust_region import TrustRegion

STEPS: dict[str, type] = {
    "adaptive": Adaptive,
    "constant": Constant,
    "decay": Decay,
    "proximal": Proximal,
    "snngm": SNNGM,
    "adam": Adam,
    "sgd": SGD,
    "trust_region": TrustRegion,
    "scale_mixture": ScaleMixture,
}

__all__ = ["SGD", "SNNGM", "STEPS", "Adam", "Adaptive", "Constant", "Decay", "Proximal", "ScaleMixture", "TrustRegion"]
