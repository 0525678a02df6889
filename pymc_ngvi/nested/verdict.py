"""How far a nested posterior can be relied on: every condition, with its figure."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.marginal.verdict import MOST_KHAT
from pymc_ngvi.nested.pairs import MOST_VARIANCE
from pymc_ngvi.nested.rounds import FEWEST_VALUES, N_DRAWS

#: Effective sizes from which on a posterior is exact up to simulation error: of the hyperparameters, of pairs.
_EXACT_VALUES, _EXACT_PAIRS = 400.0, 1_000.0
#: Effective size of the hyperparameters from which on a posterior is reliable, and k-hat up to which it is.
_LEAST_VALUES, _HEAVIEST = 100.0, 0.7
#: Part of the values that are effective from which on a heavy tail of weights does not matter.
EVEN = 0.7
#: Standard errors by which values from farther out may move a mean.
MOST_MOVED = 2.0
#: Error of log m, an sd over the hyperparameters in nats, up to which an approximate posterior is reliable; part of
#: the weight that may be where there is no fit.
MOST_ERROR, _MOST_LOST = 0.15, 0.01


@stored("nested.weights")
@dataclass(frozen=True)
class NestedChecks:
    """What was measured of a nested posterior.

    Parameters
    ----------
    khat : float
        Of the weights of the hyperparameters.
    effective_size : float
        Of these weights, in values.
    n_values, n_draws : int
        Values of the hyperparameters; draws of the latent variables at each.
    pair_size : float
        Effective size of the weights of both together, in draws.
    variance : float
        Of log weights given the hyperparameters.
    n_globals, n_local : int
        Hyperparameters; latent variables.
    n_fits : int
        Fits of the latent variables at given hyperparameters.
    moved : float
        By how much values from farther out move a mean, in its standard errors; 0 where it is by less than .05 sd.
    lost : float
        Part of the weight that is where there is no fit.
    error : float
        Of log m where pairs are not weighted together, an sd over the hyperparameters in nats; 0 where they are.
    lacking : float
        Nats that the ELBOs lack of log m, in the mean.
    of_earlier : bool
        Whether the draws are those of an earlier version, read from a file.
    """

    khat: float
    effective_size: float
    n_values: int
    n_draws: int
    pair_size: float
    variance: float
    n_globals: int
    n_local: int
    n_fits: int
    moved: float = 0.0
    lost: float = 0.0
    error: float = 0.0
    lacking: float = 0.0
    of_earlier: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether hyperparameters and latent variables are weighted together."""
        return self.variance <= MOST_VARIANCE and not self.of_earlier

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What stands against calling the posterior exact, in clauses."""
        found = list(self.failures)
        if not self.is_joint:
            return (*found, self._why_not_joint)
        if not self._has_tail(MOST_KHAT):
            found.append(f"k-hat of the weights of the hyperparameters is {self.khat:.2f}, above {MOST_KHAT}")
        if self.effective_size < _EXACT_VALUES:
            found.append(
                f"the effective size of the hyperparameters is {self.effective_size:,.0f}, below {_EXACT_VALUES:,.0f}"
            )
        if self.pair_size < _EXACT_PAIRS:
            found.append(f"the effective size of the draws is {self.pair_size:,.0f}, below {_EXACT_PAIRS:,.0f}")
        if self.n_draws < N_DRAWS or self.effective_size < FEWEST_VALUES:
            found.append("there are too few draws to measure how even the weights of latent variables are")
        return tuple(found)

    @property
    def failures(self) -> tuple[str, ...]:
        """What stands against relying on the posterior, in clauses; empty if nothing does."""
        if self.of_earlier:
            return ("its draws were made by an earlier version: single variables are right, sums may be wrong",)
        found = []
        if not self._has_tail(_HEAVIEST):
            found.append(f"k-hat of the weights of the hyperparameters is {self.khat:.2f}, above {_HEAVIEST}")
        if not self.effective_size >= _LEAST_VALUES:
            found.append(
                f"the effective size of the hyperparameters is {self.effective_size:,.0f}, below {_LEAST_VALUES:,.0f}"
            )
        if self.moved > MOST_MOVED:
            found.append(f"hyperparameters from farther out move a mean by {self.moved:.1f} of its standard errors")
        if self.lost > _MOST_LOST:
            found.append(f"the latent variables can't be fitted at {100 * self.lost:.0f} % of the hyperparameters")
        if not self.is_joint and not self.error < MOST_ERROR:
            found.append(f"the log marginal density of the hyperparameters is known to {self.error:.2f} nats only")
        return tuple(found)

    def _has_tail(self, most: float) -> bool:
        """Tell whether the tail of the weights is light enough, or does not matter."""
        return self.khat < most or self.effective_size > EVEN * self.n_values

    @property
    def _why_not_joint(self) -> str:
        return (
            f"given the hyperparameters, log weights of the latent variables have a variance of {self.variance:.2g}, "
            f"above {MOST_VARIANCE:g}"
        )

    @property
    def is_exact(self) -> bool:
        """Whether the posterior is exact up to simulation error."""
        return not self.shortfalls

    @property
    def is_reliable(self) -> bool:
        """Whether nothing stands against relying on the posterior."""
        return not self.failures

    @property
    def efficiency(self) -> float:
        """Part of the pairs that is effective, by the weights of hyperparameters and those given these."""
        return self.effective_size / self.n_values * float(np.exp(-self.variance))

    @property
    def sentence(self) -> str:
        """What the posterior is, in two sentences."""
        n = self.n_globals
        own = (
            f"Nested: {n} hyperparameter{'s'[: n != 1]} sampled (effective sample size {self.effective_size:,.0f}), "
            f"{self.n_local:,} latent variable{'s'[: self.n_local != 1]} drawn from Gaussians given these"
        )
        if self.is_exact:
            return f"{own}; exact up to simulation error by weights of both (effective sample size {self._size})."
        if not self.is_reliable:
            return f"{own}. Not reliable: {'; '.join(self.failures)}."
        kind = "weighted together, nearly exact" if self.is_joint else "approximate"
        return f"{own}; {kind}: {'; '.join(self.shortfalls)}."

    @property
    def _size(self) -> str:
        return f"{self.pair_size:,.0f}" if np.isfinite(self.pair_size) else "unknown"
