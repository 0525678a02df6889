"""The exact step after a Gaussian fit: whether a model allows it, what it would cost, and the posterior it gives."""

import logging

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scipy import sparse

from pymc_ngvi.core import prices
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.refusal import OtherForm, Reason, Unavailable
from pymc_ngvi.core.types import Array, GaussianState, MeanHessian
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.one_mode import rows_not_concave
from pymc_ngvi.density.rows_given import ratios
from pymc_ngvi.density.split import CannotSplit
from pymc_ngvi.marginal.adaptation import SCALES
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.fitting import Hopeless, Sampler
from pymc_ngvi.marginal.forest import MOST_PLAIN, Forest, NoForest, find_forest
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.proposals import Base, Proposal, effective_size, mixture_of
from pymc_ngvi.marginal.sampling import Plain, Round, Sampled
from pymc_ngvi.marginal.tails import Bend
from pymc_ngvi.marginal.trees import IntegratedTrees

# --- the local coordinates given the globals under a Gaussian: linear means and factors, from a sparse precision ---

#: Part of a diagonal entry of the precision that has to be left when what is below has been eliminated.
_LEAST_PIVOT = 1e-8


@dataclass(frozen=True, eq=False)
class LinearCentres:
    """Centres of a Gaussian given its globals: a linear mean, one factor."""

    #: At ``centre``; shape (n_local,).
    mean: Array
    #: shape (n_local, n_globals).
    slope: Array
    #: shape (n_local, n_levels).
    factor: Array
    #: shape (n_globals,).
    centre: Array

    def __call__(self, g: Array) -> Centres:
        """Return the centres given globals, (n, n_globals)."""
        mean = self.mean + (g - self.centre) @ self.slope.T
        return Centres(mean, np.broadcast_to(self.factor, (len(g), *self.factor.shape)))


def linear_centres(forest: Forest, precision: sparse.csr_array, mean: Array) -> LinearCentres:
    """Return the conditional distribution of the local coordinates given the globals."""
    local = precision[forest.locals_]
    factor = _factor(forest, local[:, forest.locals_].tocsr())
    beside = np.asarray(local[:, forest.globals_].todense())
    # E[b | g] = m - C P_lg (g - m_g) with C = L L^T.
    matrix = _precision_matrix(forest, factor)
    slope = -np.asarray(matrix @ (matrix.T @ beside))
    return LinearCentres(mean[forest.locals_], slope, factor, mean[forest.globals_])


def _factor(forest: Forest, precision: sparse.csr_array) -> Array:
    """Return L, (n_local, n_levels), with L L^T the inverse of the precision of the local coordinates.

    Coordinates are eliminated from the leaves to the roots; what a coordinate adds to the precision of those above it
    stays on its path.
    """
    n, depth = forest.n_local, forest.n_levels
    row = np.zeros((n, depth))  # of the precision, in the columns of the path
    for level in range(depth):
        row[:, level] = np.asarray(precision[np.arange(n), forest.path[:, level]]).ravel()
    below = np.zeros((n, depth, depth))  # what descendants have added, on the path of each coordinate
    own, scale = np.empty(n), np.abs(row[np.arange(n), forest.level])
    for level in reversed(range(depth)):
        at = forest.at_level[level]
        entries = row[at, : level + 1] + below[at, level, : level + 1]
        pivot = entries[:, level]
        good = pivot > _LEAST_PIVOT * scale[at]
        own[at] = np.where(good, pivot, np.where(scale[at] > 0.0, scale[at], 1.0))
        row[at, :level] = np.where(good[:, None], entries[:, :level], 0.0)
        if level:
            left = row[at, :level]
            added = below[at, :level, :level] - left[:, :, None] * left[:, None] / own[at, None, None]
            parents, sums = forest.to_parents(added, level, axis=0)
            below[parents, :level, :level] += sums
    factor = np.zeros((n, depth))
    for level, at in enumerate(forest.at_level):
        factor[at, level] = 1.0 / np.sqrt(own[at])
        for above in range(level):
            weight = -row[at, above] / own[at]
            factor[at, :level] += weight[:, None] * factor[forest.path[at, above], :level]
    return factor


def _precision_matrix(forest: Forest, factor: Array) -> sparse.csr_array:
    """Return the factor as a sparse matrix, (n_local, n_local)."""
    on_path = np.arange(forest.n_levels) <= forest.level[:, None]
    rows = np.broadcast_to(np.arange(forest.n_local)[:, None], on_path.shape)[on_path]
    shape = (forest.n_local, forest.n_local)
    return sparse.csr_array((factor[on_path], (rows, forest.path[on_path])), shape=shape)


# --- the exact step after a Gaussian fit: whether a model allows it, what it would cost, and the posterior it gives ---

logger = logging.getLogger("pymc.ngvi")

#: Level of the rules of quadrature behind the precision of the local coordinates.
_COARSE = 1
#: Globals up to which a regression is sampled: it has no thin bent tails; with few events, all of 16 to 41 were right.
_MOST_OF_REGRESSION = 60
#: Draws behind the precision of the local coordinates, and behind the look at the weights of q; their seed.
_N_PRECISION, _N_WEIGHED, _SEED = 8, 256, 20_260_302
#: Relative variance of the weights of q below which there is nothing to gain, and next to nothing.
_EVEN, _NEARLY_EVEN = 0.002, 0.05
#: The log of the factor by which draws of Gaussians about the same mean, narrower and far wider, may find more.
_MOST_FARTHER = 0.05
#: Scales of these, q's own twice; seconds that such a look may take, and draws of q at most; degrees of freedom that
#: make a Gaussian of a Student t.
_SCALES, _OF_LOOK, _MOST_WEIGHED, _GAUSSIAN = (1.0, *SCALES), 0.05, 16_384, 1e6


def forest_of(density: ModelDensity) -> Forest:
    """Return the globals and trees of a model."""
    if density.has_minibatch:
        raise Unavailable(Reason.IN_PART, "the model reads pm.Minibatch data")
    try:
        forest = find_forest(density.structural_pattern, density.n_dim, [v.where for v in density.layout.variables])
    except NoForest as reason:
        raise Unavailable(reason.code, reason.sentence) from None
    if density.is_sharded and forest.n_local and density.n_directions is None:
        raise Unavailable(Reason.IN_PART, "the data are in shards, and log p is no sum over rows")
    most = _MOST_OF_REGRESSION if forest.n_globals > MOST_PLAIN and _is_regression(density) else MOST_PLAIN
    if not forest.n_local and forest.n_globals > most:
        raise Unavailable(
            Reason.NO_FOREST,
            f"the model has no independent blocks, and its {forest.n_globals} parameters are more than the "
            f"{most} that can be sampled",
        )
    return forest


def _is_regression(density: ModelDensity) -> bool:
    """Tell whether rows are functions of one predictor each, and of shapes that are the same for all.

    Scales of priors are no such shapes: coefficients are as wide as these.
    """
    rows = None if density.is_sharded or density.is_streamed else density.by_rows.found
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


def is_nearly_even(density: ModelDensity, q: GaussianState) -> bool:
    """Tell whether no expectation under a Gaussian fit is far off, by its importance weights."""
    return is_even(density, q, _NEARLY_EVEN)


def is_even(density: ModelDensity, q: GaussianState, most: float = _EVEN) -> bool:
    """Tell whether the importance weights of a Gaussian fit are nearly equal, so that it is the posterior.

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
    log_p = np.concatenate([log_p, Plain(density.logp)(theta[n:])[0]])
    each = [q.log_density(mean + (theta - mean) / s) - q.n_dim * np.log(s) for s in _SCALES]
    log_mixture = logsumexp(each, axis=0)
    mass = logsumexp(log_p - log_mixture) - log_ratio.mean() - logsumexp(each[0] - log_mixture)
    return bool(mass < _MOST_FARTHER)


def _look(density: ModelDensity, q: GaussianState) -> Array:
    """Return draws of q, and as many of Gaussians about its mean, narrower and far wider."""
    n = int(np.clip(_OF_LOOK / prices.of_value(density.gradient_seconds), _N_WEIGHED, _MOST_WEIGHED) / 2)
    scales = np.repeat(_SCALES, n)[:, None]
    return q.draws(scales * np.random.default_rng(_SEED).standard_normal((len(scales), q.n_dim)))


def _round_of_look(density: ModelDensity, q: GaussianState, cov: Array) -> Round:
    root = np.linalg.cholesky(cov)
    scales = mixture_of([Base(q.mean(), scale * root) for scale in _SCALES], _GAUSSIAN)
    theta = _look(density, q)
    return Round(Proposal(scales, Bend()), theta, Plain(density.logp)(theta)[0])


def efficiency_of(density: ModelDensity, q: GaussianState) -> float:
    """Return the part of the draws of a Gaussian fit that is effective; 0 where one is outside the support."""
    theta = q.draws(np.random.default_rng(_SEED).standard_normal((_N_WEIGHED, q.n_dim)))
    log_ratio = density.logp(theta) - q.log_density(theta)
    return effective_size(log_ratio) / len(theta) if np.isfinite(log_ratio).all() else 0.0


def exact_posterior(
    density: ModelDensity,
    q: GaussianState,
    forest: Forest,
    seed: int,
    expect: Callable[[float], object] = bool,
    others: Sequence[GaussianState] = (),
) -> PoolState:
    """Return the exact posterior."""
    mean = q.mean()
    cov = _cov_of_globals(q, forest)
    elsewhere = [(other.mean()[forest.globals_], _cov_of_globals(other, forest)) for other in others]
    fitted = FittedDensity(density, forest, mean)
    if not forest.n_local:
        look = _round_of_look(density, q, cov) if forest.n_globals <= MOST_PLAIN else None
        most_values = prices.left() / prices.of_value(density.gradient_seconds)
        sampler = Sampler(fitted.logp, mean, cov, seed, others=elsewhere, look=look, most_values=most_values)
        sampled = _run(sampler)
        return IntegratedTrees(sampled, sampler.sequences, forest, None, fitted).with_pool(q, tuple(others))
    try:
        fitted.split()
    except CannotSplit as reason:
        raise Unavailable(reason.code, reason.sentence) from None
    except Exception as error:  # an operation that is not to be vectorised: the Gaussian is there all the same
        logger.debug("The terms of log p can't be compiled one by one.", exc_info=True)
        said = f"the terms of log p can't be compiled one by one ({type(error).__name__})"
        raise Unavailable(Reason.NOT_SPLIT, said) from error
    centres = linear_centres(forest, _precision(density, q), mean)
    is_concave = forest.n_levels > 1 or not rows_not_concave(density)[forest.locals_].any()
    quadrature = LogMarginal(fitted, forest, centres, is_concave=is_concave)
    between = ratios(density, forest.globals_) if isinstance(density, LogDensity) else []
    sampler = Sampler(quadrature, mean[forest.globals_], cov, seed, expect, others=elsewhere, ratios=between)
    with quadrature.remembering():
        sampled = _run(sampler)
        state = IntegratedTrees(sampled, sampler.sequences, forest, quadrature, fitted).with_pool(q, tuple(others))
        state.mean()  # from what is known at draws of the pool
    return state


def _run(sampler: Sampler) -> Sampled:
    try:
        return sampler.run()
    except Hopeless as reason:
        raise Unavailable(reason.code, reason.sentence) from None
    except np.linalg.LinAlgError:
        raise Unavailable(Reason.SINGULAR, "a covariance of the global parameters is singular") from None


def _cov_of_globals(q: GaussianState, forest: Forest) -> Array:
    block = getattr(q, "cov_block", None)
    if block is not None:
        return block(forest.globals_)
    return q.cov()[np.ix_(forest.globals_, forest.globals_)]


def _precision(density: ModelDensity, q: GaussianState) -> sparse.csr_array:
    """Return minus the mean Hessian of log p under q, on the pattern of the model."""
    if density.n_directions is not None and hasattr(q, "covariances"):
        try:
            precision = _as_matrix(density.expected(q, density.rules_of_level(_COARSE)).hessian)
            if np.isfinite(precision.data).all():
                return precision
        except OtherForm:
            logger.debug("Rows have entries that the pattern lacks.", exc_info=True)
    theta = q.draws(np.random.default_rng(_SEED).standard_normal((_N_PRECISION, q.n_dim)))
    return _as_matrix(density.mean_hessian(theta))


def _as_matrix(hessian: MeanHessian) -> sparse.csr_array:
    """Return minus a Hessian."""
    if hessian.pattern is not None:
        return hessian.pattern.symmetric(-hessian.values())
    n_dim = len(hessian.diagonal())
    products = hessian.products(np.eye(n_dim))
    return sparse.csr_array(-0.5 * (products + products.T))
