"""The exact step after a Gaussian fit: whether a model allows it, what it would cost, and the posterior it gives."""

import logging

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scipy import sparse

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.refusal import OtherForm, Reason, Refused
from pymc_ngvi.core.target import MeanHessian
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.blocks import CannotSplit
from pymc_ngvi.marginal.conditional_gaussian import linear_centres
from pymc_ngvi.marginal.fitting import WANTED, Hopeless, Sampler
from pymc_ngvi.marginal.forest import Forest, NoForest, find_forest
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import first_rule
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.marginal.sampling import Sampled
from pymc_ngvi.marginal.state import ExactState

logger = logging.getLogger("pymc.ngvi")

#: Level of the rules of quadrature behind the precision of the local coordinates.
_COARSE = 1
#: Globals up to which a model without local coordinates is sampled.
_MOST_PLAIN = 15
#: Draws behind the precision of the local coordinates, and behind the look at the weights of q; their seed.
_N_PRECISION, _N_WEIGHED, _SEED = 8, 256, 20_260_302
#: Relative variance of the weights of q below which there is nothing to gain.
_EVEN = 0.002
#: How much wider draws are that look for mass elsewhere, and the log of the factor by which they may find more.
_WIDER, _MOST_FARTHER = 3.0, 0.05
#: Draws of the globals that adapting takes, about, for each of them; part of a gradient that a value of log p costs.
_ADAPTING, _OF_GRADIENT = 60.0, 0.4
#: Seconds of a value of log p by rows, on one thread: calls, and each row.
_PER_VALUE, _PER_ROW = 2e-4, 3.3e-8


class Unavailable(Refused):
    """There is no exact step for a fit.

    Parameters
    ----------
    code : Reason
    sentence : str
        Why, in a clause.
    on_request : str
        The value of ``posterior`` that would have it all the same; empty where none has.
    """

    def __init__(self, code: Reason, sentence: str, on_request: str = "") -> None:
        super().__init__(code, sentence)
        self.on_request = on_request


def if_available[T](find: Callable[[ModelDensity], T], density: ModelDensity) -> T | None:
    """Return what a model is found to have for a posterior of another kind; None where that is Unavailable."""
    try:
        return find(density)
    except Unavailable:
        return None


@dataclass(frozen=True)
class Work:
    """What the exact step would cost, in estimated seconds: the same on a busy machine.

    Parameters
    ----------
    n_values : float
        Values of log p that it takes, where a cheap rule of quadrature will do.
    each : float
        Seconds of one.
    has_blocks : bool
        Whether blocks are integrated: a Gaussian may be far off then, and weights of all coordinates no cure.
    """

    n_values: float
    each: float
    has_blocks: bool = True

    @property
    def seconds(self) -> float:
        """Of the exact step."""
        return self.n_values * self.each

    def most_values(self, seconds: float) -> float:
        """Return the values of log p that a pool may take in some seconds, and those that it is known to take."""
        return max(seconds, self.seconds) / self.each


def forest_of(density: ModelDensity) -> Forest:
    """Return the globals and trees of a model.

    Raises
    ------
    Unavailable
        Where it has none that will do.
    """
    if density.has_minibatch:
        raise Unavailable(Reason.IN_PART, "the model reads pm.Minibatch data")
    try:
        forest = find_forest(density.structural_pattern, density.n_dim, [v.where for v in density.layout.variables])
    except NoForest as reason:
        raise Unavailable(reason.code, reason.sentence) from None
    if density.is_sharded and forest.n_local and density.n_directions is None:
        raise Unavailable(Reason.IN_PART, "the data are in shards, and log p is no sum over rows")
    if not forest.n_local and forest.n_globals > _MOST_PLAIN:
        raise Unavailable(
            Reason.NO_FOREST,
            f"the model has no independent blocks, and its {forest.n_globals} parameters are more than the "
            f"{_MOST_PLAIN} that can be sampled",
        )
    return forest


def work_of(forest: Forest, seconds: float, n_rows: int = 0) -> Work:
    """Return what the exact step would cost.

    Parameters
    ----------
    forest : Forest
    seconds : float
        Of a gradient.
    n_rows : int, default 0
        Over which the fit took expectations, at many nodes each; 0 where it took draws.
    """
    n_draws = 1.5 * WANTED + _ADAPTING * forest.n_globals
    n_nodes = len(first_rule(forest.n_levels).nodes) if forest.n_local else 1
    # Most draws are evaluated at one node, some by the reference rule.
    n_values = n_draws + (300.0 * n_nodes if forest.n_local else 0.0)
    each = _PER_VALUE + _PER_ROW * n_rows if n_rows else _OF_GRADIENT * seconds
    return Work(n_values, max(each, 1e-9), forest.n_local > 0)


def is_even(density: ModelDensity, q: GaussianState) -> bool:
    """Tell whether the importance weights of a Gaussian fit are nearly equal, so that it is the posterior.

    Draws of q alone know nothing of what it misses: others, from a wider one, are not to find more mass.
    """
    z = np.random.default_rng(_SEED).standard_normal((2 * _N_WEIGHED, q.n_dim))
    own, far = q.draws(z[:_N_WEIGHED]), q.draws(_WIDER * z[_N_WEIGHED:])
    log_ratio = density.logp(own) - q.log_density(own)
    if not np.isfinite(log_ratio).all():
        return False
    if not len(own) / effective_size(log_ratio) - 1.0 < _EVEN:
        return False
    theta = np.concatenate([own, far])
    mean = q.mean()
    of_wide = q.log_density(mean + (theta - mean) / _WIDER) - q.n_dim * np.log(_WIDER)
    log_p = density.logp(theta)
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    mass = logsumexp(log_p - np.logaddexp(q.log_density(theta), of_wide)) - np.log(_N_WEIGHED)
    return bool(mass - log_ratio.mean() < _MOST_FARTHER)


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
    most: Callable[[], float] = lambda: np.inf,
    others: Sequence[GaussianState] = (),
) -> ExactState:
    """Return the exact posterior.

    Parameters
    ----------
    density : ModelDensity
    q : GaussianState
        The Gaussian fit.
    forest : Forest
    seed : int
    most : callable
        Returns how many evaluations of log p the pool may take: asked where no cheap rule will do.
    others : sequence of GaussianState
        At other modes: globals are looked for there, too.

    Raises
    ------
    Unavailable
        Where terms of log p depend on several blocks at once.
    """
    mean = q.mean()
    cov = _cov_of_globals(q, forest)
    elsewhere = [(other.mean()[forest.globals_], _cov_of_globals(other, forest)) for other in others]
    fitted = FittedDensity(density, forest, mean)
    if not forest.n_local:
        sampler = Sampler(fitted.logp, mean, cov, seed, others=elsewhere)
        return ExactState(_run(sampler), sampler.sequences, q, forest, None, fitted, others=tuple(others))
    try:
        fitted.split()
    except CannotSplit as reason:
        raise Unavailable(reason.code, reason.sentence) from None
    except Exception as error:  # an operation that is not to be vectorised: the Gaussian is there all the same
        logger.debug("The terms of log p can't be compiled one by one.", exc_info=True)
        said = f"the terms of log p can't be compiled one by one ({type(error).__name__})"
        raise Unavailable(Reason.NOT_SPLIT, said) from error
    centres = linear_centres(forest, _precision(density, q), mean)
    quadrature = LogMarginal(fitted, forest, centres)
    sampler = Sampler(quadrature, mean[forest.globals_], cov, seed, most, others=elsewhere)
    with quadrature.remembering():
        state = ExactState(_run(sampler), sampler.sequences, q, forest, quadrature, fitted, others=tuple(others))
        state.mean()  # from what is known at draws of the pool
    return state


def _run(sampler: Sampler) -> Sampled:
    try:
        return sampler.run()
    except Hopeless as reason:
        on_request = "exact" if reason.code is Reason.TOO_LONG else ""
        raise Unavailable(reason.code, reason.sentence, on_request) from None
    except np.linalg.LinAlgError:
        raise Unavailable(Reason.SINGULAR, "a covariance of the global parameters is singular") from None


def _cov_of_globals(q: GaussianState, forest: Forest) -> Array:
    block = getattr(q, "cov_block", None)
    if block is not None:
        result: Array = block(forest.globals_)
        return result
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
