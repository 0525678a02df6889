"""Where a fit begins: from the best of some states, and again where the structure of the Hessian was too narrow."""

import logging

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from numpy.typing import ArrayLike

from pymc_ngvi.core.refusal import OtherForm, RowsGivenUp
from pymc_ngvi.core.status import StartError
from pymc_ngvi.core.stream import StreamTarget
from pymc_ngvi.core.types import Array, Rule, Target, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting import loop, starting
from pymc_ngvi.fitting.earlier import Earlier
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.problem import Problem, problem_by_draws, problem_of
from pymc_ngvi.fitting.registry import AXES, RULES
from pymc_ngvi.steps.incremental.rule import Incremental
from pymc_ngvi.updates import DIRECTIONS

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
            start = starting.choose_start(rule, problem.family, mean, narrower, density)
        except StartError:  # nor is the mean inside
            start = starting.choose_start(rule, problem.family, density.initial_point(), narrower, density)
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


class FirstState(NamedTuple):
    """The best state to start from, and what it is a state of; the options may have become others."""

    problem: Problem
    rule: Rule
    state: VariationalState
    options: FitOptions


def first_state(
    problem: Problem,
    options: FitOptions,
    seed: int,
    start: Mapping[str, ArrayLike] | Earlier | None,
    start_sigma: Mapping[str, ArrayLike] | float | None,
) -> FirstState:
    """Return the best state to start from.

    The fit is one with draws where no Gaussian stays in the support, or where rows turn out not to be all of log p; and
    q gets the entries of the Hessian that its structure left out.
    """
    density = problem.density
    for _ in range(MAX_WIDENED):
        try:
            return _tried(problem, options, seed, start, start_sigma)
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
                mean = starting.start_point(density, start.mean if isinstance(start, Earlier) else start)
                _look_for_entries(density, options, seed, mean, starting.start_scales(density, start_sigma)[-1])
                problem = problem_of(density, options)
    raise ValueError(NO_STRUCTURE)


def _tried(
    problem: Problem,
    options: FitOptions,
    seed: int,
    start: Mapping[str, ArrayLike] | Earlier | None,
    start_sigma: Mapping[str, ArrayLike] | float | None,
) -> FirstState:
    earlier, means = (start, start.mean) if isinstance(start, Earlier) else (None, start)
    point, scales = problem.start(means, start_sigma)
    if options.choice.is_for_networks:
        point = starting.units_apart(problem.density, point, means, seed)
    rule, state = make_rule(problem.target, options, seed), None
    if earlier is not None and start_sigma is None:
        state = earlier.state(rule, problem, point, scales)
    if state is None:
        state = problem.first_state(rule, point, scales, means)
    return FirstState(problem, rule, state, options)


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
