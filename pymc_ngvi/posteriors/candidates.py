"""What may come of a model: its candidates, what each takes, and what it is expected to be worth."""

import math

from dataclasses import dataclass

from pymc_ngvi.core import prices
from pymc_ngvi.core.prices import in_words
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.exact import forest_of, if_available
from pymc_ngvi.marginal.fitting import WANTED
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.nodes import first_rule
from pymc_ngvi.nested.posterior import latent_rows_of
from pymc_ngvi.nested.seconds import LEAST, nested_seconds
from pymc_ngvi.posteriors.plan import Candidate, Decision, Plan, TimeBudget

#: Global parameters beyond which another posterior is to be tried before the exact one.
MANY_GLOBALS = 30
#: Chances that a posterior turns out to be exact: with that many globals; given hyperparameters, of latent variables
#: that are not Gaussian.
_WITH_MANY_GLOBALS, _NOT_GAUSSIAN, _UNEVEN = 1.0 / 30.0, 1.0 / 3.0, 1.0 / 100.0
#: Part of the price of a nested posterior after which it is known whether latent variables are nearly Gaussian.
_OF_FAILURE = 0.15
#: Variance of log weights at the mode from which on it is given up where there is an exact posterior.
UNEVEN = 1.5
#: Draws of the globals that adapting takes, about, for each of them; others that are evaluated by all nodes.
_ADAPTING, _REFERRED = 60.0, 300.0
#: Times that draws are gone through, with those of adaptation. In blocks of single coordinates, a base rule of one node
#: will do for most; in others it has so many in each coordinate, and draws are gone through more often.
_ROUNDS, _NODES_OF_BASE, _MORE_LEVELS = 1.5, 3, 2.5
#: Seconds that proposals, rules and moments take in trees, beside values.
_BESIDE_TREES = 0.15
#: Latent variables for each hyperparameter, from which on a nested posterior is worth while.
_MANY = 3
#: Seconds that a nested posterior may take without being asked for, where no Gaussian comes before it.
_MOST_SECONDS = 120.0


def expected_worth(of: Forest | RowsGiven) -> float:
    """Return the chance that a posterior turns out to be exact: of trees, or of rows given hyperparameters."""
    if isinstance(of, RowsGiven):
        return 1.0 if of.is_quadratic else _UNEVEN if of.is_uneven else _NOT_GAUSSIAN
    return _WITH_MANY_GLOBALS if of.n_globals > MANY_GLOBALS else 1.0


@dataclass(frozen=True)
class Work:
    """What the exact posterior takes.

    Parameters
    ----------
    n_values : float
        Values of log p, where a cheap rule of quadrature will do.
    each : float
        Estimated seconds of one.
    beside : float
        Seconds beside these.
    """

    n_values: float
    each: float
    beside: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the exact posterior."""
        return self.beside + self.n_values * self.each

    @classmethod
    def of(cls, forest: Forest, each: float) -> "Work":
        """Return that of globals and trees: most draws are evaluated at few nodes, some by the reference rule."""
        n_draws = 1.5 * WANTED + _ADAPTING * forest.n_globals
        if not forest.n_local:
            return cls(n_draws, each)
        n_nodes = len(first_rule(forest.n_levels).nodes)
        n_base = 1.0 if forest.n_levels == 1 else _MORE_LEVELS * _NODES_OF_BASE**forest.n_levels
        return cls(_ROUNDS * (n_draws * n_base + _REFERRED * n_nodes), each, _BESIDE_TREES)


def work_of(forest: Forest, density: ModelDensity, *, by_rows: bool) -> Work:
    """Return what the exact posterior takes; by rows: where values of log p are those of its rows."""
    rows = density.by_rows.found if by_rows else None
    n_rows = 0 if rows is None else rows.n_rows
    if forest.n_local and n_rows:
        return Work.of(forest, prices.PER_NODE + prices.PER_ROW_OF_NODE * n_rows)
    return Work.of(forest, prices.value_seconds(density, n_rows))


def exact_candidate(forest: Forest, work: Work) -> Candidate:
    """Return the exact posterior as a candidate."""
    return Candidate("exact", seconds=work.seconds, chance=expected_worth(forest))


def nested_candidate(density: ModelDensity) -> Candidate:
    """Return the nested posterior as a candidate.

    Raises
    ------
    Unavailable
        Where there is none.
    """
    return _nested(latent_rows_of(density))


def _nested(given: RowsGiven) -> Candidate:
    chance = expected_worth(given)
    return Candidate("nested", seconds=nested_seconds(given), chance=chance, of_failure=_OF_FAILURE)


def comes_before_nested(exact: Candidate) -> bool:
    """Tell whether the exact posterior comes first whatever a nested one takes: its rows need not be looked for."""
    return exact.expected_seconds < LEAST


def budget_after(density: ModelDensity, record: FitRecord, wanted: str, max_seconds: float | None) -> TimeBudget:
    """Return what a Gaussian fit took, and what it leaves."""
    of_fit = prices.fit_seconds(density, record.n_gradients, record.n_hessians, record.estimator)
    if max_seconds is not None:
        of_fit += record.n_searched * density.gradient_seconds
    unlimited = wanted != "auto" and max_seconds is None
    return TimeBudget(of_fit, math.inf if unlimited else max_seconds)


# --- without a Gaussian fit before it ---------------------------------------------------------------------------------


def plan_without_gaussian(options: FitOptions, density: ModelDensity) -> Plan | None:
    """Return the plan where the nested posterior comes before any Gaussian fit; None where it does not.

    Otherwise other modes are looked for from that fit. Of rows that are concave given the hyperparameters, there are
    none of the latent variables.
    """
    if options.posterior not in ("auto", "nested") or density.has_minibatch or density.is_sharded:
        return None
    by_rows, is_auto = density.n_directions is not None, options.posterior == "auto"
    of_fit = prices.expected_fit_seconds(density, by_rows=by_rows)
    forest = if_available(forest_of, density) if is_auto else None
    if forest is not None and by_rows and not forest.n_local:
        return None  # a Gaussian is seldom far off
    exact = None
    if forest is not None and forest.n_local:
        exact = exact_candidate(forest, work_of(forest, density, by_rows=by_rows))
    follows = math.inf if exact is None else of_fit + exact.expected_seconds
    if by_rows and follows <= LEAST:
        return None  # no nested posterior takes less: its rows need not be looked for
    given = if_available(latent_rows_of, density)
    if given is None or (is_auto and given.n_dim < _MANY * len(given.outside)):
        return None
    nested = _nested(given)
    if (is_auto and by_rows and not given.is_concave) or nested.expected_seconds > follows:
        return None
    if nested.seconds > (most := _affordable(options, of_fit)):
        return None
    gaussian = Candidate("gaussian", Decision.ON_REQUEST, of_fit)
    limit = f"Before any Gaussian fit, {in_words(most)} may be taken." if math.isfinite(most) else ""
    return Plan((nested, *([] if exact is None else [exact]), gaussian), limit)


def _affordable(options: FitOptions, of_fit: float) -> float:
    """Return the seconds that a nested posterior may take: as many as a Gaussian fit and what may follow it."""
    if options.max_seconds is not None:
        return options.max_seconds
    return min(of_fit + TimeBudget(of_fit).left(), _MOST_SECONDS) if options.posterior == "auto" else math.inf
