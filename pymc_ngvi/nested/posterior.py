"""The nested posterior of a latent Gaussian model [1]_, with variational fits in the place of Laplace's method.

References
----------
.. [1] H. Rue, S. Martino and N. Chopin (2009). Approximate Bayesian inference for latent Gaussian models by using
   integrated nested Laplace approximations. Journal of the Royal Statistical Society: Series B 71(2).
   https://doi.org/10.1111/j.1467-9868.2008.00700.x
"""

import functools

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.importance import MOST_KHAT as HEAVIEST
from pymc_ngvi.core.messages import Reason, Refused, Unavailable, percent
from pymc_ngvi.core.sizes import AT_ONCE, HELD, N_PREDICTED
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, GaussianState, Indices
from pymc_ngvi.core.verdict import Against, Condition, PoolVerdict, few_draws
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.gaussian_over import GaussianOver, gaussian_over
from pymc_ngvi.density.rows_given import RowsGiven, latent_rows, ratios
from pymc_ngvi.families.sparse import Factors
from pymc_ngvi.marginal.integral import N_COMPARED
from pymc_ngvi.marginal.pooled import (
    MOST_KHAT,
    Pool,
    PoolState,
    effective_size_of,
    evenly_picked,
    has_light_tail,
)
from pymc_ngvi.marginal.sampler import (
    EFFECTIVE,
    FIRST,
    MOST,
    MOST_MOVED,
    MOST_SURE,
    MOST_VARIANCE,
    N_DRAWS,
    Hopeless,
    Sampler,
    size_asked,
    size_wanted,
)
from pymc_ngvi.marginal.trees import MOST_ERROR, pool_of
from pymc_ngvi.nested.inside import (
    MOST_IN_BATCH,
    OF_ROWS,
    Drawn,
    Exploration,
    LatentInside,
    LatentMarginal,
    Marginal,
    WeightedPairs,
)

# --- how far a nested posterior can be relied on: every condition, with its figure ---

#: Part of the weight that may be where there is no fit.
_MOST_LOST = 0.01


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
    def claims_exact(self) -> bool:
        """Whether hyperparameters and latent variables are weighted together."""
        return self.variance <= MOST_VARIANCE

    @property
    def own(self) -> list[Condition]:
        """All that is asked of it; whether pairs are weighted together tells what."""
        joint = Condition("variance", self.variance, MOST_VARIANCE,
            "given the hyperparameters, log weights of the latent variables have a variance of "
            f"{self.variance:.2g}, above {MOST_VARIANCE:g}", Against.EXACT)  # fmt: skip
        wanted = size_asked(self.n_globals)
        found = [
            self._of_tail(HEAVIEST),
            *few_draws("effective size", self.effective_size, wanted, "the effective size of the hyperparameters"),
            Condition("moved", self.moved, MOST_MOVED,
                f"hyperparameters from farther out change a mean by {self.moved:.1f} of its standard errors"),
            Condition("lost", self.lost, _MOST_LOST,
                f"the latent variables can't be fitted at {percent(self.lost)} of the hyperparameters"),
        ]  # fmt: skip
        if not self.claims_exact:
            said = f"the log marginal density of the hyperparameters is known to within {self.error:.2f} nats only"
            return [*found, Condition("log m", self.error, MOST_ERROR, said), joint]
        few = "there are too few draws to judge the weights of the latent variables"
        return [
            *found,
            self._of_tail(MOST_KHAT, Against.EXACT, is_excused=has_light_tail(self.khat, self.n_values)),
            Condition("pairs", self.pair_size, N_PREDICTED,
                f"the effective size of the draws is {self.pair_size:,.0f}, below {N_PREDICTED:,.0f}",
                Against.SIZE, at_least=True),
            Condition("draws", min(self.n_draws / N_DRAWS, self.n_values / FIRST), 1.0, few,
                Against.SIZE, at_least=True),
            Condition("hyperparameters", self.n_globals, MOST_SURE,
                f"the proposal of {self.n_globals} hyperparameters was learned from its own draws: integrals are a "
                "little too small",
                Against.EXACT),
            # Draws of a Gaussian at one mode know nothing of another one: their weights are even all the same.
            Condition("concave", float(not self.is_concave), 0.5,
                "given the hyperparameters, the latent variables may have other modes, which no Gaussian covers",
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
    def details(self) -> str:
        """Effective sizes of pairs, and of hyperparameters."""
        size = f"{self.pair_size:,.0f}" if np.isfinite(self.pair_size) else "unknown"
        return f" (effective sample size {size}; of the hyperparameters {self.effective_size:,.0f})"


# --- how long a nested posterior takes, from sizes alone ---

#: Fits on the way to the mode and about it, for each hyperparameter, and for each two of these; seconds beside all
#: fits.
_TO_MODE, _OF_EACH, _OF_EACH_TWO, _BESIDE = 30.0, 22.0, 0.5, 0.5
#: Part of the seconds of a value that it takes among many, in the mean.
_IN_BATCHES = 0.4
#: Seconds that values with draws may take all together, their number at least and at most.
_SECONDS_OF_VALUES, _FEWEST_VALUES = 10.0, 3 * FIRST
#: Seconds of any nested posterior, at least.
LEAST = 0.8
#: In batches: seconds of a fit, of a row in it whose function is quadratic, and of others; passes through the factor.
_PER_FIT_OF_MANY, _PER_QUADRATIC_ROW, _PER_ROW_OF_MANY, _PASSES = 5e-4, 5e-7, 2e-6, 3.0
#: In closed form: seconds of a value.
_PER_VALUE_IN_CLOSED_FORM = 2e-4


def nested_seconds(given: RowsGiven) -> float:
    """Return about how long a nested posterior takes."""
    p = len(given.outside)
    n_fits = _TO_MODE + _OF_EACH * p + _OF_EACH_TWO * p**2
    return _BESIDE + _IN_BATCHES * (n_fits + n_expected(given)) * seconds_of_value(given)


def n_expected(given: RowsGiven) -> float:
    """Return at how many hyperparameters latent variables are drawn, about."""
    wanted = size_wanted(len(given.outside), seconds_of_value(given))
    return min(wanted / EFFECTIVE, n_values_of(given))


def n_values_of(given: RowsGiven) -> int:
    """Return at how many hyperparameters latent variables are drawn at most: as many as a few seconds allow."""
    return int(np.clip(_SECONDS_OF_VALUES / seconds_of_value(given), _FEWEST_VALUES, MOST))


def seconds_of_value(given: RowsGiven) -> float:
    """Return the seconds of a value of log m, with draws."""
    if (over := gaussian_over(given)) is not None:
        of_rows = prices.PER_ROW_OF_VALUE * over.n_rows
        return _PER_VALUE_IN_CLOSED_FORM + of_rows + prices.OF_FACTOR * over.precisions.seconds
    per_row = _PER_QUADRATIC_ROW if given.is_quadratic else _PER_ROW_OF_MANY
    return _PER_FIT_OF_MANY + per_row * given.n_evaluations + _PASSES * given.precisions.seconds


# --- latent variables that are Gaussian given the hyperparameters: log m in closed form, and exact draws ---
# Each value of the hyperparameters takes a Cholesky factor and a solution, and nothing is iterated.


class GaussianMarginal(Marginal):
    """Evaluates log m, and draws; see `Marginal`."""

    def __init__(self, over: GaussianOver) -> None:
        self._over, self._precisions = over, over.precisions
        self._size = max(1, min(AT_ONCE // self._precisions.fronts.n_fronts, OF_ROWS // over.n_rows, MOST_IN_BATCH))
        self.n_dim = self.n_inside = len(over.x)
        self.n_fits = 0

    def __call__(self, g: Array) -> Array:
        """Return log m at some values, (n,) from (n, p), -inf where there is no fit."""
        result = np.full(len(g), -np.inf)
        for which, _, _, log_m in self._fits(g):
            result[which] = log_m
        return result

    def begin_draws(self, top: Array, scale: Array) -> None:
        """Do nothing: nothing is known that draws begin from."""

    def drawn(self, g: Array, base: Array, rng: np.random.Generator) -> Iterator[Drawn]:
        """Yield the Gaussians at values of the hyperparameters, and draws; see `Marginal`."""
        for which, mean, factors, log_m in self._fits(g):
            x = mean[:, :, None] + factors.solve(base[which], transposed=True)
            log_mixed = np.zeros((len(which), base.shape[2]))
            yield which, log_m, x, log_m[:, None] + log_mixed, log_mixed

    def _fits(self, g: Array) -> Iterator[tuple[Indices, Array, Factors, Array]]:
        """Yield where there are Gaussians, their means, (n, n_dim), the factors of their precisions, and log m."""
        for start in range(0, len(g), self._size):
            part = g[start : start + self._size]
            self.n_fits += len(part)
            grad, precision = self._over.at(part)
            there = np.isfinite(grad).all(axis=1) & np.isfinite(precision).all(axis=1)
            if not there.any():
                continue
            factors, ok = self._precisions.factored(precision[there])
            if factors is None:
                continue
            which = np.flatnonzero(there)[ok]
            mean = self._over.x + factors.times_covariance(grad[which])
            # The ELBO of the Gaussian: its entropy, and the mean of log p, which falls from the mode by d / 2.
            value = self._over.logp(part[which], mean[:, None])[:, 0] + factors.entropy - 0.5 * self.n_dim
            known = np.flatnonzero(np.isfinite(value))
            yield start + which[known], mean[known], factors[known], value[known]


# --- latent variables given hyperparameters: draws that are kept, each with a weight ---


@stored("nested.state")
@dataclass(frozen=True, eq=False)
class Latents(PoolState):
    """What is left given hyperparameters: the latent variables of weighted pairs."""

    pairs: WeightedPairs
    checks: NestedChecks
    globals_: Indices
    locals_: Indices
    gaussian: Any

    kind = "nested"
    is_nested = True

    @functools.cached_property
    def pool(self) -> Pool:  # type: ignore[override]
        """The hyperparameters, with weights of their own."""
        return pool_of(self.pairs.g, self.pairs.log_marginal, self.pairs.log_density)

    # --- files ---

    def content(self) -> dict[str, Any]:
        """Return what a file keeps."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> Self:
        """Return the posterior on a model."""
        for name, kind in {"pairs": WeightedPairs, "checks": NestedChecks}.items():
            if not isinstance(content[name], kind):
                raise ValueError(f"what the nested posterior has as {name!r} is something else")
        globals_, locals_, gaussian = content["globals_"], content["locals_"], content["gaussian"]
        fits = np.array_equal(np.sort(np.concatenate([globals_, locals_])), np.arange(density.n_dim))
        if not fits or gaussian.n_dim != density.n_dim:
            raise ValueError("the nested posterior is of another dimension")
        content["pairs"].check(len(globals_), len(locals_))
        return cls(**content)

    # --- weights ---

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return self.pairs.weights, self.pairs.khat

    def size_of_all(self, of_globals: float) -> float:
        """Return that of the pairs."""
        return self.pairs.effective_size

    def correction(self) -> tuple[float, float]:
        """Return the error of log m."""
        return 0.0, self.checks.error

    # --- draws and moments ---

    def pick(self, pool: Pool, order: Indices, uniform: list[Array]) -> tuple[Indices, Array]:
        """Return values of the hyperparameters, and draws there; they are in order as they are, by neighbours."""
        first, second = self.pairs.pick(uniform[0])
        return first, self.pairs.latents[first, second]

    def all_of(self, pool: Pool, rng: np.random.Generator) -> tuple[Indices, Array, Array]:
        """Return the pairs."""
        weights = self.pairs.of_pairs
        first, second = np.nonzero(weights)
        return first, self.pairs.latents[first, second], np.log(weights[first, second])

    def moments_of_others(self, mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of the latent variables."""
        return self.pairs.moments()

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates: correlations are those of the pairs."""
        place = np.empty(self.n_dim, dtype=np.intp)
        place[self.globals_] = np.arange(len(self.globals_))
        place[self.locals_] = np.arange(len(self.locals_))
        is_local, weights = np.isin(index, self.locals_), self.pairs.of_pairs.ravel()
        values = np.empty((len(weights), len(index)))
        g = self.pairs.g[:, place[index[~is_local]]]
        values[:, ~is_local] = np.repeat(g, len(weights) // len(g), axis=0)
        values[:, is_local] = self.pairs.latents[:, :, place[index[is_local]]].reshape(len(weights), -1)
        values -= weights @ values
        cov: Array = (weights[:, None] * values).T @ values
        scale = self.sd()[index] / np.sqrt(np.diag(cov))
        return scale[:, None] * cov * scale


# --- the nested posterior of a latent Gaussian model [1]_, with variational fits in the place of Laplace's method ---

#: Standard deviations of hyperparameters to begin with; those of a Gaussian fit times this, within limits.
_SCALE, _OF_FIT, _LEAST, _MOST = 0.5, 2.0, 0.05, 1.0
#: Part of the weight from which on fits of latent variables have left a mode.
_LEFT = 0.5
#: Draws of the latent variables at each value, at least.
_FEWEST_DRAWS = 2
#: Nats that an integral over many hyperparameters may be too small by: it was 0.05 to 0.3 of 24 to 40.
_UNSURE = 0.2


def latent_rows_of(density: ModelDensity) -> RowsGiven:
    """Return log p as rows, hyperparameters given; raise Unavailable where that is no latent Gaussian model."""
    if not isinstance(density, LogDensity):
        raise Unavailable(Reason.IN_PART, f"the data are in {'shards' if density.is_sharded else 'batches'}")
    try:
        return latent_rows(density)
    except Refused as reason:
        raise Unavailable(reason.code, f"no latent Gaussian model: {reason}") from None


def nested_posterior(
    density: ModelDensity,
    gaussian: GaussianState | None,
    seed: int,
    most_variance: float = np.inf,
    others: Sequence[GaussianState] = (),
    *,
    of_other_data: bool = False,
) -> PoolState:
    """Return the nested posterior, of several modes where there are Gaussians at others.

    It begins from a Gaussian of all coordinates, if there is one, which may be that of other data.
    """
    given = latent_rows_of(density)
    between = ratios(density, given.outside) if isinstance(density, LogDensity) else []
    marginals, parts, homes = list[Marginal](), list[Exploration](), list[GaussianState]()
    try:
        for home in (gaussian, *others):
            n_fits = sum(marginal.n_fits for marginal in marginals)
            start = density.initial_point() if home is None else home.mean()
            try:
                marginal, part = _sampled(
                    given, start, home, seed, most_variance, between, 1 + len(others), n_fits, of_other_data
                )
            except Hopeless as reason:
                if home is gaussian:
                    given.is_uneven = given.is_uneven or reason.code is Reason.NOT_PASSED
                    raise
                continue  # if it has much of the mass, it is told that the posterior leaves it out
            marginals.append(marginal)
            parts.append(part)
            homes += [] if home is None else [home]
    except np.linalg.LinAlgError:
        raise Unavailable(Reason.SINGULAR, "a covariance of the hyperparameters is singular") from None
    return _state(given, marginals, _joined(parts, homes, given), gaussian)


def _sampled(
    given: RowsGiven,
    start: Array,
    home: GaussianState | None,
    seed: int,
    most_variance: float,
    between: list[tuple[int, int]],
    n_modes: int,
    n_fits: int,
    of_other_data: bool,
) -> tuple[Marginal, Exploration]:
    """Sample the hyperparameters, in closed form where that holds, as far as is seen, where the posterior is."""
    scale = np.full(len(given.outside), _SCALE)
    if home is not None:
        scale = np.clip(_OF_FIT * home.sd()[given.outside], _LEAST, _MOST)
    n_dim, first = max(given.n_dim, 1), start[given.outside]
    n_draws = min(N_DRAWS, max(_FEWEST_DRAWS, HELD // n_dim // FIRST))
    each = seconds_of_value(given)
    wanted = 0.0 if of_other_data else size_wanted(len(given.outside), each)
    most = min(n_values_of(given) // n_modes, max(FIRST, HELD // n_dim // n_draws))

    def sample(marginal: Marginal) -> Exploration:
        inside = LatentInside(marginal, first, between, most_variance, n_expected(given), n_fits)
        at, cov = inside.bend.forward(first[None])[0], None
        if of_other_data and home is not None:  # whose covariance is nearly that at the mode
            cov = inside.bend.normal(first, home.cov_block(given.outside))[1]
        sampler = Sampler(
            inside, at, scale, seed,
            wanted=wanted, most=most, n_draws=n_draws, cov=cov,
            is_at_mode=False, seconds=each,
        )  # fmt: skip
        draws = sampler.run()
        return Exploration(inside.weighted(draws), draws.lost, draws.moved)

    if (over := gaussian_over(given)) is not None:
        exact = GaussianMarginal(over)
        explored = sample(exact)
        if over.agrees(explored.pairs.g[evenly_picked(explored.pairs.weights, N_COMPARED, 0.5)]):
            return exact, explored
    marginal = LatentMarginal(given, seed, home if n_modes > 1 else None)
    return marginal, sample(marginal)


def _joined(parts: list[Exploration], homes: list[GaussianState], given: RowsGiven) -> Exploration:
    """Return what is known of several modes, each having the draws that its Gaussian explains best.

    Where fits of the latent variables leave a mode, it is left out.
    """
    if len(parts) == 1:
        return parts[0]
    points = []
    for part in parts:
        g, latents = part.pairs.g, part.pairs.latents
        theta = np.empty((*latents.shape[:2], len(given.outside) + len(given.inside)))
        theta[:, :, given.outside], theta[:, :, given.inside] = g[:, None], latents
        points.append(theta)
    while len(parts) > 1:
        own = [
            np.reshape(np.argmax([home.log_density(flat) for home in homes], axis=0), theta.shape[:2]) == number
            for number, theta in enumerate(points)
            for flat in [theta.reshape(-1, theta.shape[2])]
        ]
        lost = [part.pairs.lost(of) for part, of in zip(parts, own, strict=True)]
        if lost[worst := int(np.argmax(lost))] > _LEFT:
            del parts[worst], homes[worst], points[worst]
            continue
        pairs = WeightedPairs.of_modes([part.pairs for part in parts], own)
        return Exploration(pairs, max(*lost, *(part.lost for part in parts)), max(part.moved for part in parts))
    return parts[0]


def _state(
    given: RowsGiven, marginals: Sequence[Marginal], explored: Exploration, gaussian: GaussianState | None
) -> PoolState:
    pairs, is_unsure = explored.pairs, len(given.outside) > MOST_SURE
    n_values, n_draws = pairs.log_ratio.shape
    checks = NestedChecks(
        khat=pairs.khat,
        effective_size=effective_size_of(pairs.weights),
        n_values=n_values,
        n_draws=n_draws,
        pair_size=pairs.effective_size,
        variance=pairs.variance,
        n_globals=len(given.outside),
        n_local=len(given.inside),
        n_fits=sum(marginal.n_fits for marginal in marginals),
        moved=explored.moved,
        lost=explored.lost,
        error=max(marginal.doubt() for marginal in marginals) if not pairs.is_joint else _UNSURE * is_unsure,
        lacking=pairs.lacking,
        is_concave=given.is_concave or isinstance(marginals[0], GaussianMarginal),
    )
    return Latents(pairs, checks, given.outside, given.inside, gaussian)
