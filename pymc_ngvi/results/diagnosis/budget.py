"""How many evaluations a report may take: from what one costs and from what the fit took, never from the clock."""

from dataclasses import dataclass

from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.costs import Costs

#: Estimated seconds that a report may take in any case, and as a part of the fit.
SUMMARY, DIAGNOSIS = (1.2, 0.3), (4.0, 0.7)
#: Seconds for the k-hat of a coordinate from 10,000 draws, and the part of a budget that these may take.
_PER_KHAT, _OF_KHATS = 2e-3, 0.1
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000
#: Part of the gradients for comparing log p with its mirror images; evaluations at least, below which there are none.
_OF_SYMMETRIES, _LEAST_COMPARED = 0.05, 16


def seconds_of(share: tuple[float, float], costs: Costs, record: FitRecord | None) -> float:
    """Return the estimated seconds that a share allows: some in any case, or a part of what the fit took."""
    floor, part = share
    took = 0.0 if record is None else costs.gradient * record.n_gradients + costs.hessian * record.n_hessians
    return max(floor, part * took)


@dataclass(frozen=True)
class Budget:
    """What a report may evaluate."""

    #: Draws for importance weights; 0: none.
    n_weights: int
    #: Coordinates that get a k-hat.
    n_khats: int
    #: For moved draws, about.
    n_gradients: int
    #: Whether moved draws get less than they do where evaluations are cheap.
    cut: bool = False
    #: The same of importance weights.
    weights_cut: bool = False
    #: Whether gradients at draws are looked at, and few draws are moved: where a posterior has checks of its own, and
    #: these speak for it.
    scored: bool = False

    def compared(self, wanted: int) -> int:
        """Return how many log densities there are for symmetries: as many as wanted where nothing is cut."""
        n = int(min(wanted, _OF_SYMMETRIES * self.n_gradients)) if self.cut else wanted
        return n if n >= _LEAST_COMPARED else 0

    @classmethod
    def of(
        cls,
        share: tuple[float, float],
        costs: Costs,
        record: FitRecord | None,
        wanted: "Budget",
    ) -> "Budget":
        """Return as much of what is wanted as a share allows."""
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
