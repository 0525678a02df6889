"""How good the weights of weighted draws are: whether these can be relied on, and what to do where not."""

import math

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, khat_limit, weigh
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.results.summary.summary import Summary

#: Effective draws below which the error of a mean, 1 / sqrt(n) of its standard deviation, is above .05.
_FEWEST = 400
#: Draws that are proposed, at most; part of those asked for that come where they can be had.
_MOST_DRAWS, _NEARLY = 14_000, 0.9


@dataclass(frozen=True)
class Judged:
    """What there is to say of weighted draws."""

    #: Pareto k-hat of the weights.
    khat: float
    #: Independent draws that the weighted ones are worth; where hyperparameters repeat, those of these.
    effective_sample_size: float
    n_draws: int
    #: What stands against relying on them, in clauses.
    doubts: tuple[str, ...]
    #: What to do where there are doubts.
    cure: str
    #: Whether k-hat speaks for the weights.
    weights_help: bool

    @classmethod
    def of(cls, made: JointDraws, log_ratio: Array, doubts: tuple[str, ...], draws: int, fit: str) -> "Judged":
        """Judge draws with new weights."""
        log_weights = made.log_weights + log_ratio
        # Weights of equal globals stand or fall together.
        found = [weigh(of, np.zeros(len(of)))[1] for of in (log_weights, made.by_globals(log_weights))]
        judged = [of for of in found if of.n_draws >= MIN_KHAT_DRAWS]
        worst = max(judged, key=lambda of: (not of.verdict().helps, of.khat))
        helps, size, cure = worst.verdict().helps, _effective(made, log_weights), fit
        if not helps:
            limit = khat_limit(worst.n_draws)
            doubts = (f"Pareto k-hat is {worst.khat:.2f}, above {limit:.2g}, so that few draws decide", *doubts)
        elif size < _FEWEST:
            error = 1.0 / math.sqrt(max(size, 1.0))
            said = f"draws are worth {size:,.0f} independent ones: the error of a mean is {error:.2g} of its sd"
            doubts = (f"{len(log_weights):,} {said}", *doubts)
            needed = math.ceil(1.2 * _FEWEST / size * draws / 1_000) * 1_000
            can_be_had = _effective(made, made.log_weights) > _NEARLY * draws
            cure = f"Take more draws, draws={needed:_}; or f{fit[1:]}" if can_be_had and needed <= _MOST_DRAWS else fit
        return cls(worst.khat, size, len(log_weights), doubts, cure, helps)

    def sentence(self, what: str) -> str:
        """Say whether ``what`` can be relied on, and what to do where not."""
        if self.doubts:
            return f"{what}: not reliable: {'; '.join(self.doubts)}. {self.cure}"
        return (
            f"{what}: reliable. {self.n_draws:,} weighted draws have a Pareto k-hat of {self.khat:.2f}, and are worth "
            f"{self.effective_sample_size:,.0f}."
        )


class JudgedDraws:
    """What results that are made of weighted draws have in common: how good the weights are, and how they print.

    Attributes
    ----------
    judged : Judged
    """

    judged: Judged

    @property
    def khat(self) -> float:
        """Pareto k-hat of the weights."""
        return self.judged.khat

    @property
    def effective_sample_size(self) -> float:
        """Independent draws that the weighted ones are worth; where hyperparameters repeat, those of these."""
        return self.judged.effective_sample_size

    @property
    def doubts(self) -> tuple[str, ...]:
        """What stands against relying on it, in clauses."""
        return self.judged.doubts

    @property
    def is_reliable(self) -> bool:
        """Whether nothing stands against relying on it; where something does, a new fit is due."""
        return not self.doubts

    def summary(self) -> Summary:
        """Return a table of the variables."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the summary."""
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


def _effective(draws: JointDraws, log_weights: Array) -> float:
    """Return how many independent draws weighted ones are worth; where globals repeat, how many of these."""
    return min(draws.worth * effective_size(log_weights), effective_size(draws.by_globals(log_weights)))


def log_mean(draws: JointDraws, log_ratio: Array) -> tuple[float, float]:
    """Return the logarithm of a weighted mean of exponentials, and its standard error, from independent parts."""
    _, number = np.unique(draws.part, return_inverse=True)
    sums, logs = [], []
    for log_weights in (draws.log_weights, draws.log_weights + log_ratio):
        top = float(log_weights.max())
        of_part = np.bincount(number, np.exp(log_weights - top))
        sums.append(of_part / of_part.sum())
        logs.append(np.log(of_part.sum()) + top)
    before, after = sums
    k = len(before)
    error = np.sqrt(np.sum((after - before) ** 2) * k / (k - 1)) if k > 1 else np.inf
    return float(logs[1] - logs[0]), float(error)
