"""Which variables of a model are effects of groups, their standard deviations, and rows: by what each is made of."""

import functools
import math

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.scalar as ps

from pymc.backends.arviz import find_observations
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.graph import Apply, Constant, Op, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import Join, MakeVector
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor

from pymc_ngvi.core.messages import logger
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Indices
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.layout import Variable as Place
from pymc_ngvi.ops.elements import core_op
from pymc_ngvi.ops.registry import MOVEMENT

#: Place of the scale among the parameters of distributions of location and scale, by the name of their Op.
_SCALE_AT = {
    "NormalRV": 1,
    "LogNormalRV": 1,
    "LaplaceRV": 1,
    "CauchyRV": 1,
    "LogisticRV": 1,
    "GumbelRV": 1,
    "HalfNormalRV": 1,
    "HalfCauchyRV": 1,
    "SkewNormalRV": 1,
    "TruncatedNormalRV": 1,
    "MvNormalRV": 1,
    "StudentTRV": 2,
    "MvStudentTRV": 2,
}
_COPIES = (ps.Identity, ps.Cast)


#: Free variables.
type Names = frozenset[str]


def _union(variables: Iterable[Variable], made_of: Mapping[Variable, Names]) -> Names:
    return frozenset[str]().union(*(made_of.get(var, frozenset()) for var in variables))


class Lineage:
    """Answers what in a model is made of what; free variables are known by name."""

    def __init__(self, model: pm.Model) -> None:
        self.model = model
        self.free = {rv.name: rv for rv in model.free_RVs}
        self._outputs = [*model.observed_RVs, *model.potentials, *model.deterministics, *model.free_RVs]
        self._nodes = list(toposort(self._outputs))
        self._products: set[Variable] = set()
        #: The free variables that each variable is made of.
        self._made_of = self._all_made_of({})
        self._clients: dict[Variable, list[Apply]] = defaultdict(list)
        for node in self._nodes:
            for var in set(node.inputs):
                self._clients[var].append(node)

    def _all_made_of(self, fixed: Mapping[Variable, Names]) -> dict[Variable, Names]:
        """Return which free variables each variable is made of; ``fixed`` says it for some."""
        known = {**{rv: frozenset([name]) for name, rv in self.free.items()}, **fixed}
        result = dict(known)
        for node in self._nodes:
            made_of = frozenset() if isinstance(node.op, Shape | Shape_i) else _union(node.inputs, result)
            result |= {out: known.get(out, made_of) for out in node.outputs}
        return result

    def parents(self, var: Variable) -> Names:
        """Return the free variables that a variable is computed from."""
        return self._made_of.get(var, frozenset())

    @functools.cache  # noqa: B019  (lives as long as the search for roles)
    def ancestors(self, name: str) -> frozenset[Variable]:
        """Return all variables that one of the model is computed from, through priors, too."""
        return frozenset(ancestors([self.model[name]]))

    # --- priors ---

    def prior(self, rv: Variable) -> Names:
        """Return the free variables in the prior of one."""
        return _union(rv.owner.inputs, self._made_of) if rv.owner is not None else frozenset()

    def prior_scales(self, rv: Variable) -> Names:
        """Return the free variables in the scale of the prior of one; none where the prior has no such parameter."""
        if self.sums_to_zero(rv):
            return self.prior(rv)
        params, name = _parameters(rv)
        place = _SCALE_AT.get(name)
        return frozenset() if place is None or place >= len(params) else self.parents(params[place])

    def sums_to_zero(self, rv: Variable) -> bool:
        """Tell whether a variable is a ZeroSumNormal over one axis."""
        op: Op = getattr(rv.owner, "op", None)
        return type(op).__name__ == "ZeroSumNormalRV" and getattr(op, "ndim_supp", 0) == 1

    def is_missing_data(self, rv: Variable) -> bool:
        """Tell whether a free variable is the missing part of an observed one."""
        whole = rv.name.removesuffix("_unobserved")
        return whole != rv.name and whole in self.model.named_vars and f"{whole}_observed" in self.model.named_vars

    # --- what a variable is used for ---

    def multipliers(self, rv: Variable) -> Names:
        """Return the free variables in what multiplies a free variable before anything is added to it.

        None where it has a prior with parameters, or does not range over all real numbers.
        """
        if self.prior(rv) or not self._is_real(rv):
            return frozenset()
        products = self._products_of(rv)
        self._products.update(products)
        return _union(products, products)

    def is_standardised(self, rv: Variable) -> bool:
        """Tell whether an array of standard normals is multiplied by parameters: effects relative to their scale."""
        params, name = _parameters(rv)
        constants = [_constant(p) for p in params]
        standard = (name == "NormalRV" and constants == [0.0, 1.0]) or (
            self.sums_to_zero(rv) and constants[:1] == [1.0]
        )
        return standard and rv.type.ndim > 0 and bool(self.multipliers(rv))

    def is_latent_trait(self, rv: Variable) -> bool:
        """Tell whether a standard normal vector is multiplied by other vectors, as abilities by discriminations."""
        params, name = _parameters(rv)
        standard = name == "NormalRV" and [_constant(p) for p in params] == [0.0, 1.0]
        if not standard or not self._is_real(rv) or rv.type.ndim != 1:
            return False
        products = self._products_of(rv, added=True)
        return any(self.free[name].type.ndim > 0 for name in _union(products, products))

    def is_indexed(self, rv: Variable) -> bool:
        """Tell whether levels of a variable are picked, as by observations."""
        return any(isinstance(node.op, AdvancedSubtensor) for node in self._ways(rv))

    def used_elsewhere(self, effects: set[str]) -> Names:
        """Return the free variables that the data, potentials or priors depend on other than through some effects."""
        made_of = self._all_made_of({out: own for out in self._products if (own := self._made_of[out] & effects)})
        read = set[Variable]()
        for var in [*self.model.observed_RVs, *self.model.potentials, *self.model.free_RVs]:
            if var.owner is not None and var.name not in effects:
                # A free variable stands for itself: what its prior depends on counts, and is among the inputs.
                read.update([var] if var in self.model.potentials else var.owner.inputs)
        return _union(read, made_of) - effects

    def _is_real(self, rv: Variable) -> bool:
        return self.model.rvs_to_transforms.get(rv) is None or self.sums_to_zero(rv)

    def _ways(self, rv: Variable, *, added: bool = False) -> list[Apply]:
        """Return the nodes that a variable reaches with its elements moved, or multiplied by data, or added to."""
        found, stack, seen = [], [rv], set()
        while stack:
            var = stack.pop()
            for node in self._clients[var]:
                if node in seen:
                    continue
                seen.add(node)
                found.append(node)
                if self._passes(node, var, added):
                    stack.extend(node.outputs)
        return found

    def _passes(self, node: Apply, var: Variable, added: bool) -> bool:
        scalar_op = getattr(node.op, "scalar_op", None)
        if not MOVEMENT.keys().isdisjoint(type(core_op(node.op)).__mro__):
            return var is node.inputs[0] or isinstance(node.op, Join | MakeVector)  # others are indices and lengths
        if not isinstance(node.op, Elemwise) and type(node.op).__name__ != "XElemwise":
            return False
        if added and isinstance(scalar_op, ps.Add | ps.Sub | ps.Neg):
            return True
        others = [i for i in node.inputs if i is not var]
        data = isinstance(scalar_op, ps.Mul | ps.TrueDiv) and not any(map(self.parents, others))
        return data or isinstance(scalar_op, _COPIES)

    def _products_of(self, rv: Variable, *, added: bool = False) -> dict[Variable, Names]:
        """Return the products of a variable with what is made of other free variables, and which these are."""
        products = {}
        for node in self._ways(rv, added=added):
            scalar_op = getattr(node.op, "scalar_op", None)
            multiplies = isinstance(scalar_op, ps.Mul | ps.TrueDiv) and not isinstance(node.op, CAReduce)
            if multiplies or isinstance(core_op(node.op), Dot) or type(core_op(node.op)).__name__ == "Einsum":
                others = [i for i in node.inputs if rv.name not in self.parents(i)]
                products[node.outputs[0]] = _union(others, self._made_of)
        return {out: names for out, names in products.items() if names}


def top_level_priors(model: pm.Model, names: Sequence[str]) -> list[str]:
    """Return those of some free variables that have a prior of their own, or all where none has.

    Others are part of what the model says given these: their prior has parameters, they are effects relative to their
    scale, or missing data.
    """
    lineage = Lineage(model)
    own = [
        name
        for name in names
        if not (
            lineage.prior(model[name]) or lineage.is_standardised(model[name]) or lineage.is_missing_data(model[name])
        )
    ]
    return own or list(names)


def _parameters(rv: Variable) -> tuple[list[Variable], str]:
    """Return the parameters of the distribution of a random variable, and the name of its Op."""
    op: Op = getattr(rv.owner, "op", None)
    name = type(getattr(op, "core_op", op)).__name__  # distributions of pymc.dims have the plain one inside
    try:
        return list(op.dist_params(rv.owner)), name
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return [], name


def _constant(var: Variable) -> float | None:
    """Return the number that a parameter is, if it is one, whatever its number of axes."""
    while var.owner is not None and isinstance(var.owner.op, DimShuffle):
        var = var.owner.inputs[0]
    return float(var.data) if isinstance(var, Constant) and var.data.size == 1 else None


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

    variable: Place
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

    def levels(self, within: Indices) -> Indices:
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
            scales &= {u.name for u in layout.variables if u.size in (1, inside) or not axes[u.name]}
        latent = v.size > MAX_ROWS and lineage.is_latent_trait(rv)
        if across and (centred or scales or latent):
            found[v.name] = _Effects(v, across, extent, frozenset(scales), raw=not centred and bool(scales))
    # What is in the prior of a variable that is no effect itself, as local scales of coefficients are, is none.
    while True:
        others = [rv for rv in model.free_RVs if rv.name not in found]
        needed = set().union(*(lineage.prior(rv) for rv in others)) & set(found)
        if not needed:
            return list(found.values())
        found = {name: effects for name, effects in found.items() if name not in needed}


def _varies_along(scale: Extent | None, effects: Extent, axis: int) -> bool:
    """Tell whether a scale has a value for each entry of an axis of effects with several axes."""
    if scale is None or not scale.shape or len(effects.shape) < 2:
        return False
    if effects.dims[axis] is not None and None not in scale.dims:
        return effects.dims[axis] in scale.dims
    return effects.shape[axis] in scale.shape


def uncoupled_axes(v: Place, pattern: Pattern) -> tuple[int, ...]:
    """Return the axes along which no two coordinates of a variable share an entry of the Hessian."""
    if v.size < 2:
        return ()
    rows, cols = _entries(pattern, v, v)
    apart = rows != cols
    i, j = (np.unravel_index(part[apart], v.shape) for part in (rows, cols))
    return tuple(a for a, n in enumerate(v.shape) if n > 1 and np.array_equal(i[a], j[a]))


def _entries(pattern: Pattern, of_rows: Place, of_cols: Place) -> tuple[Indices, Indices]:
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
    # Cholesky factors that are packed to vectors, and Deterministics made of them.
    free = {name: lineage.free[name] for name in group.scale_names if name in lineage.free}
    packed = [
        name
        for name, rv in free.items()
        if "LKJCholesky" in type(rv.owner.op).__name__
        and any(lineage.parents(lineage.model[d]) == {name} for d in group.scale_names if d != name)
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
