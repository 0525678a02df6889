"""Whether draws of the globals and of the local coordinates can be called exact: every condition, with its figure."""

from dataclasses import dataclass

from pymc_ngvi.core.messages import percent
from pymc_ngvi.core.psis import khat_error
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.verdict import Condition, PoolVerdict, few_draws, heavy_tail
from pymc_ngvi.marginal.sampler import GOOD, MOST_MOVED, size_asked
from pymc_ngvi.marginal.sampling import LEAST_TAIL, has_light_tail
from pymc_ngvi.marginal.sampling import MOST_KHAT as MOST_KHAT

#: Relative error of a standard deviation from which on it is said, and at most.
SAID_ERROR, MOST_ERROR = 0.05, 0.15
#: Change of log m, an sd over the globals in nats, that more nodes may bring: a mean moves by as many sds at most.
MOST_RULE_ERROR = 0.05
#: Effective size from which on tails of more draws need not be larger.
_LARGE = 2_000.0
#: Part of the weight where there is no integral: three sds out, it moves an sd by 2 %; error of a mean of effects, in
#: sds, and of an sd, as a part, and the part of the mass of some effects that may be at another mode.
MOST_LOST, MOST_SHORT = 0.005, 0.03


@stored("exact.checks")
@dataclass(frozen=True)
class Checks(PoolVerdict):
    """What was measured of an exact posterior.

    Parameters
    ----------
    khat : float
        Of the weights of the globals.
    effective_size : float
        Of these weights, in draws.
    n_draws, n_globals, n_local : int
        Of the pool; coordinates.
    n_nodes : int
        Of the reference rule in each local coordinate; 0 where there are none.
    rule_error : float
        Change of log m that the next larger rule brings, an sd over the globals in nats.
    lost : float
        Part of the weight on draws whose quadrature nodes were not about the right centres, going by draws near them.
    elsewhere : float
        Largest part of the mass of a tree that is at another mode than its quadrature nodes, given the globals.
    effects : float
        Largest error of a mean of a local coordinate, in sds, or of an sd, as a part, that few candidates bring.
    sd_error : float
        Largest relative error of a standard deviation of the globals, from the weights.
    tail : float
        Effective size of the draws beyond a 5 or 95 % limit, the least of any of the globals.
    missed : float
        By how much draws from farther out move a mean or a standard deviation of the globals, in its errors; 0 where
        it is by less than 0.05 standard deviations, or 5 %.
    beyond : float
        Part of a variance of the globals that is farther out than all draws.
    found, open, cure, is_tested, n_fits, lacking, n_modes
        As of `Verdict`.
    """

    khat: float
    effective_size: float
    n_draws: int
    n_globals: int
    n_local: int
    n_nodes: int = 0
    rule_error: float = 0.0
    lost: float = 0.0
    elsewhere: float = 0.0
    effects: float = 0.0
    sd_error: float = 0.0
    tail: float = float("inf")
    missed: float = 0.0
    beyond: float = 0.0

    @property
    def own(self) -> list[Condition]:
        """All that is asked of it."""
        size, sd_error, lost = self.effective_size, 100 * self.sd_error, 100 * self.lost
        khat = f"{self.khat:.2f} +- {khat_error(self.khat, self.n_draws):.2f}"
        is_light = has_light_tail(self.khat, self.n_draws)
        least_size = size_asked(self.n_globals)
        return [
            Condition("k-hat", self.khat, MOST_KHAT,
                f"k-hat of the weights of the global parameters is {khat}, above {MOST_KHAT}", is_excused=is_light),
            *few_draws("effective size", size, least_size, "the effective size of the draws"),
            Condition("efficiency", self.efficiency, GOOD,
                f"only {percent(self.efficiency)} of the draws are effective: proposals are not near to the "
                "posterior, and weights don't tell what they miss", at_least=True),
            Condition("sd", self.sd_error, MOST_ERROR,
                f"a standard deviation of the global parameters is known to {sd_error:.0f} % only, from the weights "
                "of a thin tail"),
            Condition("tail", self.tail, LEAST_TAIL * min(size, _LARGE),
                f"a limit of the global parameters rests on an effective size of {self.tail:.0f} draws beyond it, "
                f"below {LEAST_TAIL * min(size, _LARGE):.0f}", at_least=True),
            Condition("missed", self.missed, MOST_MOVED,
                "draws far out have weight, and move means or standard deviations of the global parameters: some of "
                "the posterior has been missed"),
            heavy_tail(self.beyond),
            Condition("rule", self.rule_error, MOST_RULE_ERROR,
                f"the quadrature has not settled with {self.n_nodes} nodes (log marginal density changes by "
                f"{self.rule_error:.2f} nats with more)"),
            Condition("lost", self.lost, MOST_LOST,
                f"{lost:.1f} % of the draws have quadrature nodes off their centres"),
            Condition("modes", self.elsewhere, MOST_SHORT,
                f"given the global parameters, a group effect has {percent(self.elsewhere)} of its mass at another "
                "mode, where there are no quadrature nodes"),
            Condition("effects", self.effects, MOST_SHORT,
                f"a mean or a standard deviation of draws of one group effect is {100 * self.effects:.0f} % off"),
        ]  # fmt: skip

    @property
    def details(self) -> str:
        """Effective size, and modes."""
        thin = f"; a standard deviation is known to {100 * self.sd_error:.0f} % only"
        modes = "mode that was" if self.n_modes == 1 else f"{self.n_modes} modes that were"
        said = thin if self.sd_error > SAID_ERROR else ""
        return f" (effective sample size {self.effective_size:,.0f}{said}), of the {modes} found"
