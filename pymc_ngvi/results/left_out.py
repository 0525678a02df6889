"""Densities of data: marginal likelihoods, and of parts that are left out, by weights or by fits."""

import functools

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import xarray as xr

from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from pymc_ngvi.core.importance import MIN_KHAT_DRAWS, Estimate, khat_limit, log_mean, smoothed
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.messages import NotApart, logger, suggestion
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import (
    AT_ONCE,
    HELD,
    MOST_NUMBERS,
    N_CHAINS,
    N_PREDICTED,
    N_SHOWN,
    draws_of_chains,
    seed_of,
)
from pymc_ngvi.core.types import Array, GaussianState, Indices
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.new_priors import log_excess, unnormalised
from pymc_ngvi.density.observed_rows import (
    MaskedDensity,
    ObservedKind,
    ObservedLogp,
    ObservedRows,
    observed_logp,
    observed_rows,
)
from pymc_ngvi.marginal.left_out import DataParts, IntegratedAgain, Predictives, rows_of_set
from pymc_ngvi.marginal.pooled import WEIGHTED, PoolState
from pymc_ngvi.marginal.trees import IntegratedTrees
from pymc_ngvi.results.distributions import LogMarginalLikelihood, Posterior, axes_of
from pymc_ngvi.rows.expectation import RowFunction, Taken
from pymc_ngvi.rows.linear_map import Entries, ManyMaps, symmetric

# --- sites: Gaussian stand-ins of rows, what is left of q without one, and the predictive density of that row then ---
#
# About the mean m of its predictors under q, the site of a row f is the Gaussian factor with the natural parameters
#
#     E[grad f] - E[hess f] m   and   -E[hess f],
#
# where natural-gradient steps leave a Gaussian q that fits: q is the prior times all sites [1]_. Without its site, q
# is a cavity.
#
# References
# ----------
# .. [1] M. E. Khan and W. Lin (2017). Conjugate-computation variational inference: converting variational inference in
#    non-conjugate models to inferences in conjugate models. AISTATS. https://doi.org/10.48550/arXiv.1703.04265

#: Error that each expectation may have, in nats of a row or relative.
_TOLERANCE = 1e-9
#: Rows whose rules are chosen at a time: of fewer, finer ones may be tried.
_AT_A_TIME = 2**12
#: Part of the precision of q, in any direction, that has to be left for a cavity.
_LEAST_LEFT = 1e-9
#: Nats by which a predictive density may be wrong by quadrature.
_MOST_ERROR = 1e-3


# Densities overflow far from the mode; what is not finite is NaN in the end.
@np.errstate(all="ignore")
def row_sites(kind: ObservedKind, mean: Array, cov: Array) -> dict[str, Array]:
    """Return what `sites` has of rows of one kind; mean and covariance, (n_rows, k) and (n_rows, k, k), under q."""
    rows = kind.rows
    own = _expected(rows, mean, cov)
    (grad, hessian), root, value = own.derivatives(), own.root, own.values
    across = root.swapaxes(1, 2)
    # Else derivatives in predictors may be many things: q does not let all of them vary by themselves.
    are_free = (root.diagonal(axis1=1, axis2=2) > 0.0) | (cov.diagonal(axis1=1, axis2=2) == 0.0)
    left = np.eye(rows.k) + across @ hessian @ root
    usable = np.isfinite(left).all(axis=(1, 2)) & np.isfinite(grad).all(axis=1)
    left[~usable] = np.eye(rows.k)
    # The part of the precision of q that is the site's, in the direction in which it is largest.
    influence = np.where(usable, 1.0 - np.linalg.eigvalsh(left)[:, 0], np.nan)
    usable &= influence < 1.0 - _LEAST_LEFT
    left[~usable] = np.eye(rows.k)
    whitened = (across @ grad[..., None])[..., 0]
    moved = np.linalg.solve(left, whitened[..., None])[..., 0]
    cavity_cov = root @ np.linalg.solve(left, across)
    cavity_mean = mean - (root @ moved[..., None])[..., 0]
    normaliser = 0.5 * np.linalg.slogdet(left)[1] - 0.5 * np.einsum("ra,ra->r", whitened, moved)
    k, n = rows.k, len(mean)
    numbers = np.concatenate([mean, grad, hessian.reshape(n, k * k), value[:, None]], axis=1)

    def over_site(*inputs: Array) -> Sequence[Array]:
        """Return exp(f - shift) / site, (n_points, n_rows), from predictors, data, and the numbers of the sites."""
        own = inputs[len(inputs) - len(numbers.T) :]
        mean, grad, hessian, shift = own[:k], own[k : 2 * k], own[2 * k : -1], own[-1]
        [value] = rows.function(*inputs[: len(inputs) - len(own)])
        apart = [x - m for x, m in zip(inputs[:k], mean, strict=True)]
        exponent = value - shift
        for a in range(k):
            exponent = exponent - apart[a] * (grad[a] + 0.5 * sum(hessian[a * k + b] * apart[b] for b in range(k)))
        return [np.exp(exponent)]

    tilted = RowFunction(
        over_site,
        rows.index,
        [*rows.data, *numbers.T[:, None]],
        np.ones((k, k), dtype=np.bool_),
        n_shared=rows.n_shared,
    )
    ratio = _expected(tilted, mean, cov)
    log_predictive = np.log(ratio.values) + value + normaliser
    # By which this may be wrong, as far as finer rules of quadrature tell.
    is_known = usable & (own.errors + ratio.errors / ratio.values <= _MOST_ERROR)
    found = {"influence": influence, "log_density": np.where(is_known, log_predictive, np.nan)}
    if kind.linear is None:
        return found
    cavity_mean[~usable] = cavity_cov[~usable] = np.nan
    function, along, slope = kind.linear.function, kind.linear.along, kind.linear.slope
    alpha, gamma = grad[:, along] / slope, -hessian[:, along, along] / slope**2
    unclear = ~are_free.all(axis=1) | (cov[:, along, along] == 0.0)
    alpha[unclear] = gamma[unclear] = np.nan
    found["mean"], found["variance"] = site_moments(function, mean, cov)
    found["cavity_mean"], found["cavity_variance"] = site_moments(function, cavity_mean, cavity_cov)
    step = np.divide(alpha, gamma, out=np.full_like(alpha, np.nan), where=gamma > 0.0)
    return found | {
        "alpha": alpha,
        "gamma": gamma,
        "natural": alpha + gamma * found["mean"],
        "pseudo_observation": found["mean"] + step,
    }


def _expected(rows: RowFunction, mean: Array, cov: Array) -> Taken:
    result = Taken(rows, mean, cov, None)
    result.choose(_TOLERANCE, _AT_A_TIME)
    return result


def site_moments(rows: RowFunction, mean: Array, cov: Array) -> tuple[Array, Array]:
    """Return mean and variance, (n_rows,) each, of a function of predictors; NaN where these are."""
    first, second = np.full(len(mean), np.nan), np.full(len(mean), np.nan)
    at = np.flatnonzero(np.isfinite(mean).all(axis=1))
    if not len(at):
        return first, second
    some = rows.some(at, rows.index[at])
    first[at] = _expected(some, mean[at], cov[at]).values

    def square(*inputs: Array) -> Sequence[Array]:
        """Return the square of the function's distance from its mean, which comes last among the data."""
        [value] = some.function(*inputs[:-1])
        return [(value - inputs[-1]) ** 2]

    squared = replace(some, function=square, data=[*some.data, first[at][None]])
    second[at] = _expected(squared, mean[at], cov[at]).values
    return first, second


# --- densities of data, and of parts that are left out ---

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData

# --- marginal likelihoods of exact, nested and moved posteriors: of all data, and of each group given the others ---


def log_marginal_likelihood(posterior: Posterior, *, is_same: bool) -> LogMarginalLikelihood:
    """Return log p(y); see `NGVIApproximation.log_marginal_likelihood`."""
    state, record = posterior.distribution.q, posterior.record
    if not (is_same or isinstance(state, PoolState)):
        why = f" ({record.posterior})" if record is not None and record.posterior else ""
        raise ValueError(
            f"log_marginal_likelihood is that of an exact posterior, and this is none{why}: pm.fit(..., "
            "posterior='exact')."
        )
    if reasons := unnormalised(posterior.model):
        raise ValueError(f"The model has no marginal likelihood: {'; '.join(reasons)}.")
    value, se = state.log_normaliser if isinstance(state, PoolState) else cast(Any, record).elbo
    if np.isnan(value) and isinstance(state, PoolState):
        if state.kind == WEIGHTED:
            why = "it takes draws of an exact posterior, and weights that are even enough"
            raise ValueError(f"There is no marginal likelihood to be relied on: {why}. {state.checks}")
        why = "no Gaussian is near enough to its draws"
        raise ValueError(f"The {state.kind} posterior has no log_marginal_likelihood: {why}.")
    return LogMarginalLikelihood(value - log_excess(posterior.model), se)


# --- cross-validation: parts of the data are left out ---

#: Draws of fits, which see tails; fewer where there are many rows.
_N_OF_REFIT = 20_000
#: Draws at least: fewer do not tell whether weights are good.
_FEWEST_DRAWS = 2 * MIN_KHAT_DRAWS

#: From log p to what fits it, again and again as its data change: from a seed to the posterior.
type Refit = Callable[[LogDensity], Callable[[int], Posterior]]


class Wanted(NamedTuple):
    """What is left out."""

    kind: str
    parts: DataParts
    #: Of the scores.
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coords: dict[str, Any]
    horizon: int = 1
    #: Of the future: the first place in time that is predicted.
    least: int = 0


def leave_out(
    posterior: Posterior,
    var_name: str | None,
    rng: np.random.Generator,
    refit: Refit | None,
    **given: Any,
) -> "ELPDData":
    """Return predictive densities; see `NGVIApproximation.leave_out`."""
    posterior.refuse_changed_data("leave_out() needs the data of the fit.")
    elementwise = observed_logp(posterior.density, observed_name(posterior, var_name))
    asked = asked_for(posterior, elementwise, rng, **given)
    parts = asked.parts
    masked = MaskedDensity(cast(LogDensity, posterior.density), elementwise)
    in_sample = _in_sample(posterior, elementwise, parts, rng)
    n = int(np.clip(AT_ONCE // parts.out.shape[1], N_SHOWN, _N_OF_REFIT))
    found = _predictives(posterior, elementwise, masked, parts, n, rng)
    scores, good = _scored(found, parts), khat_limit(max(int(found.worth * len(found.log_weights)), MIN_KHAT_DRAWS))
    again: list[int] = [] if refit is None else np.unique(parts.part[~(scores[:, 2] <= good)]).tolist()
    if again and refit is not None:
        scores = _by_fits(posterior, elementwise, masked, parts, scores, again, refit, good, rng)
    is_bad, said = ~(scores[:, 2] <= good), list[str]()
    scores[is_bad, 1] = np.nan
    if is_bad.any():
        cure = " refit=True fits again without them." if refit is None else ""
        said.append(
            f"{len(np.unique(parts.part[is_bad])):,} of {parts.out.shape[0]:,} parts have a k-hat above {good:.2f}: "
            f"what is said of these can't be relied on.{cure}"
        )
    if posterior.distribution.kept_log_weights() is None and not found.log_weights.any():
        said.append(
            f"Densities are those of {posterior.kind}, which importance weights can't correct: what it misses of the "
            "posterior is in no error. posterior='exact' or 'moved' may do better."
        )
    for sentence in said:
        logger.warning(sentence)
    return _elpd_data(asked, scores, again, in_sample, len(found.log_weights), good, bool(said))


# --- by weights ---


def _predictives(
    posterior: Posterior, elementwise: ObservedLogp, masked: MaskedDensity, parts: DataParts, n: int,
    rng: np.random.Generator,
) -> Predictives:  # fmt: skip
    """Return densities with groups integrated again, or those of draws where there are none to integrate."""
    state = posterior.distribution.q
    if isinstance(state, IntegratedTrees) and state.quadrature is not None:
        try:
            return IntegratedAgain(state, state.quadrature.rule, masked).predictives(parts)
        except Exception:  # terms do not come apart, or an operation is not to be vectorised: draws do
            logger.debug("Groups can't be integrated again.", exc_info=True)
    n_numbers = parts.out.shape[0] + (0 if parts.are_whole else parts.scored.shape[0])
    n = int(min(n, MOST_NUMBERS // n_numbers))
    if n < _FEWEST_DRAWS:
        raise ValueError(
            f"{n_numbers:,} predictive densities of {_FEWEST_DRAWS} draws take too much memory: leave out groups, or "
            "folds."
        )
    theta, log_weights = _draws(posterior, n, rng)
    worth = posterior.distribution.effective(n, of_globals=True)
    # One draw many times is no tail of weights: their k-hat would be too small. Copies have the same sum.
    sums = (theta * np.sqrt(np.arange(1.0, theta.shape[1] + 1.0))).sum(axis=1)
    _, first, counts = np.unique(sums, return_index=True, return_counts=True)
    theta = theta[first]
    return Predictives(
        log_weights[first] + np.log(counts), *_sums(elementwise, theta, parts), min(worth / len(theta), 1.0)
    )


def _draws(posterior: Posterior, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return draws, and their log weights: log p - log q of those of q, where these weights are any good."""
    distribution = posterior.distribution
    theta, log_weights = distribution.draw(n, rng), np.zeros(n)
    if distribution.kept_log_weights() is None:
        weights = distribution.log_weights(theta, posterior.density)
        log_weights = weights if smoothed(weights)[1] <= khat_limit(n) else log_weights
    return theta, log_weights


def _sums(elementwise: ObservedLogp, theta: Array, parts: DataParts) -> tuple[Array, Array]:
    """Return log densities of parts and of scores at draws, a few draws at a time."""
    out, scored = [], []
    size = max(1, HELD // 2 // parts.out.shape[1])
    for start in range(0, len(theta), size):
        values = elementwise(theta[start : start + size]).T
        out.append((parts.out @ values).T)
        scored.append(out[-1] if parts.are_whole else (parts.scored @ values).T)
    return np.concatenate(out), np.concatenate(scored)


def _scored(found: Predictives, parts: DataParts) -> Array:
    """Return scores by Pareto-smoothed weights of each part: an `Estimate` in each row, (n_scores, 3)."""
    scores = np.empty((parts.scored.shape[0], len(Estimate._fields)))
    order, counts = np.argsort(parts.part, kind="stable"), np.bincount(parts.part, minlength=parts.out.shape[0])
    for i, of_part in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        log_ratio = found.log_weights - found.log_out[:, i]
        known = np.isfinite(log_ratio)
        smooth, khat = smoothed(log_ratio[known])
        for score in of_part:
            value, se, _ = log_mean(found.log_scored[known, score], smooth, found.worth)
            scores[score] = value, se, khat
    return scores


def _in_sample(
    posterior: Posterior, elementwise: ObservedLogp, parts: DataParts, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Return what draws say that `NGVIApproximation.sample` gives for the same seed.

    Log densities of scores, (n_scores,); smoothed log weights without each part, (n_draws, n_parts); their k-hats.
    """
    most = np.clip(HELD // parts.scored.shape[0], 1, N_PREDICTED)
    theta, log_weights = _draws(posterior, draws_of_chains(most), rng)
    out, scored = _sums(elementwise, theta, parts)
    smooth = smoothed(log_weights)[0]
    log_density = logsumexp(smooth[:, None] + scored, axis=0) - logsumexp(smooth)
    without, khat = zip(*[smoothed(log_weights - of_part) for of_part in out.T], strict=True)
    return log_density, np.transpose([w - logsumexp(w) for w in without]), np.array(khat)


# --- by fits ---


def _by_fits(
    posterior: Posterior, elementwise: ObservedLogp, masked: MaskedDensity, parts: DataParts, scores: Array,
    again: Sequence[int], refit: Refit, good: float, rng: np.random.Generator,
) -> Array:  # fmt: skip
    """Return the scores, some parts of which are left out by fits."""
    result, each = scores.copy(), 0.0 if posterior.record is None else posterior.record.run_seconds

    @functools.cache
    def fits() -> Callable[[int], Posterior]:
        masked.leave_out(np.empty(0, dtype=np.intp))
        return refit(masked.density)

    @functools.cache
    def evidence() -> Estimate | None:
        return _evidence(posterior, rng)

    def without(rows: Indices, part: DataParts) -> tuple[Predictives, Estimate | None]:
        fit = fits()
        masked.leave_out(rows)
        found = fit(seed_of(rng))
        if found.record is not None and found.record.doubts:
            raise ValueError("; ".join(found.record.doubts))
        of_fit = _evidence(found, rng)  # before the weights of rows change
        return _predictives(found, elementwise, masked, part, _N_OF_REFIT, rng), of_fit

    def score_of(score: int, part: DataParts, less: tuple[Predictives, Estimate | None]) -> Estimate:
        """Return a score by draws without its part; where few of these decide, by marginal likelihoods."""
        estimate, of_less = log_mean(*less[0].side(score)), less[1]
        if estimate.khat <= good or of_less is None:
            return estimate
        of_more = evidence()
        if not parts.are_whole:
            rows = np.setdiff1d(rows_of_set(part.out, 0), rows_of_set(part.scored, score))
            of_more = without(rows, part)[1]
        if of_more is None:
            return estimate
        se, khat = float(np.hypot(of_more.se, of_less.se)), max(of_more.khat, of_less.khat)
        return Estimate(of_more.value - of_less.value, se, khat)

    n_failed = 0
    with task("Fits without a part", len(again), seconds=each * len(again)) as fits_done:
        for fits_done.completed, number in enumerate(again):
            part, of_part = parts.only(number), np.flatnonzero(parts.part == number)
            try:
                less = without(rows_of_set(part.out, 0), part)
                result[of_part] = [score_of(score, part, less) for score in range(len(part.part))]
            except Exception:  # whatever it is: the others go on
                logger.debug("A fit without a part failed.", exc_info=True)
                n_failed += 1
    if n_failed:
        logger.warning(f"{n_failed:,} of {len(again):,} fits failed, or can't be relied on.")
    return result


def _evidence(posterior: Posterior, rng: np.random.Generator) -> Estimate | None:
    """Return the log marginal likelihood; None of a posterior that keeps draws, and is not exact."""
    distribution = posterior.distribution
    if distribution.kept_log_weights() is None:
        log_weights = distribution.log_weights(distribution.draw(_N_OF_REFIT, rng), posterior.density)
        return log_mean(log_weights, np.zeros(_N_OF_REFIT))
    state = distribution.q
    value, se = state.log_normaliser
    return Estimate(value, se, state.khat) if state.checks.is_exact else None


# --- for ArviZ ---


def _elpd_data(
    asked: Wanted,
    scores: Array,
    again: Sequence[int],
    in_sample: tuple[Array, Array, Array],
    n_draws: int,
    good: float,
    warning: bool,
) -> "ELPDData":
    from arviz_stats.utils import ELPDDataLFO, ELPDDataLOO, ELPDDataLOOKFold

    elpd, error, khat = scores.T
    log_density, log_weights, khat_of_draws = in_sample
    n, p = len(elpd), log_density - elpd

    def array(values: Array, name: str) -> xr.DataArray:
        return xr.DataArray(values.reshape(asked.shape), dims=asked.dims, coords=asked.coords, name=name)

    common: dict[str, Any] = {
        "elpd": float(elpd.sum()),
        "se": float(np.sqrt(n * np.var(elpd))),
        "p": float(p.sum()),
        "n_samples": n_draws,
        "n_data_points": n,
        "scale": "log",
        "warning": warning,
        "good_k": good,
        "elpd_i": array(elpd, "elpd_i"),
        "pareto_k": array(khat, "pareto_k"),
    }
    found: ELPDData
    if asked.kind == "folds":
        found = ELPDDataLOOKFold(**common, n_folds=asked.parts.out.shape[0], p_kfold_i=array(p, "p_kfold_i"))
    elif asked.kind == "future":
        refits = np.asarray(again) + asked.least
        found = ELPDDataLFO(
            **common, forecast_horizon=asked.horizon, min_observations=asked.least, refits=refits, n_refits=len(refits),
            p_lfo_i=array(p, "p_lfo_i"),
        )  # fmt: skip
    else:
        weights = xr.DataArray(
            log_weights.reshape(N_CHAINS, -1, *asked.shape), dims=("chain", "draw", *asked.dims), name="log_weights",
            coords={**asked.coords, "pareto_k": (asked.dims, khat_of_draws.reshape(asked.shape))},
        )  # fmt: skip
        found = ELPDDataLOO(**common, p_loo_i=array(p, "p_loo_i"), log_weights=weights)
    found["mcse_i"] = array(error, "mcse_i")
    return found


# --- what is asked for ---


def asked_for(
    posterior: Posterior,
    elementwise: ObservedLogp,
    rng: np.random.Generator,
    *,
    horizon: int,
    **given: Any,
) -> Wanted:
    """Return what is to be left out; of ``groups``, ``folds`` and ``future`` one at most is not None."""
    chosen = [key for key, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"Leave out {' or '.join(chosen)}: one of them at a time.")
    shape = elementwise.shape
    n = int(np.prod(shape))
    dims, coords = axes_of(posterior.model, elementwise.name, shape)
    if not chosen:
        return Wanted("rows", DataParts.of_labels(np.arange(n), n), dims, shape, coords)
    [kind] = chosen
    if kind == "groups":
        label, labels, dim = _groups(posterior, elementwise, given["groups"])
        return Wanted(kind, DataParts.of_labels(label, len(labels)), (dim,), (len(labels),), {dim: labels})
    if kind == "folds":
        fold, n_folds = _folds(given["folds"], shape, rng)
        return Wanted(kind, DataParts.of_folds(fold, n_folds), dims, shape, coords)
    least, n_times = given["future"], shape[0] if shape else 1
    if isinstance(least, bool) or not isinstance(least, int | np.integer) or not 0 < least <= n_times - horizon:
        raise ValueError(
            f"future should be how many times of the first axis are always known, from 1 to {n_times - horizon:,} "
            f"(there are {n_times:,}, and {horizon:,} are predicted at once); got {least!r}."
        )
    parts = DataParts.of_future(np.repeat(np.arange(n_times), n // n_times), int(least), horizon)
    first = np.asarray(coords.get(dims[0], np.arange(n_times)))[int(least) : n_times + 1 - horizon]
    return Wanted(kind, parts, (dims[0],), (len(first),), {dims[0]: first}, horizon, int(least))


def _groups(
    posterior: Posterior, elementwise: ObservedLogp, groups: str | ArrayLike
) -> tuple[Indices, NDArray[Any], str]:
    """Return the number of the group of each row, the labels of groups, and the name of the dim."""
    name, shape, model = elementwise.name, elementwise.shape, posterior.model
    if not isinstance(groups, str):
        return *_labels("groups", groups, shape), "group"
    own, coords = axes_of(model, name, shape)
    if groups in own:
        axis = own.index(groups)
        label = np.indices(shape)[axis].ravel().astype(np.intp)
        return label, np.asarray(coords.get(groups, np.arange(shape[axis]))), groups
    variables = [v for v in posterior.layout.variables if groups in (model.named_vars_to_dims.get(v.name) or ())]
    # A zero of a hurdle model says nothing of its group: its distribution does.
    for of_parameters in (False, True) if variables else ():
        depends = elementwise.dependence(of_parameters=of_parameters).tocsc()
        for v in variables:
            of_v = model.named_vars_to_dims[v.name]
            if len(of_v) != len(v.shape):
                continue
            level = np.indices(v.shape)[of_v.index(groups)].ravel()
            inside = sparse.csr_array(depends[:, v.where] @ np.equal.outer(level, np.arange(level.max(initial=-1) + 1)))
            labels = np.asarray(model.coords.get(groups) or np.arange(inside.shape[1]))
            if (np.diff(inside.indptr) == 1).all() and len(labels) == inside.shape[1]:
                known = np.unique(inside.indices)
                return np.searchsorted(known, inside.indices).astype(np.intp), labels[known], groups
    dims = sorted({d for dims in model.named_vars_to_dims.values() for d in dims or () if d and d != groups})
    raise ValueError(
        f"Rows of {name!r} do not belong to one {groups!r} each, as far as the model tells. "
        f"{suggestion(groups, dims) if dims else 'It has no dims.'} Or give groups as an array with a label for each "
        f"row, shape {shape}."
    )


def _folds(folds: int | ArrayLike, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Indices, int]:
    n = int(np.prod(shape))
    if np.ndim(folds) == 0:
        if isinstance(folds, bool) or not isinstance(folds, int | np.integer) or not 2 <= folds <= n:
            raise ValueError(f"folds should be a number from 2 to {n:,}, or the fold of each row; got {folds!r}.")
        return rng.permutation(n) % int(folds), int(folds)
    fold, labels = _labels("folds", folds, shape)
    if len(labels) < 2:
        raise ValueError("There is one fold only: without it, there are no data.")
    return fold, len(labels)


def _labels(option: str, given: ArrayLike, shape: tuple[int, ...]) -> tuple[Indices, NDArray[Any]]:
    """Return the number of the label of each row, and the labels."""
    array = np.asarray(given)
    if array.shape != shape:
        raise ValueError(f"{option} should have a label for each row, shape {shape}; got {array.shape}.")
    labels, number = np.unique(array.ravel(), return_inverse=True)
    return number.astype(np.intp), labels


# --- sites: what each observation contributes to q, what q is without it, and how well that predicts it ---

#: Part of the precision of q, due to one observation, above which what is predicted without it is not reliable.
INFLUENTIAL = 0.3


def sites(posterior: Posterior, var_name: str | None) -> xr.Dataset:
    """Return the sites of an observed variable; see `NGVIApproximation.sites`."""
    density = posterior.density
    if not isinstance(density, LogDensity):
        parts, one = ("shards", "shard") if density.is_sharded else ("batches", "batch")
        raise ValueError(
            f"The rows are in {parts}, and have no sites here. Fit a {one} alone to see those of its rows."
        )
    q, name = posterior.distribution.q, observed_name(posterior, var_name)
    if not hasattr(q, "covariances"):
        exact = posterior.record is not None and posterior.record.is_exact
        raise ValueError(
            f"Sites are those of a Gaussian fit, and this is {posterior.kind}. "
            + (
                "The Gaussian fit that it began from has some: approx.gaussian.sites(). For predictive densities under "
                "the exact posterior take pm.compute_log_likelihood on draws, and arviz.loo."
                if exact
                else "Fit with posterior='gaussian', and without reparam."
            )
        )
    posterior.check_weights()
    try:
        found = observed_rows(density, name)
        kinds = list(zip(found.kinds, _sites_of(found, q), strict=True))
    except NotApart as error:
        raise ValueError(
            f"The observations of {name!r} have no sites, as their log densities are not functions of a few linear "
            f"predictors each: {error}. For predictive densities take pm.compute_log_likelihood on draws, and "
            "arviz.loo."
        ) from error
    keys = (  # all but the last two are NaN where there is no one linear predictor
        "mean", "variance", "alpha", "gamma", "natural", "pseudo_observation", "cavity_mean", "cavity_variance",
        "influence", "log_density",
    )  # fmt: skip
    values = {key: np.full(int(np.prod(found.shape)), np.nan) for key in keys}
    for kind, of_rows in kinds:
        for key, value in of_rows.items():
            values[key][kind.elements] = value
    dims, coords = axes_of(posterior.model, name, found.shape)
    log_density, n = values["log_density"], len(values["log_density"])
    attrs = {
        "var_name": name,
        "elpd": float(log_density.sum()),
        "elpd_se": float(np.sqrt(n * np.var(log_density, ddof=1))) if n > 1 else float("nan"),
        "n_missing": int(np.isnan(log_density).sum()),
        "n_influential": int((values["influence"] > INFLUENTIAL).sum()),
    }
    return xr.Dataset({key: (dims, v.reshape(found.shape)) for key, v in values.items()}, coords=coords, attrs=attrs)


def observed_name(posterior: Posterior, var_name: str | None) -> str:
    """Return the observed variable that is asked for; raise ValueError where that is none, or several."""
    names = [str(rv.name) for rv in posterior.model.observed_RVs]
    if not names:
        rows = ", and which rows a pm.Potential is made of is not known: write it as a pm.CustomDist(..., observed=)"
        raise ValueError(f"The model has no observed variable{rows * bool(posterior.model.potentials)}.")
    if var_name is None and len(names) == 1:
        return names[0]
    if var_name not in names:
        several = "Several variables are observed: say which, by var_name"
        asked = several if var_name is None else f"No observed variable is called {var_name!r}"
        raise ValueError(f"{asked}; there are {', '.join(map(repr, names))}.")
    return var_name


def _sites_of(found: ObservedRows, q: GaussianState) -> Iterator[dict[str, Array]]:
    """Return the sites of each kind of rows."""
    linear = found.linear_map
    maps = ManyMaps.of(linear)
    entries = Entries(maps.sparsity, maps.columns, [kind.rows.index for kind in found.kinds])
    covariances = iter(entries.of(maps).covariances(linear.covariances(q, entries.rows, entries.cols)[None]))
    eta = linear(q.location[None])[0]
    for kind in found.kinds:
        yield row_sites(kind, eta[kind.rows.index], symmetric(covariances, kind.rows.k))
