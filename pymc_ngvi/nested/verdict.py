"""How far a nested posterior can be relied on: every condition, with its figure."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.verdict import Condition, Verdict
from pymc_ngvi.marginal.sampler import MOST_MOVED, MOST_SURE, MOST_VARIANCE, N_DRAWS
from pymc_ngvi.marginal.sampling import MOST_KHAT, has_light_tail
from pymc_ngvi.marginal.verdict import EXACT_SIZE, EXACT_SIZE_OF_FEW

#: Effective size of pairs from which on a posterior is exact up to simulation error.
_EXACT_PAIRS = 1_000.0
#: Part of the effective size of the hyperparameters from which on a posterior is reliable, and k-hat up to which it is.
_LEAST_PART, _HEAVIEST = 0.25, 0.7
#: Values at which there are draws at least, so that it is known how even their weights are.
FEWEST_VALUES = 64
#: Error of log m, an sd over the hyperparameters in nats, up to which an approximate posterior is reliable; part of
#: the weight that may be where there is no fit.
MOST_ERROR, _MOST_LOST = 0.15, 0.01


@stored("nested.weights")
@dataclass(frozen=True)
class NestedChecks(Verdict):
    """What was measured of a nested posterior."""

    #: Of the weights of the hyperparameters.
    khat: float
    #: Of these weights, in values.
    effective_size: float
    #: Values of the hyperparameters; draws of the latent variables at each.
    n_values: int
    n_draws: int
    #: Effective size of the weights of both together, in draws.
    pair_size: float
    #: Of log weights given the hyperparameters.
    variance: float
    #: Hyperparameters; latent variables.
    n_globals: int
    n_local: int
    #: Fits of the latent variables at given hyperparameters.
    n_fits: int
    #: By how much values from farther out move a mean, in its standard errors; 0 where it is by less than .05 sd.
    moved: float = 0.0
    #: Part of the weight that is where there is no fit.
    lost: float = 0.0
    #: Of log m where pairs are not weighted together, an sd over the hyperparameters in nats; 0 where they are.
    error: float = 0.0
    #: Nats that the ELBOs lack of log m, in the mean.
    lacking: float = 0.0
    #: Whether log p is known to be concave in the latent variables, given the hyperparameters.
    is_concave: bool = True

    @property
    def is_joint(self) -> bool:
        """Whether hyperparameters and latent variables are weighted together."""
        return self.variance <= MOST_VARIANCE

    @property
    def conditions(self) -> list[Condition]:
        """All that is asked of it; whether pairs are weighted together tells what."""
        joint = Condition("variance", self.variance, MOST_VARIANCE,
            "given the hyperparameters, log weights of the latent variables have a variance of "
            f"{self.variance:.2g}, above {MOST_VARIANCE:g}", is_vital=False)  # fmt: skip
        found = [
            self._of_tail(_HEAVIEST),
            self._of_size(_LEAST_PART * self._wanted),
            Condition("moved", self.moved, MOST_MOVED,
                f"hyperparameters from farther out move a mean by {self.moved:.1f} of its standard errors"),
            Condition("lost", self.lost, _MOST_LOST,
                f"the latent variables can't be fitted at {100 * self.lost:.0f} % of the hyperparameters"),
        ]  # fmt: skip
        if not self.is_joint:
            said = f"the log marginal density of the hyperparameters is known to {self.error:.2f} nats only"
            return [*found, Condition("log m", self.error, MOST_ERROR, said), joint]
        few = "there are too few draws to measure how even the weights of latent variables are"
        return [
            *found,
            self._of_tail(MOST_KHAT, is_vital=False, is_excused=has_light_tail(self.khat, self.n_values)),
            self._of_size(self._wanted, is_vital=False),
            Condition("pairs", self.pair_size, _EXACT_PAIRS,
                f"the effective size of the draws is {self.pair_size:,.0f}, below {_EXACT_PAIRS:,.0f}",
                is_vital=False, at_least=True),
            Condition("draws", min(self.n_draws / N_DRAWS, self.n_values / FEWEST_VALUES), 1.0, few,
                is_vital=False, at_least=True),
            Condition("hyperparameters", self.n_globals, MOST_SURE,
                f"the proposal of {self.n_globals} hyperparameters was learned from its own draws: integrals are a "
                "little too small",
                is_vital=False),
            # Draws of a Gaussian at one mode know nothing of another one: their weights are even all the same.
            Condition("concave", float(not self.is_concave), 0.5,
                "given the hyperparameters, the latent variables may have other modes, where no Gaussian is",
                is_vital=False),
        ]  # fmt: skip

    def _of_tail(self, most: float, *, is_vital: bool = True, is_excused: bool = False) -> Condition:
        """Ask whether the tail of the weights is light enough: it may be heavy where nearly all of them are equal."""
        said = f"k-hat of the weights of the hyperparameters is {self.khat:.2f}, above {most}"
        return Condition("k-hat", self.khat, most, said, is_vital, is_excused=is_excused)

    def _of_size(self, least: float, *, is_vital: bool = True) -> Condition:
        size = self.effective_size
        said = f"the effective size of the hyperparameters is {size:,.0f}, below {least:,.0f}"
        return Condition("effective size", size, least, said, is_vital, at_least=True)

    @property
    def _wanted(self) -> float:
        return EXACT_SIZE_OF_FEW.get(self.n_globals, EXACT_SIZE)

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
