"""The plan before any Gaussian fit: whether a posterior that needs none comes in its place."""

import math

from pymc_ngvi.core import prices
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import if_available
from pymc_ngvi.posteriors.plan import GAUSSIAN, Candidate, Decision, Plan, TimeBudget

#: Seconds that it may take without being asked for.
_MOST_SECONDS = 120.0


def plan_without_gaussian(options: FitOptions, density: ModelDensity) -> Plan | None:
    """Return the plan where a posterior comes before any Gaussian fit; None where none does."""
    is_auto = options.posterior == "auto"
    wanted = [kind for kind in KINDS.values() if is_auto or kind.name == options.posterior]
    first = [kind for kind in wanted if kind.may_come_first]
    if not first or density.has_minibatch or density.is_sharded:
        return None
    by_rows, after = density.n_directions is not None, []
    for kind in wanted:
        found = None if kind in first else if_available(kind.possible, density)
        if found is not None and not kind.is_plain(found):
            after.append(kind.price(found, density, by_rows=by_rows))
        elif found is not None and by_rows:
            return None  # a Gaussian is seldom far off
    of_fit = prices.expected_fit_seconds(density, by_rows=by_rows)
    follows = min((of_fit + candidate.expected_seconds for candidate in after), default=math.inf)
    most = _affordable(options, of_fit)
    limit = f"Before any Gaussian fit, {prices.in_words(most)} may be taken." if math.isfinite(most) else ""
    for kind in first:
        if by_rows and follows <= kind.least:
            continue  # it takes no less: it need not be looked for
        found = if_available(kind.possible, density)
        if found is None or (is_auto and not kind.comes_first(found, by_rows=by_rows)):
            continue
        candidate = kind.price(found, density, by_rows=by_rows)
        if candidate.expected_seconds <= follows and candidate.seconds <= most:
            return Plan((candidate, *after, Candidate(GAUSSIAN, Decision.ON_REQUEST, of_fit)), limit)
    return None


def _affordable(options: FitOptions, of_fit: float) -> float:
    """Return the seconds that it may take: as many as a Gaussian fit and what may follow it."""
    if options.max_seconds is not None:
        return options.max_seconds
    return min(of_fit + TimeBudget(of_fit).left(), _MOST_SECONDS) if options.posterior == "auto" else math.inf
