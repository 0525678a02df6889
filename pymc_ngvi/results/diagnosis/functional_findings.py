"""What was found of Deterministics and linear predictors, in sentences."""

from collections.abc import Callable, Sequence

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.density.functionals import PREDICTORS, Functionals
from pymc_ngvi.results.diagnosis.cures import Context
from pymc_ngvi.results.diagnosis.finding import MOVED, Finding, in_percent, in_sds
from pymc_ngvi.results.diagnosis.functionals import FunctionalDrift, beyond_by_kind
from pymc_ngvi.results.diagnosis.moment_drift import Estimates
from pymc_ngvi.results.diagnosis.weighted_shift import WeightedShift

#: Drift of the mean, in standard deviations, and of the standard deviation, relative, that is serious, by a standard
#: error; and that is worth a remark. Of ranks, which show less than all of a large change.
_MEAN, _SD = 0.3, 0.15
_SLIGHT_MEAN, _SLIGHT_SD = 0.15, 0.1
#: Standard deviations that a limit has to be off by under weights, to be serious; the same of what is worth a remark.
_LIMIT, _SLIGHT_LIMIT = 0.3, 0.15
#: The same of a mean, to first order.
_FIRST_ORDER = 0.1
#: Quantities that a sentence names at most.
_N_NAMED = 3
_WEIGHTED_CURE = "approx.sample(importance='psis') draws with these weights."


def functional_stands_out(drift: FunctionalDrift, certain: float = 1.0) -> bool:
    """Tell whether something that is computed of draws is off by much, and by so many standard errors more."""
    pairs = ((drift.mean, _MEAN), (drift.sd, _SD), (drift.lower, _LIMIT), (drift.upper, _LIMIT))
    return any(len(drift.beyond(of, size, certain)) for of, size in pairs)


def is_suspicious(drift: FunctionalDrift) -> bool:
    """Tell whether more draws may show that something is."""
    return drift.is_suspicious(_MEAN, _SD, _LIMIT)


def of_functionals(context: Context, drift: FunctionalDrift, seen: str = MOVED) -> list[Finding]:
    """Return what is off by much, or, where nothing is, by little; ``seen``: by what, as a clause."""
    of = drift.functionals
    slight = (_SLIGHT_MEAN, _SLIGHT_SD, _SLIGHT_LIMIT)
    for sizes, certain, how in (((_MEAN, _SD, _LIMIT), 1.0, "off"), (slight, 0.0, "slightly off")):
        kinds = (
            ("in the mean of", drift.mean, sizes[0], in_sds),
            ("in the standard deviation of", drift.sd, sizes[1], in_percent),
            ("in the lower 89 % limit of", drift.lower, sizes[2], in_sds),
            ("in the upper 89 % limit of", drift.upper, sizes[2], in_sds),
        )
        found = [
            (what, drift.beyond(estimates, size, certain), estimates, form) for what, estimates, size, form in kinds
        ]
        parts = [part for what, columns, estimates, form in found for part in _part(what, of, columns, estimates, form)]
        if parts:
            kind = _kind(of, *(columns for _, columns, _, _ in found))
            text = f"{kind} are {how}: {seen} {', and '.join(parts)}."
            serious = certain > 0.0
            return [Finding(text, context.shape_cure() if serious else "", serious)]
    return []


def of_weighted(shift: WeightedShift) -> list[Finding]:
    """Return what importance weights change, where they can be used."""
    of = shift.functionals
    lower, upper = shift.beyond(shift.lower, _LIMIT, 1.0), shift.beyond(shift.upper, _LIMIT, 1.0)
    parts = [
        *_part("the lower 89 % limit of", of, lower, shift.lower, in_sds),
        *_part("the upper 89 % limit of", of, upper, shift.upper, in_sds),
    ]
    if parts:
        text = f"{_kind(of, lower, upper)} are skewed as q is not: importance weights move {', and '.join(parts)}."
        return [Finding(text, _WEIGHTED_CURE, True)]
    means, sds = shift.beyond(shift.mean, _SLIGHT_MEAN, 0.0), shift.beyond(shift.sd, _SD, 0.0)
    limits = [shift.beyond(e, _SLIGHT_LIMIT, 0.0) for e in (shift.lower, shift.upper)]
    parts = [
        *_part("the mean of", of, means, shift.mean, in_sds),
        *_part("the standard deviation of", of, sds, shift.sd, in_percent),
        *_part("the lower 89 % limit of", of, limits[0], shift.lower, in_sds),
        *_part("the upper 89 % limit of", of, limits[1], shift.upper, in_sds),
    ]
    if not parts:
        return []
    return [Finding(f"Importance weights move {', and '.join(parts)}.", _WEIGHTED_CURE, False)]


def of_first_order(of: Functionals, estimates: Estimates) -> list[Finding]:
    """Return what an approximate nested posterior has off, by covariances with what its Gaussians miss."""
    for size, certain in ((_MEAN, 1.0), (_FIRST_ORDER, 0.0)):
        columns = beyond_by_kind(of.is_whole, estimates, size, certain)
        if parts := _part("the mean of", of, columns, estimates, in_sds):
            text = f"Given the hyperparameters, the posterior is no Gaussian, which moves {', '.join(parts)}."
            return [Finding(text, "pm.sample draws from the posterior itself." if certain else "", certain > 0.0)]
    return []


def _kind(of: Functionals, *columns: NDArray[np.intp]) -> str:
    """Return what all of some columns are."""
    names = {of.where(int(c))[0].name for found in columns for c in found}
    if names == {PREDICTORS}:
        return PREDICTORS.capitalize()
    return f"Deterministics and {PREDICTORS}" if PREDICTORS in names else "Deterministics"


def _part(
    what: str, of: Functionals, columns: NDArray[np.intp], estimates: Estimates, form: Callable[[float, float], str]
) -> list[str]:
    names = _named(of, columns, estimates, form)
    return [f"{what} {', '.join(names)}"] if names else []


def _named(
    of: Functionals,
    columns: Sequence[int] | NDArray[np.intp],
    estimates: Estimates,
    form: Callable[[float, float], str],
) -> list[str]:
    """Return columns by group, in their order: the first of each with figures, the others by their number."""
    groups: dict[str, list[int]] = {}
    for column in columns:
        groups.setdefault(of.where(int(column))[0].name, []).append(int(column))
    names = []
    for found in list(groups.values())[:_N_NAMED]:
        group, own = of.where(found[0])
        more = f" and {len(found) - 1:,} more of {group.n_columns:,}" if len(found) > 1 else ""
        value, se = float(estimates.value[found[0]]), float(estimates.se[found[0]])
        names.append(f"{group.label(own)}{more} ({form(value, se)})")
    others = len(groups) - len(names)
    return [*names, f"{others:,} others"] if others else names
