"""Which variables of a model are effects of groups, which are their standard deviations, and which are rows of data."""

import logging
import math

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pymc.backends.arviz import find_observations
from pymc.variational.minibatch_rv import MinibatchRandomVariable

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.graphs.layout import Layout, Variable
from pymc_ngvi.reading.lineage import Lineage

# --- what counts as an observation in the data of an observed variable ---


#: Operations with an observation for each entry of an axis: time series, areas, a grid.
_SERIES = {
    "AutoRegressiveRV", "RandomWalkRV", "GARCH11RV", "EulerMaruyamaRV", "CARRV", "ICARRV", "KroneckerNormalRV",
}  # fmt: skip
#: Operations of which a single vector or matrix is one observation.
_ONE = {"MultinomialRV", "DirichletMultinomialRV", "DirichletRV", "WishartRV"}


def n_axes(rv: Any, n_dim: int) -> int:
    """Return how many of the first axes of the data of a variable count its observations.

    Each row of multivariate data is one observation. The elements of a time series are one each, and so are those of a
    single vector, such as the values of a Gaussian process; a single vector of counts or proportions is one
    observation.
    """
    if rv.owner is not None and isinstance(rv.owner.op, MinibatchRandomVariable):
        rv = rv.owner.inputs[0]
    op = None if rv.owner is None else rv.owner.op
    support = getattr(op, "ndim_supp", 0)
    name = type(op).__name__
    each = name in _SERIES or (n_dim == support and name not in _ONE)
    return n_dim - support + (each and support > 0)


def whole_shape(rv: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of axes in the whole data, of a variable that reads a part of it: those of ``total_size``."""
    if rv.owner is None or not isinstance(rv.owner.op, MinibatchRandomVariable):
        return shape
    sizes = [getattr(size, "data", None) for size in rv.owner.inputs[1:]]
    return tuple(n if size is None else int(size) for size, n in zip(sizes, shape, strict=False))


# A child of PyMC's logger, which has the handler.
logger = logging.getLogger("pymc.ngvi")

#: A Deterministic of more elements than this, one or more for each observation, counts as rows of the data.
MAX_ROWS = 20
#: What Bambi appends to the name of a grouping factor, for the name of its dimension.
_BAMBI = "__factor_dim"


class Extent(NamedTuple):
    """Names and lengths of the axes of a variable; a name is None where the model gives none."""

    dims: tuple[str | None, ...]
    shape: tuple[int, ...]


@dataclass
class Grouping:
    """A grouping factor."""

    #: Of its dimension; of its effects where that has no name.
    name: str
    n_levels: int
    #: Free variables and Deterministics with the standard deviations and correlations of the effects.
    scales: list[str] = field(default_factory=list)
    #: Free variables and Deterministics with a value for each level.
    effects: list[str] = field(default_factory=list)
    #: Free variables that the effects are made of, by a multiplication with the standard deviations.
    offsets: list[str] = field(default_factory=list)
    #: Cholesky factors whose standard deviations and correlations are among ``scales``.
    packed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Roles:
    """The roles that variables play."""

    groups: tuple[Grouping, ...] = ()
    #: Deterministics with a value for each observation, such as fitted values.
    rows: tuple[str, ...] = ()
    #: Standardised free variables that Deterministics among ``rows`` are made of, element for element.
    raw: tuple[str, ...] = ()
    #: Number of observations by observed variable.
    observations: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Effects:
    """A free variable whose values belong to levels of a group."""

    variable: Variable
    axes: tuple[int, ...]
    extent: Extent
    scales: frozenset[str]
    raw: bool

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes of levels; empty where one has none."""
        names = tuple(self.extent.dims[a] for a in self.axes)
        return () if None in names else names  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.extent.shape[a] for a in self.axes)

    def levels(self, within: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the level of each of some coordinates, counted from the start of the variable."""
        index = np.unravel_index(within, self.variable.shape)
        return np.ravel_multi_index([index[a] for a in self.axes], [self.variable.shape[a] for a in self.axes])


def find_roles(model: pm.Model, layout: Layout, pattern: Pattern | None, extents: Mapping[str, Extent]) -> Roles:
    """Find the roles of the variables of a model from its graph and the sparsity of its Hessian.

    Effects of a group are a variable with an axis along which no two of its coordinates share an entry of the Hessian,
    and which has a parameter in its prior, or is multiplied by one: the coefficients of a regression, a random walk
    and a Gaussian process couple. Where nothing tells, a variable has no role; where the search fails, none has.
    """
    # Roles only arrange what is shown. The search reads graphs that users write, with operations of their own: what it
    # raises on one that it does not know cannot be listed, and no such graph is a reason to withhold the results.
    try:
        return _search(model, layout, pattern, extents)
    except Exception:
        logger.debug("The roles of the variables were not found: all are shown as parameters.", exc_info=True)
        return Roles()


def _search(model: pm.Model, layout: Layout, pattern: Pattern | None, extents: Mapping[str, Extent]) -> Roles:
    observed = _observed(model)
    lineage = Lineage(model)
    groups: list[_Group] = []
    if pattern is not None:
        groups = _grouped(_find_effects(model, layout, pattern, extents, lineage), pattern)
        _claim_scales(groups, lineage)
    rows = [
        d.name
        for d in model.deterministics
        if d.name in extents and _place(d, extents[d.name], groups, observed, lineage) == "rows"
    ]
    raw = _raw(rows, extents, set().union(*(g.names for g in groups)), lineage)
    counts = {
        name.removesuffix("_observed"): math.prod(whole_shape(model[name], extent.shape))
        for name, extent in observed.items()
    }
    return Roles(tuple(_report(group, lineage) for group in groups), tuple(rows), tuple(raw), counts)


def _raw(rows: list[str], extents: Mapping[str, Extent], effects: set[str], lineage: Lineage) -> list[str]:
    """Return the free variables, no effects, that rows of the data are made of by a product, element for element."""
    of: dict[int, set[str]] = {}
    for name in rows:
        of.setdefault(math.prod(extents[name].shape), set()).update(lineage.parents(lineage.model[name]))
    return [
        name
        for name, rv in lineage.free.items()
        if name not in effects
        and name in extents
        and name in of.get(math.prod(extents[name].shape), ())
        and lineage.multipliers(rv)
    ]


def _observed(model: pm.Model) -> dict[str, Extent]:
    """Return the axes along which the observations of each observed variable lie."""
    values = find_observations(model)
    result = {}
    for rv in model.observed_RVs:
        if rv.name in values:
            shape = np.shape(values[rv.name])
            shape = shape[: n_axes(rv, len(shape))]
            dims = tuple(model.named_vars_to_dims.get(rv.name) or (None,) * len(shape))
            result[rv.name] = Extent(dims[: len(shape)], shape)
    return result


# --- effects ---


def _find_effects(
    model: pm.Model, layout: Layout, pattern: Pattern, extents: Mapping[str, Extent], lineage: Lineage
) -> list[_Effects]:
    """Return the free variables that are effects of groups."""
    axes = {v.name: uncoupled_axes(v, pattern) for v in layout.variables}
    found = {}
    for v in layout.variables:
        rv, extent = model[v.name], extents.get(v.name)
        if extent is None or lineage.is_missing_data(rv):
            continue
        across = axes[v.name] if len(v.shape) == len(extent.shape) else ()
        if lineage.sums_to_zero(rv) and lineage.is_indexed(rv):
            across = (len(extent.shape) - 1,)  # its transform couples what the model does not
        if not across:
            continue
        centred = bool(lineage.prior(rv))
        scales = lineage.prior_scales(rv) if centred else lineage.multipliers(rv)
        # A scale may differ between terms, but what differs between levels of another group is no scale of this one.
        terms = {a for s in scales for a in across if _varies_along(extents.get(s), extent, a)}
        across = tuple(a for a in across if a not in terms)
        inside = math.prod(n for a, n in enumerate(extent.shape) if a not in across)
        if not centred:
            scales = {
                u.name for u in layout.variables if u.name in scales and (u.size in (1, inside) or not axes[u.name])
            }
        latent = v.size > MAX_ROWS and lineage.is_latent_trait(rv)
        if across and (centred or scales or latent):
            found[v.name] = _Effects(v, across, extent, frozenset(scales), raw=not centred and bool(scales))
    return _without_hyperparameters(found, lineage, model)


def _varies_along(scale: Extent | None, effects: Extent, axis: int) -> bool:
    """Tell whether a scale has a value for each entry of an axis of effects with several axes."""
    if scale is None or not scale.shape or len(effects.shape) < 2:
        return False
    if effects.dims[axis] is not None and None not in scale.dims:
        return effects.dims[axis] in scale.dims
    return effects.shape[axis] in scale.shape


def _without_hyperparameters(found: dict[str, _Effects], lineage: Lineage, model: pm.Model) -> list[_Effects]:
    """Leave out what is in the prior of a variable that is no effect itself, as local scales of coefficients are."""
    while True:
        others = [rv for rv in model.free_RVs if rv.name not in found]
        needed = set().union(*(lineage.prior(rv) for rv in others)) & set(found)
        if not needed:
            return list(found.values())
        found = {name: effects for name, effects in found.items() if name not in needed}


def uncoupled_axes(v: Variable, pattern: Pattern) -> tuple[int, ...]:
    """Return the axes along which no two coordinates of a variable share an entry of the Hessian."""
    if v.size < 2:
        return ()
    rows, cols = _entries(pattern, v, v)
    apart = rows != cols
    i, j = (np.unravel_index(part[apart], v.shape) for part in (rows, cols))
    return tuple(a for a, n in enumerate(v.shape) if n > 1 and np.array_equal(i[a], j[a]))


def _entries(pattern: Pattern, of_rows: Variable, of_cols: Variable) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the entries between two variables, each counted from its start; the first is the later in the layout."""
    first, last = np.searchsorted(pattern.rows, [of_rows.where.start, of_rows.where.stop])
    rows, cols = pattern.rows[first:last], pattern.cols[first:last]
    keep = (cols >= of_cols.where.start) & (cols < of_cols.where.stop)
    return rows[keep] - of_rows.where.start, cols[keep] - of_cols.where.start


# --- groups ---


@dataclass(eq=False)
class _Group:
    members: list[_Effects]
    scales: set[str] = field(default_factory=set)
    scale_names: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    dims: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.members[0].shape

    @property
    def names(self) -> set[str]:
        return {m.variable.name for m in self.members}


def _grouped(effects: list[_Effects], pattern: Pattern) -> list[_Group]:
    """Put effects of the same levels together: of the same dimensions, or coupled level by level."""
    groups: list[_Group] = []
    for e in effects:
        group = next((g for g in groups if any(_same_levels(e, m, pattern) for m in g.members)), None)
        if group is None:
            group = _Group([])
            groups.append(group)
        group.members.append(e)
        group.dims = group.dims or e.dims
    return groups


def _same_levels(later: _Effects, earlier: _Effects, pattern: Pattern) -> bool:
    if later.shape != earlier.shape:
        return False
    if later.dims and earlier.dims:
        return later.dims == earlier.dims
    if later.variable.shape == later.extent.shape and earlier.variable.shape == earlier.extent.shape:
        rows, cols = _entries(pattern, later.variable, earlier.variable)
        return len(rows) > 0 and np.array_equal(later.levels(rows), earlier.levels(cols))
    return False


def _claim_scales(groups: list[_Group], lineage: Lineage) -> None:
    """Give each group the scales that nothing else in the model depends on."""
    effects = set().union(*(g.names for g in groups))
    for group in groups:
        scales = set().union(*(m.scales for m in group.members)) - effects
        group.scales = scales - lineage.used_elsewhere(group.names)
        group.scale_names = [name for name in lineage.free if name in group.scales]


def _place(
    d: Variable, extent: Extent, groups: Iterable[_Group], observed: Mapping[str, Extent], lineage: Lineage
) -> str | None:
    """Add a Deterministic to the group that it belongs to; return "rows" where it has a value for each observation."""
    of = lineage.parents(d)
    holders = [g for g in groups if of & g.names and _has_axes(extent, g.dims, g.shape)]
    holders.sort(key=lambda g: not (g.dims and set(g.dims) <= set(extent.dims)))
    pure = next((g for g in holders if of <= g.names | g.scales), None)
    if pure is None and math.prod(extent.shape) > MAX_ROWS:
        if f"{d.name}_observed" in observed:  # of which some are missing
            return "rows"
        for name, rows in observed.items():
            related = d in lineage.ancestors(name) or _has_axes(extent, rows.dims, rows.shape)
            if rows.shape and related and _has_axes(extent, (), rows.shape):
                return "rows"
    group = pure or next(iter(holders), None)
    if group is not None:
        group.derived.append(d.name)
        group.dims = group.dims or _dims_along(extent, group.shape)
    elif of:
        owner = next((g for g in groups if of <= g.scales), None)
        if owner is not None:
            owner.scale_names.append(d.name)
    return None


def _has_axes(extent: Extent, dims: tuple[str | None, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether a variable has axes of these lengths; of these names, where all have names."""
    named = dims and None not in dims and None not in extent.dims
    if named:
        return set(dims) <= set(extent.dims)
    left = list(extent.shape)
    for n in shape:
        if n not in left:
            return False
        left.remove(n)
    return True


def _dims_along(extent: Extent, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the first axes of these lengths, all or none."""
    names = [next((d for d, m in zip(*extent, strict=True) if m == n), None) for n in shape]
    return () if None in names or len(set(names)) < len(names) else tuple(names)  # type: ignore[arg-type]


def _report(group: _Group, lineage: Lineage) -> Grouping:
    raw = [m.variable.name for m in group.members if m.raw]
    whole = [m.variable.name for m in group.members if not m.raw]
    effects = [*whole, *group.derived]
    packed = [
        name
        for name in group.scale_names
        if lineage.is_packed_cholesky(name) and any(lineage.is_from(d, {name}) for d in group.scale_names if d != name)
    ]
    name = ":".join(d.removesuffix(_BAMBI) for d in group.dims) or ", ".join(effects or raw)
    return Grouping(
        name,
        math.prod(group.shape),
        scales=[s for s in group.scale_names if s not in packed],
        effects=effects,
        offsets=raw,
        packed=packed,
    )
