"""Methods: each paper's algorithm in a file, and what users name, in a registry for each axis."""

from pymc_ngvi.core.types import Rule
from pymc_ngvi.methods.adaptive import Adaptive
from pymc_ngvi.methods.cholesky import (
    DIRECTIONS,
    SGD,
    SNNGM,
    Adam,
    cholesky,
    cholesky_precision,
    euclidean,
    sqrt,
)
from pymc_ngvi.methods.decay import Decay
from pymc_ngvi.methods.estimators import ESTIMATORS, Update
from pymc_ngvi.methods.ivon import IVON
from pymc_ngvi.methods.linesearch import LineSearch
from pymc_ngvi.methods.mixtures import ComponentTarget, TrustRegion
from pymc_ngvi.methods.natural import Constant, Proximal, natural, natural_pd
from pymc_ngvi.methods.student_t import ScaleMixture

#: Parametrisations and step maps.
UPDATES: dict[str, Update] = {
    "natural": natural,
    "natural_pd": natural_pd,
    "cholesky": cholesky,
    "cholesky_precision": cholesky_precision,
    "sqrt": sqrt,
    "euclidean": euclidean,
}
#: Step rules: how far to go, and when to stop.
STEPS: dict[str, type[Rule]] = {
    "adaptive": Adaptive,
    "linesearch": LineSearch,
    "constant": Constant,
    "decay": Decay,
    "proximal": Proximal,
    "snngm": SNNGM,
    "adam": Adam,
    "sgd": SGD,
    "ivon": IVON,
}
#: Step rules of families that are mixtures, finite (of Gaussians) and continuous (the Student-t), which imply them.
MIXTURE_STEPS: dict[str, type[Rule]] = {"trust_region": TrustRegion, "scale_mixture": ScaleMixture}

__all__ = [
    "DIRECTIONS",
    "ESTIMATORS",
    "IVON",
    "MIXTURE_STEPS",
    "SGD",
    "SNNGM",
    "STEPS",
    "UPDATES",
    "Adam",
    "Adaptive",
    "ComponentTarget",
    "Constant",
    "Decay",
    "LineSearch",
    "Proximal",
    "ScaleMixture",
    "TrustRegion",
    "cholesky",
    "cholesky_precision",
    "euclidean",
    "natural",
    "natural_pd",
    "sqrt",
]
