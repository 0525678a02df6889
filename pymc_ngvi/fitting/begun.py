"""Where a fit begins: from the best of some states, and again where the structure of the Hessian was too narrow."""

import logging

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.refusal import OtherForm, RowsGivenUp
from pymc_ngvi.core.status import StartError
from pymc_ngvi.core.stream import StreamTarget
from pymc_ngvi.core.target import MatrixHessian
from pymc_ngvi.core.types import Array, FittedState, GaussianState, Rule, Target, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import FilledState, MixtureState, SparseState, StudentTState, SummedState
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.problem import (
    Problem,
    choose_start,
    large_scales,
    problem_by_draws,
    problem_of,
    start_point,
    start_scales,
    units_apart,
)
from pymc_ngvi.fitting.registry import AXES, RULES
from pymc_ngvi.reparam.row_space import RowSpaceDensity
from pymc_ngvi.steps.incremental import Incremental
from pymc_ngvi.updates import DIRECTIONS

# --- a fit that starts from another one: from its mean and covariance, as far as the new family can hold them ---

#: Dimensions up to which covariances are taken over; above, standard deviations are.
_MOST_DIMS = 5_000


@dataclass(frozen=True)
class Earlier:
    """Mean and covariance of an earlier fit, for the variables that a model shares with it."""

    #: Of the earlier fit, unconstrained.
    q: VariationalState
    #: By name of the value variable.
    mean: dict[str, Array]
    #: Flat coordinates of the shared variables in the model, and in q; shape (n_shared,).
    ours: NDArray[np.intp]
    theirs: NDArray[np.intp]

    @classmethod
    def of(cls, approx: Any, density: ModelDensity) -> "Earlier":
        """Find the variables of an `NGVIApproximation` in a model, by the names of their unconstrained values."""
        old, new = ({v.value_name: v for v in layout.variables} for layout in (approx.layout, density.layout))
        shared = [name for name in new if name in old]
        if not shared:
            raise ValueError(
                f"start is a fit of other variables, {', '.join(map(repr, old))}; those of the model are "
                f"{', '.join(map(repr, new))}. Variables are matched by the names of their unconstrained values."
            )
        for name in shared:
            if old[name].shape != new[name].shape:
                raise ValueError(
                    f"start is a fit in which {name!r} has shape {old[name].shape}; in the model it has shape "
                    f"{new[name].shape}. Give start as a dict of the values that fit."
                )
        q = approx._begins_with
        mean = q.mean()
        index = [[np.arange(of[n].where.start, of[n].where.stop) for n in shared] for of in (new, old)]
        ours, theirs = (np.concatenate(part) for part in index)
        return cls(q, {n: mean[old[n].where].reshape(old[n].shape) for n in shared}, ours, theirs)

    def state(self, rule: Rule, problem: Problem, point: Array, scales: Sequence[Array]) -> VariationalState | None:
        """Return the start with the best ELBO on the first draws; None where log p is not finite at all of them."""
        best, best_elbo = None, -np.inf
        for state in self._states(problem, point, scales):
            evaluation = rule.first_evaluation(state)
            if evaluation.finite.all() and evaluation.elbo > best_elbo:
                best, best_elbo = state, evaluation.elbo
        return best

    def _states(self, problem: Problem, point: Array, scales: Sequence[Array]) -> Iterator[VariationalState]:
        if isinstance(problem.target, RowSpaceDensity):
            yield from (problem.family.from_scale(point, scale) for scale in scales)
            return
        taken = np.arange(len(self.ours))
        if problem.transform is not None:  # relative to the global parameters, others are not what they were
            border = problem.transform.structure.border
            taken = np.flatnonzero(np.isin(self.ours, border))
        ours, theirs = self.ours[taken], self.theirs[taken]
        sd = self.q.sd()[theirs]
        for scale in scales if len(ours) < len(point) else scales[:1]:
            scale = scale.copy()
            scale[ours] = sd
            template = problem.family.from_scale(point, scale)
            if problem.transform is None and self._is_of_kind(template):
                yield self.q
            else:
                precision = self._precision(scale, ours, theirs)
                yield template if precision is None else _with_precision(template, precision)

    def _is_of_kind(self, template: VariationalState) -> bool:
        """Whether q is a state of the new family as it is: one of the same class, form and coordinates."""
        if type(template) is not type(self.q) or not np.array_equal(self.ours, self.theirs):
            return False
        new, old = map(methodcaller("arrays"), (template, self.q))
        params = template.params()  # the others are of the form
        return new.keys() == old.keys() and all(
            a.shape == old[name].shape and (name in params or np.array_equal(a, old[name])) for name, a in new.items()
        )

    def _precision(self, scale: Array, ours: NDArray[np.intp], theirs: NDArray[np.intp]) -> Array | None:
        """Return the precision of all coordinates, of which the others are independent; None where it is too large."""
        if max(len(scale), self.q.n_dim) > _MOST_DIMS:
            return None
        block = getattr(self.q, "cov_block", None)
        covariance = np.diag(scale**2)
        covariance[np.ix_(ours, ours)] = self.q.cov()[np.ix_(theirs, theirs)] if block is None else block(theirs)
        factor = linalg.cholesky(covariance)
        if factor is None:
            return None
        half = linalg.solve_lower(factor, np.eye(len(scale)))
        return half.T @ half  # families keep some of its entries


def _with_precision(state: FittedState, precision: Array) -> FittedState:
    """Return the state with a precision, or what its family holds of that; the state itself where that is no state."""
    if isinstance(state, MixtureState):
        return MixtureState.of([_gaussian_with(state.components[0], precision)])
    if isinstance(state, StudentTState):
        return replace(state, gaussian=_gaussian_with(state.gaussian, precision))
    return _gaussian_with(state, precision) if isinstance(state, Gaussian) else state


def _gaussian_with(state: GaussianState, precision: Array) -> GaussianState:
    if isinstance(state, SummedState):  # which sums a dense matrix has is not known
        return state
    hessian = MatrixHessian(
        -precision, state.structure.pattern if isinstance(state, SparseState | FilledState) else None
    )
    found = state.precision_scaled_by(state.curvature(hessian), np.zeros(state.n_dim))
    return state if found is None else found[0]


# --- where a fit begins: from the best of some states, and again where the structure of the Hessian was too narrow --

# A child of PyMC's logger, which has the handler.
logger = logging.getLogger("pymc.ngvi")

#: Times that the structure of a Hessian may turn out to be too narrow, at most.
MAX_WIDENED = 5
#: Points at which entries of the Hessian are looked for that exact expectations have and its structure has not.
_N_LOOKED_AT = 4
#: Parts of standard deviations to begin with where a Gaussian has left the support.
_NARROWER = (1.0, 0.1, 0.01)
#: Said where a fit by quadrature becomes one with draws.
BY_DRAWS = "Expectations by quadrature do not serve this model: the fit goes on with draws."
#: Said where the structure of a Hessian is no structure.
NO_STRUCTURE = (
    "The Hessian of this model's log density turned out to have many more entries than its graph shows: take "
    "family='full', 'block' or 'diagonal'."
)


class Begun(NamedTuple):
    """A problem, what takes its steps, where these have led, and the options, which may have become others."""

    problem: Problem
    rule: Rule
    state: loop.LoopState
    options: FitOptions

    @classmethod
    def at(cls, problem: Problem, rule: Rule, options: FitOptions, seed: int, q: VariationalState) -> "Begun":
        """Begin from a state, or from its mean and standard deviations where the Hessian turns out to be wider."""
        try:
            return cls(problem, rule, loop.start(rule, q), options)
        except OtherForm:
            return cls.wider(problem.density, options, seed, *problem.mean_and_sd(q))

    @classmethod
    def by_draws(cls, density: ModelDensity, options: FitOptions, seed: int, mean: Array, sd: Array) -> "Begun":
        """Begin with draws where rows have led, from narrower states where those would be outside the support."""
        logger.info(BY_DRAWS)
        problem, options = problem_by_draws(density, options)
        rule = make_rule(problem.target, options, seed)
        narrower = [part * sd for part in _NARROWER]
        try:
            start = choose_start(rule, problem.family, mean, narrower, density)
        except StartError:  # nor is the mean inside
            start = choose_start(rule, problem.family, density.initial_point(), narrower, density)
        return cls.at(problem, rule, options, seed, start)

    @classmethod
    def wider(cls, density: ModelDensity, options: FitOptions, seed: int, mean: Array, sd: Array) -> "Begun":
        """Begin again from where a state is, for a Hessian that has turned out to have more entries than it seemed."""
        for _ in range(MAX_WIDENED):
            _look_for_entries(density, options, seed, mean, sd)
            problem = problem_of(density, options)
            rule = make_rule(problem.target, options, seed)
            try:
                return cls(problem, rule, loop.start(rule, problem.state_about(mean, sd)), options)
            except OtherForm:
                continue
        if options.choice.estimator != "quadrature":
            raise ValueError(NO_STRUCTURE)
        density.by_rows.give_up("rows go on having entries that the pattern of the Hessian lacks")
        return cls.by_draws(density, options, seed, mean, sd)


def _look_for_entries(density: ModelDensity, options: FitOptions, seed: int, mean: Array, sd: Array) -> None:
    """Add entries of the Hessian that its structure left out, about a mean; some may have been added already."""
    logger.info("The Hessian of log p has entries that its structure left out: q gets them, too.")
    if options.choice.estimator == "quadrature":  # draws have been looked at already
        z = np.random.default_rng(seed).standard_normal((_N_LOOKED_AT, density.n_dim))
        density.widen(mean + sd * z)
    if options.family_reason and density.pattern is None:
        raise ValueError(NO_STRUCTURE)


def first_state(
    problem: Problem,
    options: FitOptions,
    seed: int,
    start: Mapping[str, ArrayLike] | Earlier | None,
    start_sigma: Mapping[str, ArrayLike] | float | None,
) -> tuple[Problem, Rule, VariationalState, FitOptions]:
    """Return the best state to start from, and what it is a state of; the options may have become others.

    The fit is one with draws where no Gaussian stays in the support, or where rows turn out not to be all of log p; and
    q gets the entries of the Hessian that its structure left out.
    """
    density = problem.density
    earlier, means = (start, start.mean) if isinstance(start, Earlier) else (None, start)
    for _ in range(MAX_WIDENED):
        try:
            point, scales = problem.start(means, start_sigma)
            if options.choice.estimator == "gauss_newton" or options.choice.step == "ivon":  # of networks, whose units
                # may be exchangeable, and should not all start alike
                point = units_apart(density, point, means, seed)
            rule, state = make_rule(problem.target, options, seed), None
            if earlier is not None and start_sigma is None:
                state = earlier.state(rule, problem, point, scales)
            if state is None:
                large = large_scales(density, point, means) if problem.has_own_coordinates else []
                state = choose_start(rule, problem.family, point, scales, density, large)
            return problem, rule, state, options
        except StartError:
            if options == options.with_draws() or density.is_streamed:
                raise
            logger.info(BY_DRAWS)
            problem, options = problem_by_draws(density, options)
        except OtherForm as other:
            if options.choice.estimator == "quadrature" and isinstance(other, RowsGivenUp):
                logger.info(BY_DRAWS)
                problem, options = problem_by_draws(density, options)
            else:
                mean = start_point(density, means)
                _look_for_entries(density, options, seed, mean, start_scales(density, start_sigma)[-1])
                problem = problem_of(density, options)
    raise ValueError(NO_STRUCTURE)


def make_rule(target: Target, options: FitOptions, seed: int) -> Rule:
    """Return the step rule that the options name."""
    choice = options.choice
    rule: Callable[..., Rule] = Incremental if isinstance(target, StreamTarget) else RULES[choice.step]
    return rule(
        target,
        AXES["update"][choice.update],
        AXES["estimator"][choice.estimator],
        direction=DIRECTIONS.get(choice.update),
        seed=seed,
        tol=options.tol,
        stl=options.stl,
        **options.of_rule(),
    )
