"""How many evaluations a report may take: from what one costs and from what the fit took, never from the clock."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.families.pushforward import PushforwardState
from pymc_ngvi.result import FitRecord
from pymc_ngvi.types import VariationalState

#: Estimated seconds that a report may take in any case, and as a part of the fit.
SUMMARY, DIAGNOSIS = (1.2, 0.3), (4.0, 0.7)
#: A Hessian, in gradients, at least; log p alone, as a part of a gradient.
_HESSIAN, _LOG_P = 3.0, 0.75
#: Seconds that a draw and its log density take for each coordinate and each parameter of q.
_PER_COORDINATE, _PER_PARAMETER = 1e-7, 1e-9
#: Of a reparametrised density: gradients that one of its own takes, that the way of a draw to the model's scale takes,
#: and the seconds on top of both. First of a search for conditional modes, then without one.
_SEARCH, _NO_SEARCH = (8.0, 4.0, 6e-4), (2.5, 0.5, 2e-5)
#: Seconds for the k-hat of a coordinate from 10,000 draws, and the part of a budget that these may take.
_PER_KHAT, _OF_KHATS = 2e-3, 0.1
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000


@dataclass(frozen=True)
class Costs:
    """Estimated seconds of single evaluations.

    Parameters
    ----------
    gradient : float
        Of the density that was fitted, with a step of a trajectory.
    weight : float
        Of a draw, log p and log q.
    """

    gradient: float
    weight: float

    @classmethod
    def of(cls, density: Any, q: VariationalState, record: FitRecord | None) -> "Costs":
        """Estimate them from the graph of log p, the sizes of its data, and the parameters of q."""
        one = density.gradient_seconds
        n_parameters = sum(np.size(value) for value in q.params().values())
        own = _PER_COORDINATE * q.n_dim + _PER_PARAMETER * n_parameters
        if not isinstance(q, PushforwardState):
            return cls(one + 0.5 * own, _LOG_P * one + own)
        search = record is None or record.reparam != "noncentred"
        gradients, way, more = _SEARCH if search else _NO_SEARCH
        return cls(gradients * one + more + 0.5 * own, _LOG_P * one + 2.0 * (way * one + more) + own)


def seconds_of(share: tuple[float, float], costs: Costs, record: FitRecord | None) -> float:
    """Return the estimated seconds that a share allows: some in any case, or a part of what the fit took."""
    floor, part = share
    took = 0.0 if record is None else costs.gradient * (record.n_gradients + _HESSIAN * record.n_hessians)
    return max(floor, part * took)


@dataclass(frozen=True)
class Budget:
    """What a report may evaluate.

    Parameters
    ----------
    n_weights : int
        Draws for importance weights; 0: none.
    n_khats : int
        Coordinates that get a k-hat.
    n_gradients : int
        For moved draws, about.
    cut : bool
        Whether moved draws get less than they do where evaluations are cheap.
    weights_cut : bool
        The same of importance weights.
    """

    n_weights: int
    n_khats: int
    n_gradients: int
    cut: bool = False
    weights_cut: bool = False

    @classmethod
    def of(
        cls,
        share: tuple[float, float],
        costs: Costs,
        record: FitRecord | None,
        wanted: "Budget",
    ) -> "Budget":
        """Return as much of what is wanted as a share allows.

        Parameters
        ----------
        share : tuple of float
            `SUMMARY` or `DIAGNOSIS`.
        costs : Costs
        record : FitRecord or None
        wanted : Budget
        """
        seconds = seconds_of(share, costs, record)
        n_weights = min(wanted.n_weights, int(_OF_WEIGHTS * seconds / costs.weight))
        if n_weights < min(FEWEST_WEIGHED, wanted.n_weights):
            n_weights = 0
        one_khat = _PER_KHAT * max(n_weights, 1_000) / 10_000
        n_khats = min(wanted.n_khats, int(_OF_KHATS * seconds / one_khat)) if n_weights else 0
        left = seconds - n_weights * costs.weight - n_khats * one_khat
        n_gradients = min(wanted.n_gradients, int(left / costs.gradient))
        cut = n_gradients < wanted.n_gradients
        return cls(n_weights, n_khats, n_gradients, cut, n_weights < wanted.n_weights)
