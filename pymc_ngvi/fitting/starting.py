"""Where a fit starts: the mean from the model's initial point or the user's, the scale from a first look."""

import functools

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.status import StartError
from pymc_ngvi.core.types import Array, FittedState, Rule, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.checks import not_finite_data
from pymc_ngvi.density.info import initial_point_function
from pymc_ngvi.families import Maker
from pymc_ngvi.graphs.layout import Variable

#: Standard deviations tried at the start, in every unconstrained coordinate.
START_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01)
#: Times that a tenth of the narrowest is tried, at most. How many times as much log p has to rise by it as by the next
#: tenth: of a parabola, it is a hundred times.
_MOST_NARROWER, _STEEP = 10, 1e3
#: End of the names of unconstrained values of positive variables; their logarithm from which a start counts as far
#: above 1; variables that are tried lower, at most.
_POSITIVE, _FAR, _MOST_LOWERED = "_log__", 1.7, 10
#: Marks the random stream of the starts of weights.
_UNITS = 7
#: ELBO of a start that is too wide where any will do otherwise: rates of data beside covariates on large scales have
#: expectations of such a size, and steps lead down from there slowly.
_TOO_WIDE = -1e15


class _TriedStart(NamedTuple):
    """A starting state, its ELBO, -inf where log p is not finite at a draw, and its scale."""

    state: VariationalState
    elbo: float
    scale: Array


def start_point(density: ModelDensity, start: Mapping[str, ArrayLike] | None) -> Array:
    """Return the flat unconstrained starting mean, (n_dim,)."""
    if start is None:
        return density.initial_point()
    if not isinstance(start, Mapping):
        raise TypeError(f"start should map names of variables to values, or be an earlier fit by NGVI; got {start!r}.")
    model, layout = density.model, density.layout
    by_value = {v.value_name: v for v in layout.variables}
    by_name = {v.name: v for v in layout.variables}
    unknown = [k for k in start if k not in by_value and k not in by_name and k not in model.named_vars]
    if unknown:
        raise ValueError(
            f"start has {unknown[0]!r}, which is not a variable of the model: "
            f"{suggestion(unknown[0], list(dict.fromkeys([*by_name, *by_value])))}"
        )
    constrained = {model[name]: np.asarray(start[name]) for name in by_name if name in start}
    for rv, value in constrained.items():
        known = rv.type.shape
        if value.ndim != len(known) or any(k not in (None, n) for k, n in zip(known, value.shape, strict=True)):
            raise ValueError(_shape_message(rv.name, value.shape, by_name[rv.name], rv))
    needs_more = any(name not in start for name in by_value)
    point = initial_point_function(model, constrained)() if needs_more else dict[str, Any]()
    for name, v in by_value.items():
        if name in start:
            point[name] = np.asarray(start[name], dtype=np.float64)
        if np.shape(point[name]) != v.shape:
            given = name if name in start else v.name
            raise ValueError(_shape_message(given, np.shape(point[name]), v, model[v.name]))
    return layout.flatten(point)


def _shape_message(given: str, shape: tuple[int, ...], variable: Variable, rv: Any) -> str:
    own = rv.type.shape
    hint = "Give a value of the variable's own shape"
    if given == variable.name and None not in own:
        hint += f", {own}"
    return (
        f"start[{given!r}] leads to shape {shape} for {variable.value_name!r}, which has shape {variable.shape}. "
        f"{hint}."
    )


def start_scales(density: ModelDensity, start_sigma: Mapping[str, ArrayLike] | float | None) -> list[Array]:
    """Return the starting standard deviations to choose among, (n_dim,) each."""
    scales = [np.full(density.n_dim, s) for s in START_SCALES]
    if start_sigma is None:
        return scales
    if not isinstance(start_sigma, Mapping):
        start_sigma = {v.name: start_sigma for v in density.layout.variables}
    names = {n: v for v in density.layout.variables for n in (v.name, v.value_name)}
    for name, sigma in start_sigma.items():
        if name not in names:
            raise ValueError(f"start_sigma has {name!r}, which is not a free variable: {suggestion(name, names)}")
        v = names[name]
        values = np.asarray(sigma, dtype=np.float64)
        if values.shape not in ((), v.shape):
            raise ValueError(
                f"start_sigma[{name!r}] has shape {values.shape}; give a number or an array of shape {v.shape}, the "
                "shape of the variable on the unconstrained scale."
            )
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"start_sigma[{name!r}] should be positive and finite; got {sigma!r}.")
        for scale in scales:
            scale[v.where] = np.broadcast_to(values, v.shape).ravel()
    named = {names[name].name for name in start_sigma}
    return scales[:1] if len(named) == len(density.layout.variables) else scales


def units_apart(density: ModelDensity, point: Array, start: Mapping[str, ArrayLike] | None, seed: int) -> Array:
    """Return a starting mean in which the units of a network differ from each other.

    Where a matrix has entries that all start at one value, as weights do in PyMC, it and all other such arrays get
    random starts about it: normal, with variance 2 / n where n is the number of their rows [1]_. Else all units of a
    layer would have the same gradients. Positive variables, and values that the user gave, stay as they are.

    References
    ----------
    .. [1] K. He, X. Zhang, S. Ren and J. Sun (2015). Delving deep into rectifiers. ICCV.
       https://doi.org/10.1109/ICCV.2015.123
    """
    point, rng = point.copy(), np.random.default_rng([seed, _UNITS])
    alike = [
        v
        for v in density.layout.variables
        if v.value_name == v.name
        and not (start and v.name in start)
        and v.where.stop > v.where.start + 1
        and np.ptp(point[v.where]) == 0.0
    ]
    if not any(len(v.shape) > 1 and min(v.shape) > 1 for v in alike):
        return point
    for v in alike:
        point[v.where] += rng.standard_normal(v.where.stop - v.where.start) * np.sqrt(2.0 / v.shape[0])
    return point


def large_scales(density: ModelDensity, point: Array, start: Mapping[str, ArrayLike] | None) -> list[NDArray[np.intp]]:
    """Return the coordinates, by variable, of positive parameters that start far above 1 and that the user left alone.

    The initial point of a scale is that of its prior, which may be wide by design (Bambi's are): effects of groups
    that start with a standard deviation of 40 on a log scale take the part of everything else.
    """
    found = []
    for v in density.layout.variables:
        if v.value_name.endswith(_POSITIVE) and not (start and (v.name in start or v.value_name in start)):
            index = np.arange(v.where.start, v.where.stop)
            index = index[point[index] > _FAR]
            if len(index):
                found.append(index)
    return found[:_MOST_LOWERED]


def choose_start(
    rule: Rule,
    family: Maker[FittedState],
    point: Array,
    scales: Sequence[Array],
    density: ModelDensity,
    wide: Sequence[NDArray[np.intp]] = (),
) -> VariationalState:
    """Return the starting state with the best ELBO on the first draws.

    It is narrower than all scales where log p falls exponentially over the narrowest.
    """

    def tried(location: Array, scale: Array) -> _TriedStart:
        state = family.from_scale(location, scale)
        evaluation = rule.first_evaluation(state)
        # All draws inside the support, or the ELBO of a wide start would be a mean over those that are.
        inside = evaluation.finite.all() and not np.isnan(evaluation.elbo)
        return _TriedStart(state, evaluation.elbo if inside else -np.inf, scale)

    def best_at(location: Array) -> _TriedStart:
        found: list[_TriedStart] = []
        for scale in _in_order(rule, scales):
            found.append(tried(location, scale))
            if rule.takes_any_start and found[-1].elbo > _TOO_WIDE:
                return found[-1]
        best = max(found, key=_elbo)
        is_narrowest = len(scales) > 1 and (best.scale is scales[-1] or best.elbo == -np.inf)
        return _narrowed(best, scales, functools.partial(tried, location)) if is_narrowest else best

    best = best_at(point)
    for index in wide:
        lower = point.copy()
        lower[index] = 0.0
        other = best_at(lower)
        if other.elbo > best.elbo:
            point, best = lower, other
    if best.elbo > -np.inf:
        return best.state
    last = family.from_scale(point, scales[-1])
    if rule.first_evaluation(last).finite.any():
        return last
    raise StartError(_start_message(density, point, float(best.scale.max(initial=0.0))))


def _elbo(tried: _TriedStart) -> float:
    return tried.elbo


def _narrowed(best: _TriedStart, scales: Sequence[Array], tried: Callable[[Array], _TriedStart]) -> _TriedStart:
    """Go to tenths of the narrowest scale for as long as log p falls more steeply than a parabola over it.

    Steps know of parabolas, of which a tenth loses a hundredth. Of an exponential of predictors on a large scale it
    loses next to nothing, and steps from the wider start lead anywhere.
    """
    is_free = scales[-1] != scales[-2]
    of_entropy = float(np.log(10.0) * is_free.sum())
    wide, narrow = best, tried(np.where(is_free, 0.1, 1.0) * scales[-1])
    for power in range(2, _MOST_NARROWER + 1):
        narrower = tried(np.where(is_free, 0.1**power, 1.0) * scales[-1])
        if wide.elbo > -np.inf:
            gain, next_gain = narrow.elbo - wide.elbo, narrower.elbo - narrow.elbo + of_entropy
            if not (gain > 0.0 and gain + of_entropy > _STEEP * next_gain):
                return wide
        wide, narrow = narrow, narrower
    return wide


def _in_order(rule: Rule, scales: Sequence[Array]) -> Sequence[Array]:
    """Return starting scales as they are to be tried: where any will do, a small one first."""
    if not rule.takes_any_start or len(scales) == 1:
        return scales
    middle = len(scales) // 2
    return [*scales[middle:], *scales[:middle]]


def _start_message(density: ModelDensity, point: Array, scale: float) -> str:
    bad = {name: value for name, value in density.terms(point).items() if not np.isfinite(value)}
    listed = ", ".join(f"{name} ({value})" for name, value in bad.items())
    in_shards = density.is_sharded  # their model is that of one of them
    if data := not_finite_data(density.model, () if in_shards else bad):
        return (
            "The log density is not finite at the start because of data that are not: "
            f"{', '.join(data)}. Terms that are not finite: {listed}. Leave these rows out, or impute the values."
        )
    where = (
        f"Terms that are not finite there: {listed}."
        if listed
        else (
            "Every term is finite at the starting point itself, but not around it, even with a standard deviation of "
            f"{scale:g}; or its gradient is not."
        )
    )
    return (
        f"The log density or its gradient is not finite at the start. {where} Check the data and the supports of those "
        "variables, or give a `start` inside the support, and a smaller `start_sigma`."
    )
