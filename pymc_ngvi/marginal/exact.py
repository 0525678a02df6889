"""The exact step after a Gaussian fit: whether a model allows it, what it would cost, and the posterior it gives."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.importance import effective_size
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.messages import NotApart, Reason, Unavailable
from pymc_ngvi.core.sizes import HELD, SLIGHT
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.one_mode import rows_not_concave
from pymc_ngvi.density.rows_given import ratios
from pymc_ngvi.marginal.integral import N_COMPARED, ROUGH, NothingInside, TreeInside, TreeIntegral, TreePairs
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import PoolState, by_neighbours
from pymc_ngvi.marginal.proposals import PROFILE, StudentMixture, mixture_of
from pymc_ngvi.marginal.quadrature import MOST_PLAIN, Centres, Forest, PathRule, find_forest
from pymc_ngvi.marginal.sampler import EFFECTIVE, MOST, MOST_SURE, Ratios, Sampler, climbs_profiles, size_wanted
from pymc_ngvi.marginal.trees import IntegratedTrees, pool_of

#: Globals up to which a regression is sampled: it has no thin bent tails; with few events, all of 16 to 41 were right.
_MOST_OF_REGRESSION = 60
#: Draws behind the look at the weights of q; their seed.
_N_WEIGHED, _SEED = 256, 20_260_302
#: Relative variance of the weights of q below which there is nothing to gain; next to nothing below `SLIGHT`.
#: That much is also the log of the factor by which draws of narrower and far wider Gaussians may find more.
_EVEN = 0.002
#: Scales of these, q's own twice; seconds that such a look may take, and draws of q at most.
_SCALES, _OF_LOOK, _MOST_WEIGHED = (1.0, 1.0, 0.1, 3.0, 10.0), 0.05, 16_384
#: Of these, the heaviest ones from which log p is climbed; degrees of freedom that make a Gaussian of a Student t.
_N_CLIMBS, _GAUSSIAN = 4, 1e6
#: How often log m is evaluated at globals, in the mean; part of the values about centres that are corrected.
_AGAIN, _CORRECTED = 1.5, 0.25
#: Gradients that each point of a profile takes beside trees: logarithms of scales have tails that bend.
_OF_PROFILES = 4.0
#: Draws of many globals, over those that are kept: others teach proposals.
_OF_MANY = 8.0


def forest_of(density: ModelDensity) -> Forest:
    """Return the globals and trees of a model."""
    if density.has_minibatch:
        raise Unavailable(Reason.IN_PART, "the model reads pm.Minibatch data")
    pattern = None if density.n_directions is None else density.structural_pattern
    forest = find_forest(pattern, density.n_dim, tuple(v.where for v in density.layout.variables))
    most = _MOST_OF_REGRESSION if forest.n_globals > MOST_PLAIN and _is_regression(density) else MOST_PLAIN
    if not forest.n_local and forest.n_globals > most:
        has_none = "the model has no independent blocks"
        if density.n_directions is None:
            has_none = "log p is no sum over rows, which fall into blocks"
        raise Unavailable(
            Reason.NO_FOREST,
            f"{has_none}, and its {forest.n_globals} parameters are more than the {most} that can be sampled",
        )
    return forest


def _is_regression(density: ModelDensity) -> bool:
    """Tell whether rows are functions of one predictor each, and of shapes that are the same for all.

    Scales of priors are no such shapes: coefficients are as wide as these.
    """
    rows = density.rows
    if rows is None:
        return False
    for kind in rows.terms.rows:
        n_coordinates = (rows.linear_map.plain.rows(kind.index[0]) != 0.0).sum(axis=1)
        is_shape = (kind.index == kind.index[0]).all(axis=0) & (n_coordinates == 1)
        own = n_coordinates[~is_shape]
        # Of a smooth term whose weights have scales, rows are functions of each weight.
        if len(own) > 1 or (len(is_shape) > 1 and is_shape.sum() >= own.sum()):
            return False
    return True


def is_even(density: ModelDensity, q: GaussianState, most: float = _EVEN) -> bool:
    """Tell whether the importance weights of a Gaussian fit are nearly equal, so that it is the posterior.

    With a larger limit: whether no expectation under it is far off.

    Draws of q alone know nothing of what it misses: others, from narrower and wider ones, are not to find more mass,
    but for what they find of q itself.
    """
    if not efficiency_of(density, q) * (1.0 + 2.0 * most) >= 1.0:  # as few draws tell, for a tenth of what more take
        return False
    theta = _look(density, q)
    n, mean = 2 * len(theta) // len(_SCALES), q.mean()
    log_p = density.logp(theta[:n])
    log_ratio = log_p - q.log_density(theta[:n])
    if not np.isfinite(log_ratio).all() or not n / effective_size(log_ratio) - 1.0 < most:
        return False
    log_p = np.concatenate([log_p, NothingInside(density.logp).log_m(theta[n:])])
    each = [q.log_density(mean + (theta - mean) / s) - q.n_dim * np.log(s) for s in _SCALES]
    log_mixture = logsumexp(each, axis=0)
    mass = logsumexp(log_p - log_mixture) - log_ratio.mean() - logsumexp(each[0] - log_mixture)
    return bool(mass < SLIGHT)


def _look(density: ModelDensity, q: GaussianState) -> Array:
    """Return draws of q, and as many of Gaussians about its mean, narrower and far wider."""
    n = int(np.clip(_OF_LOOK / density.value_seconds, _N_WEIGHED, _MOST_WEIGHED) / 2)
    scales = np.repeat(_SCALES, n)[:, None]
    return q.draws(scales * np.random.default_rng(_SEED).standard_normal((len(scales), q.n_dim)))


def _looked(density: ModelDensity, q: GaussianState) -> tuple[list[Array], tuple[StudentMixture, Array]]:
    """Return draws about q that have most weight, above which another mode may be, and some to begin with."""
    theta = _look(density, q)
    means, factors = np.tile(q.mean(), (len(_SCALES), 1)), np.multiply.outer(_SCALES, np.linalg.cholesky(q.cov()))
    proposal = mixture_of(means, factors, _GAUSSIAN)
    order = np.argsort(proposal.log_density(theta) - NothingInside(density.logp).log_m(theta))
    return list(theta[order[:_N_CLIMBS]]), (proposal, theta[:: -(-len(theta) // (4 * _N_WEIGHED))])


def efficiency_of(density: ModelDensity, q: GaussianState) -> float:
    """Return the part of the draws of a Gaussian fit that is effective; 0 where one is outside the support."""
    theta = q.draws(np.random.default_rng(_SEED).standard_normal((_N_WEIGHED, q.n_dim)))
    log_ratio = density.logp(theta) - q.log_density(theta)
    return effective_size(log_ratio) / len(theta) if np.isfinite(log_ratio).all() else 0.0


def seconds_of_node(forest: Forest, density: ModelDensity, *, by_rows: bool = True) -> float:
    """Return what a value of log p takes, among many; by rows: where that is the sum of its rows."""
    rows = density.by_rows.found if by_rows and forest.n_local else None
    if rows is None or not rows.n_rows:
        return density.value_seconds
    return prices.of_node(rows.n_rows)


def nodes_of_value(rule: PathRule) -> float:
    """Return how many nodes a value of log m takes, with those of the rule by which centres are corrected."""
    return len(rule.nodes) + _CORRECTED * len(rule.sure.nodes)


def n_values(forest: Forest, seconds_of_value: float) -> float:
    """Return at how many globals log m is evaluated, about: along lines, and at draws; some more than once.

    Without trees, draws of wide and narrow Gaussians come before, and are weighed once more with the others.
    """
    p = forest.n_globals
    n_draws = size_wanted(p, seconds_of_value) / EFFECTIVE
    n_gradients = _OF_PROFILES if forest.n_local and climbs_profiles(p, seconds_of_value) else 0.0
    n_of_lines = len(PROFILE) * p * (1.0 + n_gradients * 2 * p)
    n_looked = 0 if forest.n_local else len(_SCALES) * _N_WEIGHED
    return n_looked + _AGAIN * (n_of_lines + (n_draws if p <= MOST_SURE else _OF_MANY * n_draws))


def exact_posterior(
    density: ModelDensity,
    q: GaussianState,
    forest: Forest,
    seed: int,
    expect: Callable[[float], object] = bool,
    others: Sequence[GaussianState] = (),
    *,
    of_other_data: bool = False,
) -> PoolState:
    """Return the exact posterior; ``expect`` is told how long that takes.

    It begins from a Gaussian fit, which may be one to other data: then modes of log m are climbed to from there.
    """
    mean, at = q.mean(), forest.globals_
    fitted = FittedDensity(density, forest, mean)
    divided = Ratios.about(ratios(density, at) if forest.n_local and isinstance(density, LogDensity) else [], mean[at])
    quadrature = _quadrature(fitted, density, q, forest, others) if forest.n_local else None
    heaviest, look = _looked(density, q) if quadrature is None and len(at) <= MOST_PLAIN else ([], None)
    try:
        return integrated(
            fitted, forest, quadrature, divided, *divided.normal(mean[at], q.cov_block(at)), seed,
            seconds_of_node(forest, density), expect,
            [*(divided.forward(other.mean()[at][None])[0] for other in others), *heaviest], look,
            is_at_mode=not of_other_data, gaussian=q, modes=tuple(others),
        )  # fmt: skip
    except np.linalg.LinAlgError:
        raise Unavailable(Reason.SINGULAR, "a covariance of the global parameters is singular") from None


def integrated(
    fitted: FittedDensity,
    forest: Forest,
    quadrature: TreeIntegral | None,
    divided: Ratios,
    start: Array,
    cov: Array,
    seed: int,
    each: float,
    expect: Callable[[float], object] = bool,
    others: Sequence[Array] = (),
    look: tuple[StudentMixture, Array] | None = None,
    *,
    is_at_mode: bool = True,
    gaussian: GaussianState | None = None,
    modes: tuple[GaussianState, ...] = (),
) -> IntegratedTrees:
    """Sample the globals, about a Gaussian of these and other starts, as they are divided; a node takes ``each`` s."""
    p, n_nodes = len(start), 1 if quadrature is None else len(quadrature.rule.nodes)
    wanted, most = size_wanted(p, n_nodes * each) if is_at_mode or not forest.n_local else 0.0, MOST
    each *= 1 if quadrature is None else nodes_of_value(quadrature.rule)
    if quadrature is None:
        inside: NothingInside | TreeInside = NothingInside(fitted.logp)
        most = int(min(most, prices.left() / each))
    else:
        inside = TreeInside(quadrature, divided)
        expect(n_values(forest, each) * each)
        most = min(most, max(_N_WEIGHED, HELD // (forest.n_local * (2 + forest.n_levels))))
    sampler = Sampler(
        inside, start, np.sqrt(np.diag(cov)), seed,
        wanted=wanted, most=most, n_draws=1, seconds=each, cov=cov, is_at_mode=is_at_mode, others=others,
        look=look,
    )  # fmt: skip
    draws, elsewhere = sampler.run(), 0.0
    if p > MOST_SURE and sampler.has_learned:
        draws = sampler.afresh(draws)
    while quadrature is not None and not quadrature.settles(cast(TreePairs, draws.pairs), draws.weights):
        draws = sampler.again()
    order = by_neighbours(draws.g / draws.g.std(axis=0))
    g = divided.inverse(draws.g[order])
    log_slope = divided.log_slope(g)
    pool = pool_of(g, draws.log_marginal[order] + log_slope, draws.log_density[order] + log_slope)
    pairs = None if quadrature is None else cast(TreePairs, draws.pairs[order])
    if quadrature is not None and pairs is not None:
        quadrature.begin_from(pairs)
        elsewhere = quadrature.elsewhere(pairs, pool.weights()[0])
    return IntegratedTrees(
        pool, pairs, sampler.proposal, divided, seed, sampler.efficiency(),
        draws.moved, draws.lost, elsewhere, forest, quadrature, fitted, gaussian, modes,
    )  # fmt: skip


def _quadrature(
    fitted: FittedDensity, density: ModelDensity, q: GaussianState, forest: Forest, others: Sequence[GaussianState]
) -> TreeIntegral:
    """Return the integral of the trees, with a rule that has settled about a Gaussian fit."""
    try:
        fitted.split()
    except NotApart as reason:
        raise Unavailable(Reason.NOT_SPLIT, str(reason)) from None
    is_concave, places = not rows_not_concave(density)[forest.locals_].any(), np.empty((0, forest.n_local))
    if not is_concave and forest.n_levels > 1:
        prior = density.prior_draws(2 * N_COMPARED, _SEED)[:, forest.locals_]
        places = np.concatenate([*(other.mean()[None, forest.locals_] for other in others), prior])
    mean, sd, first = q.mean(), q.sd(), Centres.empty(1, forest)
    first.mean[:] = mean[forest.locals_]
    first.factor[:, np.arange(forest.n_local), forest.level] = sd[forest.locals_]
    centre, scale = mean[forest.globals_], sd[forest.globals_]
    result = TreeIntegral(
        fitted, forest, lambda g: first[np.zeros(len(g), dtype=np.intp)], scale,
        is_concave=is_concave or forest.n_levels > 1, places=places,
    )  # fmt: skip
    result.know(result.at(centre[None]))
    near = centre + np.random.default_rng(_SEED).standard_normal((N_COMPARED, len(scale))) * scale
    result.choose_rule(result.at(near), tolerance=ROUGH)
    return result
