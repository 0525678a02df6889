"""Step rules: how far to go, and when to stop. One file and one row each."""

from pymc_ngvi.core.types import Rule
from pymc_ngvi.steps.adaptive import Adaptive
from pymc_ngvi.steps.linesearch import LineSearch
from pymc_ngvi.steps.stochastic import IVON, SGD, SNNGM, Adam, Constant, Decay, Proximal

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

__all__ = ["IVON", "SGD", "SNNGM", "STEPS", "Adam", "Adaptive", "Constant", "Decay", "LineSearch", "Proximal"]
