"""Draws of an approximate posterior, weighted or not: as traces of PyMC, as trees of xarray, and as moments."""

import logging
import math
import warnings

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray
from pymc.backends.base import MultiTrace
from pymc.step_methods.hmc import quadpotential
from pymc.variational.opvi import VIState

from pymc_ngvi.core.draws import chunks
from pymc_ngvi.core.messages import OURS, checked_names
from pymc_ngvi.core.prices import rounded_up
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, Weights, khat_limit, weigh
from pymc_ngvi.core.sizes import (
    END,
    MAX_DENSE_DIM,
    N_REWEIGHTED,
    N_SHOWN,
    N_WEIGHED,
    Seed,
    check_chains,
    check_cov_size,
    check_draws,
    generator_of,
    seed_of,
)
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import of_batches, quoted
from pymc_ngvi.density.observed_rows import ObservedLogp, observed_logp
from pymc_ngvi.moves.draws import MovedDraws
from pymc_ngvi.results.diagnosis.diagnosis import Kept
from pymc_ngvi.results.distributions import (
    Posterior,
    axes_of,
    constrained_dataset,
    flat_dataset,
    indices_of,
    labelled,
    to_datatree,
    to_multitrace,
)

# --- weighted means and standard deviations with their Monte Carlo errors, from sums that draws are added to ---

#: Powers of the values that are summed: those of a squared variance.
_N_POWERS = 5


@dataclass(frozen=True, eq=False)
class Moment:
    """A mean, or a standard deviation, with and without weights; all arrays have the shape of one draw."""

    #: With weights, and its Monte Carlo standard error.
    corrected: Array
    se: Array
    #: Of the same draws, equally weighted.
    uncorrected: Array
    #: Standard error of the difference: the two have most of their noise in common.
    change_se: Array

    @property
    def change(self) -> Array:
        """What the weights change."""
        return self.corrected - self.uncorrected


class MomentSums:
    """Sums over draws of ``weight^j (value - centre)^k``, from which moments and their errors follow.

    Errors are those of the delta method: a weighted mean of f moves with each draw by w (f - mean), since the weights
    are normalised by their sum.
    """

    def __init__(self, n_draws: int) -> None:
        self._n_draws = n_draws
        self._centre: Array | None = None
        self._sums: Array = np.zeros(0)

    def add(self, values: Array, weights: Array) -> None:
        """Add draws, (n, ...), with their weights, (n,), which sum to 1 over all draws."""
        values = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(values.reshape(len(values), -1)).any(axis=1)  # draws that q could not make
        values, weights = values[known], weights[known]
        if self._centre is None:
            if not len(values):
                return
            self._centre = values.mean(axis=0)
            self._sums = np.zeros((3, _N_POWERS, *values.shape[1:]))
        with np.errstate(all="ignore"):  # values may overflow on the constrained scale
            powers = np.ones_like(values)
            by_power = np.stack([np.ones(len(weights)), weights, weights**2])
            for k in range(_N_POWERS):
                self._sums[:, k] += np.tensordot(by_power, powers, axes=1)
                powers = powers * (values - self._centre)

    def result(self) -> dict[str, Moment]:
        """Return mean and standard deviation of all that was added."""
        with np.errstate(all="ignore"):
            moments, moved = [], []
            for _, mean, square, *_ in (self._sums[1], self._sums[0] / self._sums[0, 0]):
                var = np.maximum(square - mean**2, 0.0)
                sd, one = np.sqrt(var), np.ones_like(mean)
                moments.append((mean + self._centre, sd))
                # What one draw moves, as polynomials in its value: f - mean, and (f - mean)^2 - var over 2 sd.
                of_mean = np.stack([-mean, one])
                moved.append((of_mean, np.stack([mean**2 - var, -2.0 * mean, one]) / (2.0 * sd)))
            (weighted, plain), (of_weighted, of_plain) = moments, moved
            return {
                name: Moment(weighted[k], *self._errors(of_weighted[k], of_plain[k], plain[k]))
                for k, name in enumerate(("mean", "sd"))
            }

    def _errors(self, moved: Array, plain_moved: Array, plain: Array) -> tuple[Array, Array, Array]:
        """Return the standard error with weights, the moment without them, and the error of the difference."""
        n = self._n_draws
        square = self._product(2, moved, moved)
        of_change = (
            square - 2.0 / n * self._product(1, moved, plain_moved) + self._product(0, plain_moved, plain_moved) / n**2
        )
        return np.sqrt(np.maximum(square, 0.0)), plain, np.sqrt(np.maximum(of_change, 0.0))

    def _product(self, power: int, left: Array, right: Array) -> Array:
        """Return the sum over draws of weight^power times two polynomials in the centred value."""
        sums = self._sums[power][np.add.outer(range(len(left)), range(len(right)))]
        return np.einsum("i...,j...,ij...->...", left, right, sums)


# --- draws without weights from draws with weights, none of them twice ---


def without_replacement(weights: Array, n: int, rng: np.random.Generator) -> tuple[NDArray[np.intp], float]:
    """Choose draws with probabilities in proportion to their weights, by systematic sampling [1]_.

    The probability that a draw is among the ``n`` is ``n`` times its weight, exactly, so that plain means over them
    have the weighted mean as their expectation. Where that would exceed 1 the draw is taken for certain, and the rest
    of its weight is left out: with a pool several times larger than ``n`` this is little.

    References
    ----------
    .. [1] Madow (1949). On the theory of systematic sampling, II. Annals of Mathematical Statistics 20(3).
       https://doi.org/10.1214/aoms/1177729988
    """
    order = rng.permutation(np.flatnonzero(weights > 0.0))
    if len(order) < n:
        raise ValueError(f"{n:,} different draws were asked for, and {len(order):,} have any weight: take fewer.")
    chances = _inclusion(weights[order], n)
    certain = chances >= 1.0
    others, chances = order[~certain], chances[~certain]
    rest = n - int(certain.sum())
    chosen = order[certain]
    if rest:
        ends = np.cumsum(chances)
        ends *= rest / ends[-1]  # rounding: the last end has to be above the last point
        taken = np.searchsorted(ends, rng.random() + np.arange(rest), side="right")
        chosen = np.concatenate([chosen, others[taken]])
    return rng.permutation(chosen), float(np.maximum(weights - 1.0 / n, 0.0).sum())


def _inclusion(weights: Array, n: int) -> Array:
    """Return probabilities that add up to n: in proportion to the weights, but 1 where they would exceed it."""
    largest = np.sort(weights)[::-1]
    rest = np.cumsum(largest[::-1])[::-1]  # the sum from each on
    # The first that need not be certain when all larger ones are.
    n_certain = int(np.argmax((n - np.arange(len(largest))) * largest <= rest * (1.0 + 1e-12)))
    return np.minimum(weights * ((n - n_certain) / rest[n_certain]), 1.0)


# --- pareto-smoothed importance weights [1]_, and what they correct set against their own Monte Carlo error ---
# References
# ----------
# .. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
#    https://doi.org/10.48550/arXiv.1507.02646

#: Part of the draws that weights are worth which leave nothing to correct, whatever the shape of their tail.
_NOTHING_TO_CORRECT = 0.99
#: More draws than these are not proposed to anybody.
_MOST_DRAWS = 1_000_000


def weighed(log_p: Array, log_q: Array) -> tuple[Array, Weights]:
    """Return smoothed log weights of draws of q, normalised, -inf where p is 0, and what they say of q."""
    if len(log_p) < MIN_KHAT_DRAWS:
        raise ValueError(f"Importance weights need at least {MIN_KHAT_DRAWS} draws; got {len(log_p)}.")
    ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
    finite = np.isfinite(ratio)
    if np.any(ratio == np.inf) or not finite.any():
        what = "infinite at some" if finite.any() else "finite at none"
        raise ValueError(f"log p is {what} of {len(ratio):,} draws of q: weights p/q can't correct it.")
    return weigh(log_p, log_q)


def check_help(found: Weights, per_draw: int = 1) -> None:
    """Raise ValueError where k-hat says that weights can't help."""
    if found.verdict().helps or found.effective > _NOTHING_TO_CORRECT * found.n_draws:
        return
    more = ""
    if found.khat < khat_limit(_MOST_DRAWS):
        needed = math.ceil(10.0 ** (1.0 / (1.0 - found.khat)) / per_draw)
        more = f"Take {rounded_up(max(needed, N_SHOWN)):,.0f} draws or more, if it stays so; or "
    advice = f"{more}fit a richer family (family='mixture', 'student_t'), reparametrise, or use pm.sample."
    raise ValueError(
        f"Pareto k-hat is {found.khat:.2f}, and {found.n_draws:,} draws of q allow for {khat_limit(found.n_draws):.2f} "
        f"at most: importance weights can't correct what q misses. {advice[0].upper()}{advice[1:]} "
        "Without importance weights, q is drawn from as it is."
    )


@dataclass(frozen=True)
class Correction:
    """What weights change, against the error that they bring.

    Both are root mean squares over means and standard deviations of all unconstrained coordinates, in posterior
    standard deviations.
    """

    #: Of the correction, its own noise taken out; 0 where it is not told from noise.
    size: float
    #: Monte Carlo error of the corrected moments.
    error: float
    #: Of the weights.
    khat: float
    effective_sample_size: float
    #: Of q.
    n_draws: int

    @classmethod
    def of(cls, weights: Weights, sums: MomentSums) -> "Correction":
        """Judge by the moments of the unconstrained coordinates."""
        found = sums.result()
        scale = found["sd"].corrected
        with np.errstate(all="ignore"):
            square = np.mean([(m.change**2 - m.change_se**2) / scale**2 for m in found.values()])
            error = np.mean([(m.se / scale) ** 2 for m in found.values()])
        size = math.sqrt(max(float(square), 0.0))
        return cls(size, math.sqrt(float(error)), weights.khat, weights.effective, weights.n_draws)

    @property
    def helps(self) -> bool:
        """Whether the weights correct more than their error is."""
        return self.size > self.error

    def attrs(self) -> dict[str, float | str]:
        """Return the figures as attributes of a Dataset."""
        return {
            "khat": self.khat,
            "effective_sample_size": self.effective_sample_size,
            "correction_size": self.size,
            "correction_error": self.error,
            "correction": self.sentence(),
        }

    def sentence(self, per_draw: int = 1) -> str:
        """Say what the weights change and with what error; ``per_draw``: draws of q for one that is asked for."""
        figures = (
            f"Importance weights change means and standard deviations by {self.size:.3f} posterior standard deviations "
            f"(root mean square), with a Monte Carlo error of {self.error:.3f} (effective sample size "
            f"{self.effective_sample_size:,.0f} of {self.n_draws:,} draws of q)"
        )
        if self.helps:
            return figures + "."
        if self.size == 0.0:
            return f"{figures}: they do not help. There is nothing to correct that so many draws could show."
        needed = 1.2 * self.n_draws * (self.error / self.size) ** 2 / per_draw
        cure = f"Take {rounded_up(needed):,.0f} draws, or none of it" if needed < _MOST_DRAWS else "Leave it out"
        return f"{figures}: they do not help. {cure}: the moments of q itself are nearer."


# --- draws of q weighted or resampled by importance, and moments that are corrected by their weights ---

#: Draws of q for each one that is resampled.
POOL = 10
#: Weight of the pool that resampling may leave out without a warning.
_LEFT_OUT = 0.03


class WeightedDraws(NamedTuple):
    """Draws, and what is known of them."""

    #: Unconstrained; shape (n_draws, n_dim).
    theta: Array
    #: Where it was evaluated; shape (n_draws,), or None.
    log_p: Array | None
    #: More for ``sample_stats``, (n_draws,) each.
    stats: dict[str, NDArray[np.generic]]
    #: For the groups ``posterior`` and ``sample_stats``.
    attrs: dict[str, Any]


def weighted_draws(posterior: Posterior, draws: int, importance: str | None, rng: np.random.Generator) -> WeightedDraws:
    """Return draws of q, or of q as corrected by importance weights."""
    if importance is None:
        return WeightedDraws(posterior.draw(draws, rng), None, {}, {})
    if importance not in ("psis", "psir"):
        raise ValueError(f"importance should be 'psis', 'psir' or None; got {importance!r}.")
    posterior.check_correctable(f"importance={importance!r}")
    posterior.check_weights()
    return (_smoothed if importance == "psis" else _resampled)(posterior, draws, rng)


def _smoothed(posterior: Posterior, draws: int, rng: np.random.Generator) -> WeightedDraws:
    theta = posterior.draw(draws, rng)
    log_p = posterior.density.logp(theta)
    log_weights, found = weighed(log_p, posterior.log_q(theta))
    check_help(found)
    sums = MomentSums(draws)
    sums.add(theta, np.exp(log_weights))
    correction = Correction.of(found, sums)
    _warn(correction)
    note = "draws of q, to be weighted by exp(log_weight) of sample_stats"
    return WeightedDraws(theta, log_p, {"log_weight": log_weights}, {"importance": note, **correction.attrs()})


def _resampled(posterior: Posterior, draws: int, rng: np.random.Generator) -> WeightedDraws:
    n_pool, seed = max(POOL * draws, N_WEIGHED), seed_of(rng)
    weights, found = _weights(posterior, n_pool, seed)
    check_help(found, POOL)
    correction = Correction.of(found, _sums(posterior, weights, seed)["theta"])
    _warn(correction, POOL)
    chosen, left_out = without_replacement(weights, draws, rng)
    if left_out > _LEFT_OUT:
        warnings.warn(
            f"{left_out:.0%} of the weight of {n_pool:,} draws of q is left out, since {draws:,} different draws "
            "can't carry it: tails are too short. Take fewer draws, or importance='psis'.",
            UserWarning,
            skip_file_prefixes=OURS,
        )
    theta, start = np.empty((draws, posterior.layout.n_dim)), 0
    for pool in _pool(posterior, n_pool, seed):
        here = (chosen >= start) & (chosen < start + len(pool))
        theta[here] = pool[chosen[here] - start]
        start += len(pool)
    note = f"resampled without replacement from {n_pool:,} draws of q: equally weighted"
    attrs = {"importance": note, "pool_draws": n_pool, "weight_left_out": left_out, **correction.attrs()}
    return WeightedDraws(theta, None, {}, attrs)


def _pool(posterior: Posterior, draws: int, seed: int) -> Iterator[Array]:
    """Yield draws of q in chunks: the same ones whenever it is gone through, so that they need not be kept."""
    for i, size in enumerate(chunks(draws, posterior.layout.n_dim)):
        yield posterior.distribution.draw(size, np.random.default_rng([seed, i]))


def _weights(posterior: Posterior, draws: int, seed: int) -> tuple[Array, Weights]:
    pairs = [(posterior.density.logp(theta), posterior.log_q(theta)) for theta in _pool(posterior, draws, seed)]
    log_p, log_q = (np.concatenate(of) for of in zip(*pairs, strict=True))
    log_weights, found = weighed(log_p, log_q)
    return np.exp(log_weights), found


def _sums(posterior: Posterior, weights: Array, seed: int, names: Sequence[str] = ()) -> dict[str, MomentSums]:
    """Return the sums over a pool for the unconstrained coordinates, "theta", and for variables by name."""
    sums = {name: MomentSums(len(weights)) for name in ("theta", *names)}
    start = 0
    for theta in _pool(posterior, len(weights), seed):
        now = weights[start : start + len(theta)]
        values = posterior.constrain(theta, random_seed=(seed + start) % END) if names else {}
        for name, total in sums.items():
            total.add(theta if name == "theta" else values[name], now)
        start += len(theta)
    return sums


def corrected_moments(
    posterior: Posterior, draws: int, rng: np.random.Generator, *, transformed: bool = False
) -> xr.Dataset:
    """Return means and standard deviations corrected by importance weights, beside those of q."""
    posterior.check_correctable("corrected()")
    posterior.check_weights()
    seed, model = seed_of(rng), posterior.model
    weights, found = _weights(posterior, draws, seed)
    check_help(found)
    shown = [rv.name for rv in model.free_RVs] + [d.name for d in posterior.density.deterministics]
    if transformed:
        shown += [v.value_name for v in posterior.layout.variables if v.value_name not in shown]
    sums = _sums(posterior, weights, seed, shown)
    correction = Correction.of(found, sums.pop("theta"))
    _warn(correction)
    moments = {name: total.result() for name, total in sums.items()}
    return _by_estimate(model, moments).assign_attrs(correction.attrs())


def _by_estimate(model: pm.Model, moments: dict[str, dict[str, Moment]]) -> xr.Dataset:
    """Return moments as a Dataset with dims ``moment`` and ``estimate`` before those of each variable."""
    estimates = ["corrected", "se", "uncorrected"]
    tables = [
        [
            constrained_dataset(model, {name: getattr(of[moment], field) for name, of in moments.items()})
            for field in estimates
        ]
        for moment in ("mean", "sd")
    ]
    taken = set(moments) | {str(dim) for dim in tables[0][0].dims}
    first, second = (f"q_{name}" if name in taken else name for name in ("moment", "estimate"))
    rows = [xr.concat(row, dim=second).assign_coords({second: estimates}) for row in tables]
    return xr.concat(rows, dim=first).assign_coords({first: ["mean", "sd"]})


def _warn(correction: Correction, per_draw: int = 1) -> None:
    if not correction.helps:
        warnings.warn(correction.sentence(per_draw), UserWarning, skip_file_prefixes=OURS)


# --- moments of an approximate posterior by variable: covariances, and what PyMC calls its state ---

#: Seed of draws behind what is not to change by itself: covariances, constrained standard deviations, cards.
FIXED_SEED = 20_240_607


def covariance_of(posterior: Posterior, names: str | Sequence[str], *, constrained: bool) -> xr.DataArray:
    """Return the covariance of some variables; see `NGVIApproximation.cov_of`."""
    wanted, layout = [names] if isinstance(names, str) else list(names), posterior.layout
    derived = {d.name for d in posterior.density.deterministics}
    of_draws = derived & set(wanted)
    index = indices_of(layout, [name for name in wanted if name not in of_draws], derived)
    if of_draws or constrained:
        scaled = derived | ({v.name for v in layout.variables} if constrained else set())
        return _covariance_of_draws(posterior, wanted, scaled)
    return labelled([layout.label(int(i)) for i in index], posterior.distribution.cov_block(index))


def _covariance_of_draws(posterior: Posterior, wanted: list[str], scaled: set[str]) -> xr.DataArray:
    """Return the covariance of variables of any kind, from draws."""
    layout = posterior.layout
    constrainer = Constrainer.of(posterior.density, names=frozenset(wanted) & scaled)
    theta = posterior.distribution.draw_matched(N_WEIGHED, np.random.default_rng(FIXED_SEED))
    values = constrainer(theta)
    columns, labels = [], []
    for name in wanted:
        if name in scaled:
            shape = values[name].shape[1:]
            columns.append(values[name].reshape(len(theta), -1))
            labels += [name + (f"[{','.join(map(str, at))}]" if at else "") for at in np.ndindex(shape)]
        else:
            index = indices_of(layout, name)
            columns.append(theta[:, index])
            labels += [layout.label(int(k)) for k in index]
    table = np.concatenate(columns, axis=1, dtype=np.float64)
    table = table[np.isfinite(table).all(axis=1)]
    table -= table.mean(axis=0)
    return labelled(labels, table.T @ table / len(table), "variable")


def constrained_state(posterior: Posterior) -> VIState:
    """Return constrained means and standard deviations; see `NGVIApproximation.state`."""
    q, layout, model = posterior.distribution, posterior.layout, posterior.model
    constrainer, rng = Constrainer.of(posterior.density, deterministics=False), np.random.default_rng(FIXED_SEED)
    names = [rv.name for rv in model.free_RVs]
    values, sums = constrainer(q.mean()[None]), {name: MomentSums(N_REWEIGHTED) for name in names}
    for size in chunks(N_REWEIGHTED, layout.n_dim):
        draws = constrainer(posterior.draw(size, rng))
        for name in names:
            sums[name].add(draws[name], np.full(size, 1.0 / N_REWEIGHTED))
    unconstrained_sd, unbiased = layout.unflatten(q.sd()), np.sqrt(N_REWEIGHTED / (N_REWEIGHTED - 1.0))
    sd = {name: unbiased * of.result()["sd"].uncorrected for name, of in sums.items()}
    sd |= {name: unconstrained_sd[name] for name in names if name in unconstrained_sd}
    mean_set = constrained_dataset(model, {n: values[n][0] for n in names})
    sd_set = constrained_dataset(model, sd)
    if posterior.include_transformed:
        mean_set = mean_set.merge(flat_dataset(layout, q.mean()), compat="override")
        sd_set = sd_set.merge(flat_dataset(layout, q.sd()), compat="override")
    return VIState(mean=mean_set, std=sd_set)


# --- draws of an approximate posterior as traces of PyMC and trees of xarray ---

logger = logging.getLogger("pymc.ngvi")

#: Names of variables, or one of them; None for all.
type Names = str | Sequence[str] | None


@dataclass(frozen=True)
class Sampling:
    """Options of `NGVIApproximation.sample`, which documents them.

    With ``of_batches=False``, Deterministics that read ``pm.Minibatch`` data are there by name only.
    """

    chains: int = 1
    var_names: Names = None
    importance: str | None = None
    include_transformed: bool | None = None
    log_p: bool = False
    of_batches: bool = True

    def transformed(self, posterior: Posterior) -> bool:
        """Whether to keep the unconstrained variables."""
        return posterior.include_transformed if self.include_transformed is None else self.include_transformed


_PLAIN = Sampling()
#: Groups of a tree that hold data.
_OF_ROWS = ("observed_data", "constant_data")
_ON_ALL_ROWS = "pm.sample_posterior_predictive has them, in a model of all rows or of new ones"


def sample_trace(
    posterior: Posterior,
    kept: Kept,
    draws: int,
    rng: np.random.Generator,
    how: Sampling,
) -> tuple[MultiTrace, dict[str, Any], Array]:
    """Return draws as a trace, what there is to say of them, and the same unconstrained."""
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    q = posterior.distribution
    constrain, names = _constrainer(posterior, kept, how)
    made = weighted_draws(posterior, check_draws(draws) * check_chains(how.chains), how.importance, rng)
    theta = made.theta
    seed, discrete = seed_of(rng), posterior.density.summed_out_shown
    values = constrain(theta, random_seed=seed)
    if discrete and (names is None or not names.isdisjoint(discrete)):  # that were summed out
        values |= posterior.density.discrete_given(values, seed)
        values = values if names is None else {name: value for name, value in values.items() if name in names}
    stats = dict(made.stats)
    if how.log_p and not posterior.changed_data():
        stats["log_p"] = posterior.density.logp(theta) if made.log_p is None else made.log_p
    of_draws, of_all = q.notes(theta, rng, how.log_p)
    stats, attrs = stats | of_draws, {**made.attrs, **of_all}
    if (effective := q.effective(len(theta))) < len(theta):
        repeat = attrs.get("distinct_global_draws", 0) < len(theta)
        logger.info(
            f"The effective sample size is {effective:,.0f}: "
            + (
                f"among {len(theta):,} draws, those of the global parameters repeat (distinct_global_draws in the "
                "attributes says how many different ones there are)."
                if repeat
                else f"{len(theta):,} draws are taken from chains, in which successive ones are correlated."
            )
        )
    return to_multitrace(posterior.model, values, stats, how.chains), attrs, theta


def sample_tree(
    posterior: Posterior,
    kept: Kept,
    draws: int,
    rng: np.random.Generator,
    how: Sampling = _PLAIN,
    **options: Any,
) -> xr.DataTree:
    """Return draws as a tree; see `NGVIApproximation.sample`."""
    asked, model = options.pop("log_likelihood", False), posterior.model
    if posterior.density.has_minibatch and asked:
        raise ValueError(
            "log_likelihood is one of all rows, and the model reads pm.Minibatch data: each draw would have the rows "
            "of another batch. Ask pm.compute_log_likelihood(draws) in a model of all rows, with the same names."
        )
    observed = [str(rv.name) for rv in model.observed_RVs] if asked else []
    names = observed and checked_names(None if asked is True else asked, observed, option="log_likelihood")
    rows = [observed_logp(posterior.density, name, by_rows=False) for name in names]
    trace, attrs, theta = sample_trace(posterior, kept, draws, rng, how)
    more = dict(posterior.distribution.groups(posterior.layout))
    if rows:
        more["log_likelihood"] = xr.Dataset({of.name: _by_row(model, of, theta, how.chains) for of in rows})
    shown = how.transformed(posterior) or how.var_names is not None
    options["dims"] = posterior.dims | dict(options.get("dims") or {})
    tree = to_datatree(trace, posterior.model, more, include_transformed=shown, **options)
    if posterior.density.is_sharded:  # the model is that of one shard
        tree = xr.DataTree.from_dict({name: node for name, node in tree.children.items() if name not in _OF_ROWS})
    for group in {"posterior", "sample_stats"} & set(tree.children):
        tree[group].attrs.update(attrs)
    outcome = {} if posterior.record is None else posterior.record.attrs()
    for node in (tree, tree["posterior"]):
        node.attrs.update(outcome)
    return tree


def _by_row(model: pm.Model, elementwise: ObservedLogp, theta: Array, chains: int) -> xr.DataArray:
    """Return log densities of rows at draws."""
    dims, coords = axes_of(model, elementwise.name, elementwise.shape, leading=True)
    values = elementwise(theta).reshape(chains, -1, *elementwise.shape)
    coords |= {"chain": np.arange(chains), "draw": np.arange(values.shape[1])}
    return xr.DataArray(values, dims=("chain", "draw", *dims), coords=coords)


def chains_tree(posterior: Posterior, rng: np.random.Generator) -> xr.DataTree:
    """Return chains as they were moved; see `NGVIApproximation.chains`."""
    moved = getattr(getattr(posterior.distribution, "q", None), "rest", None)
    if not isinstance(moved, MovedDraws):
        raise ValueError("There are no chains: a moved posterior has some, pm.fit(..., posterior='moved').")
    posterior.warn_of_changed_data()
    n, n_chains, d = moved.x.shape
    values = posterior.values(moved.x.swapaxes(0, 1).reshape(-1, d), seed_of(rng))
    superchain = np.repeat(np.arange(n_chains) // (n_chains // moved.checks.n_starts), n)
    stats = {"log_p": moved.logp.T.ravel(), "superchain": superchain}
    if moved.checks.n_modes > 1:
        stats |= {"mode": np.repeat(moved.modes, n), "weight": np.repeat(n_chains * moved.of_chains, n)}
        logger.info("The chains stay in their modes: sample_stats has the weight of each.")
    trace = to_multitrace(posterior.model, values, stats, n_chains)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found chain dimension to be longer")  # so they are
        return to_datatree(
            trace, posterior.model, dims=posterior.dims, include_transformed=posterior.include_transformed
        )


def _constrainer(posterior: Posterior, kept: Kept, how: Sampling) -> tuple[Constrainer, frozenset[str] | None]:
    """Return what evaluates the named variables but for discrete ones, and the names; None for all of them."""
    left_out = frozenset() if how.of_batches else of_batches(posterior.density.model)
    if how.var_names is None and not left_out:
        return posterior.constrain, None
    discrete = posterior.density.summed_out_shown
    values = {v.name: v.value_name for v in posterior.layout.variables}
    valid = dict.fromkeys([*values, *(d.name for d in posterior.density.deterministics), *values.values(), *discrete])
    if how.var_names is None:
        logger.info(f"Without {quoted(sorted(left_out))}, of the rows of one minibatch: {_ON_ALL_ROWS}.")
        shown = frozenset(valid) - left_out
        return narrow(posterior, kept, shown), shown
    names = frozenset(checked_names(how.var_names, valid))
    if how.transformed(posterior):
        names |= {values[name] for name in names & values.keys()}
    # Discrete variables are drawn given all others.
    evaluated = names if names.isdisjoint(discrete) else names.difference(discrete).union(values)
    return narrow(posterior, kept, evaluated), names


def narrow(posterior: Posterior, kept: Kept, names: frozenset[str]) -> Constrainer:
    """Return what evaluates some variables, kept until others are asked for."""
    if kept.narrow is None or kept.narrow.names != names:
        kept.narrow = Constrainer.of(posterior.density, names=names)
    return kept.narrow


#: How many of the first draws of tuning the covariance of q counts for: as with PyMC's ``init="advi+adapt_diag"``.
_WEIGHT = 50
#: Draws of q for each chain that are tried, at most, for one where log p is finite.
_MAX_TRIES = 100

Covariance = Literal["auto", "dense", "diagonal"]


@dataclass(frozen=True, eq=False)
class SamplerInit:
    """Where NUTS starts, and the mass matrix that it uses: what `NGVIApproximation.sampler_init` returns.

    Parameters
    ----------
    model : pymc.Model
    layout : Layout
        Where each variable is in the flat vector.
    points : ndarray, shape (chains, n_dim)
        Start of each chain: a draw of q, unconstrained.
    initvals : list of dict
        The same on the constrained scale, by name: what ``pm.sample(initvals=)`` takes.
    mean : ndarray, shape (n_dim,)
        Mean of q, unconstrained.
    covariance : ndarray, shape (n_dim, n_dim) or (n_dim,)
        Covariance of q, unconstrained, or the variances alone: the inverse of the mass matrix.

    Notes
    -----
    All chains start where q has mass. What q has missed, such as another mode, is not looked for, and R-hat of these
    chains can't tell.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     rate = pm.Gamma("rate", 2, 1)
    ...     y = pm.Poisson("y", rate, observed=[3, 1, 4])
    ...     approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    >>> init = approx.sampler_init(chains=2, random_seed=2)
    >>> len(init.initvals), sorted(init.initvals[0]), init.covariance.shape
    (2, ['rate'], (1, 1))
    >>> draws = pm.sample(50, tune=50, **init.kwargs(), random_seed=3, progressbar=False, quiet=True)
    >>> dict(draws.posterior.sizes)
    {'chain': 2, 'draw': 50}
    """

    model: pm.Model
    layout: Layout
    points: Array
    initvals: list[dict[str, NDArray[np.generic]]]
    mean: Array
    covariance: Array

    def __repr__(self) -> str:
        """Return the number of chains, the dimension and the kind of the covariance."""
        kind = "dense" if self.is_dense else "diagonal"
        return f"SamplerInit(chains={self.chains}, n_dim={len(self.mean)}, {kind} covariance)"

    @property
    def chains(self) -> int:
        """Number of chains."""
        return len(self.points)

    @property
    def is_dense(self) -> bool:
        """Whether the covariance has entries off the diagonal."""
        return self.covariance.ndim == 2

    def potential(self, *, adapt: bool = False, random_seed: Seed = None) -> quadpotential.QuadPotential:
        """Return the covariance as ``pm.NUTS(potential=)`` takes it.

        Parameters
        ----------
        adapt : bool, default False
            Let tuning change it, as PyMC does by default: after the first 100 draws, the draws of tuning alone count.
            A dense one is of no use then in more than some tens of dimensions.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            ``pm.sample`` gives the potential a seed for each chain anyway.

        Returns
        -------
        pymc.step_methods.hmc.quadpotential.QuadPotential
            ``QuadPotentialFull`` or ``QuadPotentialDiag``, or its ``Adapt`` kind.
        """
        rng = None if random_seed is None else generator_of(random_seed)
        kind = getattr(quadpotential, f"QuadPotential{'Full' if self.is_dense else 'Diag'}{'Adapt' * adapt}")
        if not adapt:
            return kind(self.covariance, rng=rng)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "QuadPotentialFullAdapt is an experimental feature", UserWarning)
            return kind(len(self.mean), self.mean, self.covariance, _WEIGHT, rng=rng)

    def pymc_step(self, *, adapt: bool = False, **nuts: Any) -> pm.NUTS:
        """Return PyMC's NUTS with the mass matrix; compiles the log density and its gradient.

        Parameters
        ----------
        adapt : bool, default False
            As in `potential`.
        **nuts
            Of ``pm.NUTS``: ``target_accept``, ``max_treedepth``, ``compile_kwargs``, ...

        Raises
        ------
        ValueError
            For what is settled here: ``potential``, ``scaling``, ``model``, ``initial_point``.
        """
        taken = sorted({"potential", "scaling", "is_cov", "model", "initial_point", "vars"} & set(nuts))
        if taken:
            raise ValueError(
                f"{', '.join(taken)}: sampler_init sets this already. Leave it out, or make pm.NUTS(potential="
                "init.potential()) yourself."
            )
        start = self.layout.unflatten(self.points[0])  # spares PyMC a compilation
        return pm.NUTS(potential=self.potential(adapt=adapt), model=self.model, initial_point=start, **nuts)

    def kwargs(self, *, adapt: bool = False, **nuts: Any) -> dict[str, Any]:
        """Return arguments for ``pm.sample``: model, chains, starts, and NUTS with the mass matrix.

        Parameters
        ----------
        adapt : bool, default False
            As in `potential`.
        **nuts
            Of ``pm.NUTS``, such as ``target_accept``: ``pm.sample`` does not pass them on to a step that it is given.

        Returns
        -------
        dict
            ``model``, ``chains``, ``initvals``, ``step``. With a ``step``, ``pm.sample`` runs PyMC's own NUTS, where it
            would otherwise take nutpie if that is installed. ``tune`` is not in it: give a number that is smaller than
            the default of 1,000, since the step size alone is left to tune.
        """
        step = self.pymc_step(adapt=adapt, **nuts)
        return {"model": self.model, "chains": self.chains, "initvals": self.initvals, "step": step}

    def nutpie_kwargs(self) -> dict[str, Any]:
        """Return arguments for ``nutpie.compile_pymc_model(model, **init.nutpie_kwargs())``: one start for all chains.

        Nutpie takes one point, and no mass matrix: it has no way to be given one, nor a point for each chain, and the
        ``init_mean`` of ``nutpie.sample`` is not used. The point is the first draw of q. It is not jittered; nutpie
        would otherwise add up to 1 to each unconstrained coordinate, however narrow the posterior is.

        Returns
        -------
        dict
            ``initial_points`` and ``jitter_rvs``.
        """
        return {"initial_points": self.initvals[0], "jitter_rvs": set()}


def sampler_init(posterior: Posterior, chains: int, rng: np.random.Generator, covariance: Covariance) -> SamplerInit:
    """Return initial points and a mass matrix for NUTS; see `NGVIApproximation.sampler_init`."""
    chains, q, density = check_chains(chains), posterior.distribution, posterior.density
    if covariance not in ("auto", "dense", "diagonal"):
        raise ValueError(f"covariance should be 'auto', 'dense' or 'diagonal'; got {covariance!r}.")
    what = "reads pm.Minibatch data" * density.has_minibatch
    if density.is_sharded or density.is_streamed:
        what = "has the data of one shard or batch alone"
    if what:
        raise ValueError(
            f"The model {what}, and a sampler needs the log density given all of them. Build the model on all of the "
            "data, and pass it q by start= and start_sigma= of pm.fit."
        )
    points = starts(posterior, chains, rng)
    values = Constrainer.of(density, deterministics=False)(points)
    names = [rv.name for rv in posterior.model.free_RVs]
    initvals = [{name: np.array(values[name][chain]) for name in names} for chain in range(chains)]
    dense = covariance == "dense" or (covariance == "auto" and q.n_dim <= MAX_DENSE_DIM)
    if dense:
        check_cov_size(q.n_dim)
    found = q.cov() if dense else q.sd() ** 2
    if not np.isfinite(found).all():
        raise ValueError(
            f"The covariance of q is not finite (q is a {q.name}): it can't be a mass matrix. Fit with family='full'."
        )
    return SamplerInit(posterior.model, posterior.layout, points, initvals, q.mean(), np.array(found, dtype=np.float64))


def starts(posterior: Posterior, chains: int, rng: np.random.Generator) -> Array:
    """Return draws of q where log p is finite, (chains, n_dim)."""
    starts = np.empty((0, posterior.layout.n_dim))
    for _ in range(_MAX_TRIES):
        theta = posterior.distribution.draw(chains, rng)
        # Reparametrised models can have draws that are NaN.
        finite = np.isfinite(theta).all(axis=1)
        finite[finite] = np.isfinite(posterior.density.logp(theta[finite]))
        starts = np.concatenate([starts, theta[finite]])
        if len(starts) >= chains:
            return starts[:chains]
    raise ValueError(
        f"log p is finite at {len(starts)} of {_MAX_TRIES * chains:,} draws of q: too few to start {chains} "
        "chains. Look at approx.status, and give the variables their support by a prior or a transform."
    )
