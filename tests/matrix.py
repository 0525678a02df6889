"""The one list of combinations that the suites iterate over, and what they need to do so for any row of it.

A new row in the registry takes part in every test that is parametrised here.
"""

import itertools

import numpy as np
import pytest

from targets import Quadratic, block_labels, restrict

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import (
    FAMILIES,
    BlockFamily,
    BlockStructure,
    DiagonalState,
    FullPrecisionState,
    FullState,
    MixtureFamily,
    SparseFamily,
)
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import SparseStructure
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting import problem as starting
from pymc_ngvi.fitting import session as begun
from pymc_ngvi.fitting.options import ALLOWED, ON_FIXED_DRAWS, Choice, FitOptions
from pymc_ngvi.methods.estimators import Moments

COMBINATIONS = tuple(Choice(*row) for row in ALLOWED)
#: Those of families that are Gaussian; the others have tests of their own.
OF_GAUSSIANS = tuple(choice for choice in COMBINATIONS if FAMILIES[choice.family].traits.is_gaussian)
#: Those that are solved to the tolerance on any target: the default step rule.
ADAPTIVE = tuple(choice for choice in COMBINATIONS if choice.step == "adaptive")
#: Of these, the ones whose steps of size 1 are exact for Gaussian targets: the default of each family.
NATURAL = tuple(choice for choice in ADAPTIVE if choice.update == "natural")
STOCHASTIC = tuple(choice for choice in COMBINATIONS if choice.step not in ON_FIXED_DRAWS)
#: Structures of a triangular factor of q, with the second factorisation of a dense one.
WITH_FACTOR = ("full", "diagonal", "block", "full precision", "sparse")
#: Those that hold a factor of the precision. What is not closed under inverses is not theirs: a function of the
#: eigenvalues of a curvature, and averages of covariances.
OF_PRECISION = ("full precision", "sparse")
OF_COVARIANCE = tuple(family for family in WITH_FACTOR if family not in OF_PRECISION)


def _id(choice):
    return "-".join(vars(choice).values())


def pairs_once(choices):
    """Return some of the combinations: each pair of parts that go together is in one of them."""
    pairs = {choice: set(itertools.combinations(vars(choice).items(), 2)) for choice in choices}
    kept, missing = [], set().union(*pairs.values())
    while missing:
        kept.append(max(choices, key=lambda choice: len(pairs[choice] & missing)))
        missing -= pairs[kept[-1]]
    return kept


each_natural = pytest.mark.parametrize("choice", NATURAL, ids=_id)
each_adaptive = pytest.mark.parametrize("choice", ADAPTIVE, ids=_id)
#: Families that hold every Gaussian: here, the structure of the sparse one leaves nothing out.
each_full_adaptive = pytest.mark.parametrize("choice", [c for c in ADAPTIVE if c.family in ("full", "sparse")], ids=_id)
each_stochastic_pair = pytest.mark.parametrize("choice", pairs_once(STOCHASTIC), ids=_id)
each_family = pytest.mark.parametrize("family", WITH_FACTOR)
two_seeds = pytest.mark.parametrize("seed", [1, 2], ids=["seed1", "seed2"])


def family_object(family, n_dim):
    """Return what makes a state of location and scale."""
    if family == "block":
        return BlockFamily(BlockStructure(block_labels(n_dim)))
    if family == "sparse":  # one block and a border, which leave nothing out: any target will do
        return SparseFamily(SparseStructure.of_blocks(Partition(np.where(np.arange(n_dim) < (n_dim + 1) // 2, 0, -1))))
    if isinstance(family, tuple):  # the block of each coordinate
        return SparseFamily(SparseStructure.of_blocks(Partition(family)))
    if family == "mixture":
        return MixtureFamily(FullState)
    return FullPrecisionState if family == "full precision" else FAMILIES[family]()


def state_of(family, mean, cov):
    """Return the state of a family with a given mean and covariance; what it can't represent is left out."""
    if family == "diagonal":
        return DiagonalState(mean, np.sqrt(np.diag(cov)))
    if family == "full precision":
        return FullPrecisionState(mean, np.linalg.cholesky(np.linalg.inv(cov)))
    if family == "full":
        return FullState(mean, np.linalg.cholesky(cov))
    start = family_object(family, len(mean)).from_scale(mean, np.ones(len(mean)))
    of_precision = isinstance(family, tuple)
    precision = restrict(family, np.linalg.inv(cov)) if of_precision else np.linalg.inv(restrict(family, cov))
    target = Quadratic(mean, precision)
    if of_precision:
        target.pattern = start.structure.pattern
    return start.precision_scaled_by(start.curvature(target.mean_hessian(mean[None])), np.zeros(len(mean)))[0]


def random_state(family, n_dim, rng):
    """Return a state with random mean, and random lower triangle or standard deviations."""
    factor = np.tril(rng.standard_normal((n_dim, n_dim)))
    factor[np.diag_indices(n_dim)] = np.exp(0.7 * rng.standard_normal(n_dim))
    return state_of(family, 2.0 * rng.standard_normal(n_dim), factor @ factor.T)


def as_curvature(state, matrix):
    """Return a symmetric matrix in the form of the family, which leaves out what it does not store."""
    params = state.params()
    if "sd" in params:
        return np.diag(matrix).copy()
    if "cholesky_blocks" in params:
        return matrix[state.structure.rows, state.structure.columns]
    if "precision_cholesky_panels" in params:
        pattern = Pattern.of(np.ones_like(matrix))
        return state.structure.mirrored(state.structure.panels_of(pattern, matrix[pattern.rows, pattern.cols]))
    return 0.5 * (matrix + matrix.T)


def as_matrix(state, curvature):
    """Return a curvature as a matrix."""
    if "precision_cholesky_panels" in state.params():
        return symmetric_matrix(state.structure, curvature)
    return state.structure.entries(curvature, *np.indices((state.n_dim, state.n_dim)))


def factor_matrix(state, factor=None):
    """Return what has the form of a factor, by default the factor itself, as a matrix."""
    factor = state.factor if factor is None else factor
    return (
        lower_matrix(state.structure, factor) if state.factor_sign < 0 < factor.ndim < 2 else as_matrix(state, factor)
    )


def symmetric_matrix(structure, curvature):
    """Return the symmetric matrix of a curvature in the form of panels."""
    half, result = lower_matrix(structure, structure.half(curvature)), np.zeros((structure.n_dim,) * 2)
    result[np.ix_(structure.order, structure.order)] = half + half.T
    return result


def lower_matrix(structure, panels):
    """Return the lower-triangular matrix of some panels, in the order of elimination."""
    order, (i, j) = structure.order, np.tril_indices(structure.n_dim)
    at, result = structure.places(order[i], order[j]), np.zeros((structure.n_dim,) * 2)
    result[i, j] = np.where(at < 0, 0.0, panels[at])
    return result


def whitener(state):
    """Return C, covariance C C^T, as the family's own draws show it."""
    return (state.draws(np.eye(state.n_dim)) - state.draws(np.zeros((state.n_dim, state.n_dim)))).T


def make_rule(target, choice, *, seed, **options):
    """Return the step rule of a combination on a target."""
    return begun.make_rule(target, FitOptions(**choice.given(), **options), seed)


def first_state(rule, target, choice, location=None):
    """Return the loop's state before the first iteration, with the scale chosen as a fit does."""
    location = np.zeros(target.n_dim) if location is None else location
    scales = [np.full(target.n_dim, scale) for scale in starting.START_SCALES]
    of_precision = FitOptions(**choice.given()).factor == "precision"
    name = "full precision" if of_precision and choice.family == "full" else choice.family
    return loop.start(rule, starting.choose_start(rule, family_object(name, target.n_dim), location, scales, target))


def ignore(state):
    """Observe an iteration and do nothing."""


def fit(target, choice, *, n=200, location=None, observe=ignore, **options):
    """Fit a target, any `Target`, through the loop; return the rule and the loop's last state."""
    rule = make_rule(target, choice, **options)
    return rule, loop.run(rule, first_state(rule, target, choice, location), n, observe)


def state_kind(choice):
    """Return the family of a combination, as the tests name it: a dense q has two factorisations."""
    of_precision = FitOptions(**choice.given()).factor == "precision"
    return "full precision" if of_precision and choice.family == "full" else choice.family


#: Family and update of every allowed combination, each once; with either factor of a dense q, where the update does.
PAIRS = tuple(
    dict.fromkeys(
        [(state_kind(choice), choice.update) for choice in OF_GAUSSIANS]
        + [("full", "euclidean"), ("full precision", "natural")]
    )
)
#: Families of the updates that work on precisions.
NATURAL_FAMILIES = tuple(family for family, update in PAIRS if update == "natural")


def stored(family, matrix):
    """Return the entries of a matrix that a family stores, the others 0."""
    return restrict("full" if family == "full precision" else family, matrix)


def moments_of(state, grad, curvature):
    """Return whitened moments of E[grad log p] and -E[hess log p], both given in the coordinates of theta."""
    c = whitener(state)
    return whitened_moments(c.T @ grad, as_curvature(state, c.T @ curvature @ c))


def whitened_moments(grad, curvature):
    """Return moments as an estimator without noise would."""
    zero = np.zeros(len(grad))
    return Moments(grad, curvature, grad_se=zero, curvature_se=zero, gap=0.0, floor=0.0, floor_sd=0.0)


def half_triangle(matrix):
    """Return the lower triangle with its diagonal halved."""
    return np.tril(matrix) - 0.5 * np.diag(np.diag(matrix))


def path(rule, q, n):
    """Return the states of a rule after 0, ..., n iterations."""
    states = [rule.init(q)]
    for _ in range(n):
        states.append(rule.step(states[-1]))
    return states
