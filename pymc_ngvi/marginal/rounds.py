"""All rounds of draws together, as draws of the mixture of their proposals [1]_.

None is left out because its weights are uneven: they are where a proposal has found what the ones before it missed, and
a proposal that misses the same again looks good.

References
----------
.. [1] J.-M. Cornuet, J.-M. Marin, A. Mira, C. P. Robert (2012). Adaptive multiple importance sampling. Scandinavian
   Journal of Statistics 39(4). https://doi.org/10.1111/j.1467-9469.2011.00756.x
"""

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.sampling import LogMarginalFunction, Round, Weighted

#: Nats below the largest weight from which on draws are not evaluated anew: all of them together have none to speak of.
_NO_WEIGHT = 12.0
#: What moments may move by: in standard deviations; in standard errors, those that a Gaussian has.
_MAY_MOVE, _ERRORS = 0.05, 2.0


class ProposalRounds:
    """Rounds of draws, and the log density of each proposal at each draw, which is evaluated once."""

    def __init__(self) -> None:
        self._rounds: list[Round] = []
        self._log_q: list[list[Array]] = []  # of each proposal at the draws of each round

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self._rounds)

    def add(self, new: Round) -> None:
        """Add a round."""
        for row, one in zip(self._log_q, self._rounds, strict=True):
            row.append(one.proposal.log_density(new.g))
        self._rounds.append(new)
        self._log_q.append([new.proposal.log_density(one.g) for one in self._rounds])

    def forget_first(self) -> None:
        """Leave the first round out."""
        self._rounds = self._rounds[1:]
        self._log_q = [row[1:] for row in self._log_q[1:]]

    def pooled(self) -> Weighted:
        """Return the draws of all rounds, weighted as draws of the mixture of their proposals."""
        sizes = np.array([len(one.g) for one in self._rounds])
        shares = np.log(sizes / sizes.sum())
        log_q = logsumexp([share + np.concatenate(row) for share, row in zip(shares, self._log_q, strict=True)], axis=0)
        log_marginal = np.concatenate([one.log_marginal for one in self._rounds])
        return Weighted(np.concatenate([one.g for one in self._rounds]), log_marginal, log_marginal - log_q)

    def evaluate_anew(self, function: LogMarginalFunction, first: int = 0) -> None:
        """Evaluate log m anew at the draws that have weight, of the rounds from ``first`` on."""
        log_weights = self.pooled().log_weights
        has_weight = log_weights > log_weights.max() - _NO_WEIGHT
        start = 0
        for i, one in enumerate(self._rounds):
            rows = np.flatnonzero(has_weight[start : start + len(one.g)])
            start += len(one.g)
            if len(rows) and i >= first:
                values = one.log_marginal.copy()
                values[rows] = function(one.g[rows])[0]
                self._rounds[i] = Round(one.proposal, one.g, values)


def weights_of_draws(draws: Weighted) -> Array:
    """Return weights that add up to 1, of draws of which one has weight at least."""
    weights = np.exp(draws.log_weights - draws.log_weights.max())
    return weights / weights.sum()


def moments_of_draws(draws: Weighted) -> tuple[Array, Array]:
    """Return means and standard deviations, (p,) each, of weighted draws."""
    weights = weights_of_draws(draws)
    mean = weights @ draws.g
    return mean, np.sqrt(weights @ (draws.g - mean) ** 2)


def moved(before: Weighted, after: Weighted) -> float:
    """Return by how much more draws move moments, in what they may: more than 1 says that some of the mass was missed.

    The most of all means and standard deviations. A mean may move by .05 standard deviations, and one of these by 5 %;
    either by two of the standard errors that a Gaussian has, where that is more: after few draws. inf where nothing can
    be said.
    """
    if not (np.isfinite(before.log_weights).any() and np.isfinite(after.log_weights).any()):
        return np.inf
    (mean, sd), (new_mean, new_sd) = moments_of_draws(before), moments_of_draws(after)
    if not ((sd > 0.0) & (new_sd > 0.0)).all():
        return np.inf
    error = float(np.sqrt(np.sum(weights_of_draws(before) ** 2)))
    of_mean, of_sd = max(_MAY_MOVE, _ERRORS * error), max(_MAY_MOVE, _ERRORS * error / np.sqrt(2.0))
    return float(max((np.abs(new_mean - mean) / new_sd).max() / of_mean, np.abs(np.log(new_sd / sd)).max() / of_sd))
