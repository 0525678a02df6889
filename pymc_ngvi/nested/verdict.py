"""How far a nested posterior can be relied on: every condition, with its figure."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.verdict import Against, Condition, PoolVerdict, few_draws
from pymc_ngvi.marginal.sampler import MOST_MOVED, MOST_SURE, MOST_VARIANCE, N_DRAWS, size_asked
from pymc_ngvi.marginal.sampling import MOST_KHAT, has_light_tail

#: Effective size of pairs from which on a posterior is exact up to simulation error.
_EXACT_PAIRS = 1_000.0
#: k-hat up to which a posterior is reliable.
_HEAVIEST = 0.7
#: Values at which there are draws at least, so that it is known how even their weights are.
FEWEST_VALUES = 64
#: Error of log m, an sd over the hyperparameters in nats, up to which an approximate posterior is reliable; part of
#: the weight that may be where there is no fit.
MOST_ERROR, _MOST_LOST = 0.15, 0.01


@stored("nested.weights")
@dataclass(frozen=True)
class NestedChecks(PoolVerdict):
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
    #: By how much values from farther out move a mean, in its standard errors; 0 where it is by less than 0.05 sd.
    moved: float = 0.0
    #: Part of the weight that is where there is no fit.
    lost: float = 0.0
    #: Of log m where pairs are not weighted together, an sd over the hyperparameters in nats; 0 where they are.
    error: float = 0.0
    #: Whether log p is known to be concave in the latent variables, given the hyperparameters.
    is_concave: bool = True

    @property
    def is_joint(self) -> bool:
        """Whether hyperparameters and latent variables are weighted together."""
        return self.variance <= MOST_VARIANCE

    @property
    def claims_exact(self) -> bool:
        """Whether hyperparameters and latent variables are weighted together."""
        return self.is_joint

    @property
    def own(self) -> list[Condition]:
        """All that is asked of it; whether pairs are weighted together tells what."""
        joint = Condition("variance", self.variance, MOST_VARIANCE,
            "given the hyperparameters, log weights of the latent variables have a variance of "
            f"{self.variance:.2g}, above {MOST_VARIANCE:g}", Against.EXACT)  # fmt: skip
        wanted = size_asked(self.n_globals)
        found = [
            self._of_tail(_HEAVIEST),
            *few_draws("effective size", self.effective_size, wanted, "the effective size of the hyperparameters"),
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
            self._of_tail(MOST_KHAT, Against.EXACT, is_excused=has_light_tail(self.khat, self.n_values)),
            Condition("pairs", self.pair_size, _EXACT_PAIRS,
                f"the effective size of the draws is {self.pair_size:,.0f}, below {_EXACT_PAIRS:,.0f}",
                Against.SIZE, at_least=True),
            Condition("draws", min(self.n_draws / N_DRAWS, self.n_values / FEWEST_VALUES), 1.0, few,
                Against.SIZE, at_least=True),
            Condition("hyperparameters", self.n_globals, MOST_SURE,
                f"the proposal of {self.n_globals} hyperparameters was learned from its own draws: integrals are a "
                "little too small",
                Against.EXACT),
            # Draws of a Gaussian at one mode know nothing of another one: their weights are even all the same.
            Condition("concave", float(not self.is_concave), 0.5,
                "given the hyperparameters, the latent variables may have other modes, where no Gaussian is",
                Against.EXACT),
        ]  # fmt: skip

    def _of_tail(self, most: float, against: Against = Against.RELIABLE, *, is_excused: bool = False) -> Condition:
        """Ask whether the tail of the weights is light enough: it may be heavy where nearly all of them are equal."""
        said = f"k-hat of the weights of the hyperparameters is {self.khat:.2f}, above {most}"
        return Condition("k-hat", self.khat, most, said, against, is_excused=is_excused)

    @property
    def efficiency(self) -> float:
        """Part of the pairs that is effective, by the weights of hyperparameters and those given these."""
        return self.effective_size / self.n_values * float(np.exp(-self.variance))

    @property
    def worth(self) -> float:
        """Effective number of values, or of pairs where these are fewer."""
        return min(self.effective_size, self.pair_size)

    @property
    def made(self) -> str:
        """What is sampled, and what is Gaussian."""
        n = self.n_globals
        return (
            f"Nested: {n} hyperparameter{'s'[: n != 1]} sampled (effective sample size {self.effective_size:,.0f}), "
            f"{self.n_local:,} latent variable{'s'[: self.n_local != 1]} drawn from Gaussians given these."
        )

    @property
    def details(self) -> str:
        """Effective size of pairs."""
        size = f"{self.pair_size:,.0f}" if np.isfinite(self.pair_size) else "unknown"
        return f" by weights of both (effective sample size {size})"
