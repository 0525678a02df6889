"""What is fitted: a density, the family of its approximations, and how these become approximations of the model's."""

import functools

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from numpy.typing import ArrayLike

from pymc_ngvi.core.linalg import check_memory
from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.status import StartError
from pymc_ngvi.core.types import Array, GaussianState, Indices, Rule, Target, VariationalState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.by_rows import NO_ROWS
from pymc_ngvi.density.info import initial_point_function, not_finite_data, outside_support
from pymc_ngvi.families import DENSE, FAMILIES, STRUCTURED, Family, Maker
from pymc_ngvi.families.gaussian import Gaussian, Partition
from pymc_ngvi.families.sparse import SparseStructure, find_blocks, structure_of
from pymc_ngvi.fitting.options import FitOptions, choose_family, form_of
from pymc_ngvi.graphs.layout import Layout, Variable
from pymc_ngvi.methods.reparam import (
    Conditional,
    PushforwardState,
    ReparametrisedDensity,
    RowSpaceDensity,
    reparametrised,
)

# --- where a fit starts: the mean from the model's initial point or the user's, the scale from a first look ---

#: Standard deviations tried at the start, in every unconstrained coordinate.
START_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01)
#: Times that a tenth of the narrowest is tried, at most. How many times as much log p has to rise by it as by the next
#: tenth: of a parabola, it is a hundred times.
_TENTH, _MOST_NARROWER, _STEEP = 0.1, 10, 1e3
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


def large_scales(density: ModelDensity, point: Array, start: Mapping[str, ArrayLike] | None) -> list[Indices]:
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
    family: Maker[VariationalState],
    point: Array,
    scales: Sequence[Array],
    density: ModelDensity,
    wide: Sequence[Indices] = (),
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
        middle = len(scales) // 2
        for scale in [*scales[middle:], *scales[:middle]] if rule.takes_any_start else scales:  # a small one first
            found.append(tried(location, scale))
            if rule.takes_any_start and found[-1].elbo > _TOO_WIDE:
                return found[-1]
        best = max(found, key=lambda start: start.elbo)
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


def _narrowed(best: _TriedStart, scales: Sequence[Array], tried: Callable[[Array], _TriedStart]) -> _TriedStart:
    """Go to tenths of the narrowest scale for as long as log p falls more steeply than a parabola over it.

    Steps know of parabolas, of which a tenth loses a hundredth. Of an exponential of predictors on a large scale it
    loses next to nothing, and steps from the wider start lead anywhere.
    """
    is_free = scales[-1] != scales[-2]
    of_entropy = float(-np.log(_TENTH) * is_free.sum())
    wide, narrow = best, tried(np.where(is_free, _TENTH, 1.0) * scales[-1])
    for power in range(2, _MOST_NARROWER + 1):
        narrower = tried(np.where(is_free, _TENTH**power, 1.0) * scales[-1])
        if wide.elbo > -np.inf:
            gain, next_gain = narrow.elbo - wide.elbo, narrower.elbo - narrow.elbo + of_entropy
            if not (gain > 0.0 and gain + of_entropy > _STEEP * next_gain):
                return wide
        wide, narrow = narrow, narrower
    return wide


def _start_message(density: ModelDensity, point: Array, scale: float) -> str:
    bad = {name: value for name, value in density.terms(point).items() if not np.isfinite(value)}
    listed = ", ".join(f"{name} ({value})" for name, value in bad.items())
    known = () if density.is_sharded else bad  # the model of shards is that of one of them
    if data := not_finite_data(density.model, known):
        return (
            "The log density is not finite at the start because of data that are not: "
            f"{', '.join(data)}. Terms that are not finite: {listed}. Leave these rows out, or impute the values."
        )
    # Data may be outside the support just because a parameter is.
    is_of_data = bad.keys().isdisjoint(v.name for v in density.layout.variables)
    if is_of_data and (outside := outside_support(density.model, known, density.layout.unflatten(point))):
        return (
            f"The log density is not finite at the start: {'; '.join(outside)}. Check these values and the "
            "distribution, or give a `start` from which they are possible."
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


# --- from names of variables to the blocks of a block-diagonal covariance ---

_EXPECTED = "blocks should be a sequence of sequences of names, such as [['a', 'b'], ['c']]"


def block_labels(layout: Layout, blocks: Sequence[Sequence[str]] | None = None) -> Indices:
    """Return which block each coordinate belongs to."""
    listed = [] if blocks is None else _checked(blocks, "blocks")
    parsed = [_checked(block, f"blocks[{i}]") for i, block in enumerate(listed)]
    labels = np.full(layout.n_dim, -1, dtype=np.intp)
    for block, names in enumerate(parsed):
        if not names:
            raise ValueError(f"blocks[{block}] is empty; a block should name one coordinate at least.")
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"{_EXPECTED}; in blocks[{block}] there is {name!r}, no name.")
            where = _coordinates(layout, name)
            taken = where[(labels[where] >= 0) & (labels[where] != block)]
            if len(taken):
                other = labels[taken[0]]
                raise ValueError(
                    f"blocks[{other}] = {parsed[other]} and blocks[{block}] = {names} share "
                    f"{layout.label(taken[0])!r}; each coordinate should be in one block."
                )
            labels[where] = block
    for i, v in enumerate(layout.variables):
        part = labels[v.where]  # a view
        part[part < 0] = len(parsed) + i
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _checked(value: object, what: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{_EXPECTED}; {what} is {value!r}.")
    return list(value)


def _coordinates(layout: Layout, name: str) -> Indices:
    """Return the flat coordinates that a name stands for."""
    if (found := layout.coordinates(name)) is not None:
        return found
    by_name: dict[str, Variable] = {v.value_name: v for v in layout.variables}
    by_name |= {v.name: v for v in layout.variables}
    owner = by_name.get(name.rpartition("[")[0])
    if owner is None:
        raise ValueError(f"blocks names {name!r}, which is no free variable: {suggestion(name, by_name)}")
    shape = f"its value {owner.value_name!r} has shape {owner.shape}"
    if owner.shape and owner.size:
        first, last = (layout.label(i) for i in (owner.where.start, owner.where.stop - 1))
        shape += f", coordinates from {first!r} to {last!r}"
    raise ValueError(f"blocks names {name!r}, which is no coordinate of {owner.name!r}: {shape}.")


# What is fitted: a density, the family of its approximations, and how these become approximations of the model's.


@dataclass(frozen=True)
class Problem:
    """A density to be approximated, in coordinates that may not be the model's own."""

    #: Of the model.
    density: ModelDensity
    #: What is fitted: ``density`` itself, or its reparametrisation.
    target: Target
    #: Makes states of location and scale.
    family: Family[VariationalState]

    @property
    def transform(self) -> Conditional | None:
        """From the scale of states to the model's own unconstrained scale; None where they are on it."""
        return self.target.transform if isinstance(self.target, ReparametrisedDensity) else None

    def on_model_scale(self, state: VariationalState) -> VariationalState:
        """Return the approximation of the model that a state stands for."""
        if isinstance(self.target, RowSpaceDensity):
            return self.target.gaussian(cast(GaussianState, state))
        return state if self.transform is None else PushforwardState(cast(Gaussian[Any], state), self.transform)

    def start(
        self, start: Mapping[str, ArrayLike] | None, start_sigma: Mapping[str, ArrayLike] | float | None
    ) -> tuple[Array, list[Array]]:
        """Return the starting mean, and the standard deviations to choose among, (n_dim,) each."""
        point = start_point(self.density, start)
        scales = start_scales(self.density, start_sigma)
        if isinstance(self.target, RowSpaceDensity):
            space = self.target.space
            return space.of_theta(point), [space.sd_of(scale) for scale in scales]
        if self.transform is None:
            return point, scales
        # Relative to their conditional modes and scales, local coordinates begin where a Gaussian has them.
        transform = self.transform
        is_border = np.zeros(len(point), dtype=bool)
        is_border[transform.structure.border] = True
        location = np.where(is_border, point, 0.0)
        if start is not None:
            phi = transform.inverse(point[None])[0][0]
            location = phi if np.isfinite(phi).all() else location
        return location, [np.where(is_border, scale, 1.0) for scale in scales]

    def labels(self, index: Sequence[int] | Indices) -> tuple[str, ...]:
        """Return the names of coordinates, of those that are the model's own."""
        if isinstance(self.target, RowSpaceDensity):
            kept = self.target.space.kept
            index = [int(kept[i]) for i in index if i < len(kept)]
        return tuple(self.density.layout.label(int(i)) for i in index)

    def mean_and_sd(self, state: VariationalState) -> tuple[Array, Array]:
        """Return what another problem of the same model may begin from: on the model's own scale, if that is known."""
        known = state if self.transform is not None else self.on_model_scale(state)
        return known.mean(), known.sd()

    def state_about(self, mean: Array, sd: Array) -> VariationalState:
        """Return the state with this mean and these standard deviations, as `mean_and_sd` returns them."""
        if isinstance(self.target, RowSpaceDensity):
            mean, sd = self.target.space.of_theta(mean), self.target.space.sd_of(sd)
        return self.family.from_scale(mean, sd)


def problem_of(density: ModelDensity, options: FitOptions) -> Problem:
    """Return what the options make of a model."""
    if options.choice.estimator == "quadrature" and density.n_directions is None:
        raise ValueError(NO_ROWS)
    if options.choice.estimator == "gauss_newton" and density.is_sharded:
        raise ValueError("estimator='gauss_newton' does not go with shards: leave it out.")
    target: Target = density
    structure: Partition | None = None
    if options.reparam is None:
        dense = options.choice.family == DENSE and options.factor != "precision"
        seen = density.seen_from_rows if dense and options.choice.estimator == "quadrature" else None
        if seen is not None and isinstance(density, LogDensity):  # expectations are all that is taken
            target = cast(Target, RowSpaceDensity(density, seen))
    else:
        if not isinstance(density, LogDensity):
            raise ValueError(
                f"reparam={options.reparam!r} reads the data of groups, which are in shards: leave it out."
            )
        density.widen(density.initial_point()[None])  # what the graph does not tell, if anything
        pattern = density.structural_pattern
        if pattern is None:
            raise ValueError(
                f"reparam={options.reparam!r} standardises effects of groups, and the Hessian of this model shows "
                "none: it couples everything. Leave reparam out."
            )
        structure = find_blocks(pattern)
        target = reparametrised(density, structure, options.reparam)
    family = make_family(options, density, structure)
    check_memory(family.memory_bytes(target.n_dim), options.choice.family, target.n_dim, list(FAMILIES))
    return Problem(density, target, family)


def problem_by_draws(density: ModelDensity, options: FitOptions) -> tuple[Problem, FitOptions]:
    """Return what the options make of a model with draws in place of exact expectations, and the options.

    What was chosen to be sparse beside sums over many coordinates is not so by draws: another family takes its place.
    """
    options = options.with_draws()
    if options.family_reason and options.choice.family == STRUCTURED and density.pattern is None:
        name, reason = choose_family(density)
        family = {"family": name, "family_reason": reason, "factor": None}
        options = replace(options, **cast(dict[str, Any], family))
    return problem_of(density, options), options


@dataclass(frozen=True)
class Form:
    """What families see of a model."""

    density: ModelDensity
    #: Of a reparametrised model.
    known: Partition | None = None

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.density.n_dim

    def labels(self, blocks: Sequence[Sequence[str]] | None) -> Indices:
        """Return the block of each coordinate: of those named, of a group, or of a variable."""
        if self.known is not None and blocks is None:
            return self.known.labels
        return block_labels(self.density.layout, blocks)

    def structure(self, *, fill: bool, sums: bool) -> SparseStructure | None:
        """Return the structure of the factor of the Hessian; None where that counts as dense."""
        form = self.known or form_of(self.density, fill=fill, sums=sums)
        return None if form is None else structure_of(form)


def make_family(
    options: FitOptions, density: ModelDensity, structure: Partition | None = None
) -> Family[VariationalState]:
    """Return what makes a state of location and scale."""
    return FAMILIES[options.choice.family].of(Form(density, structure), options)
