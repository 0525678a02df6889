"""What the rows of a model are: of which of its variables, and functions of what. For people to read.

Each variable's part of log p is taken apart by itself, with predictors that all parts share.
"""

import functools

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints, TooDenseError, joined
from pymc_ngvi.core.values import Array
from pymc_ngvi.density.by_rows import TOO_DENSE, TOO_LARGE, ByRows
from pymc_ngvi.density.flat import FlatGraphs, Functions
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.affine import predictors
from pymc_ngvi.reading.compiled import CompiledOnce, quickly
from pymc_ngvi.reading.dependence import Dependences
from pymc_ngvi.reading.distribute import as_sum, without_checks
from pymc_ngvi.reading.found import written_apart
from pymc_ngvi.reading.terms import Rows, Terms, terms_of

type Role = Literal["observed", "prior", "potential"]


@dataclass(frozen=True, eq=False)
class PredictorKind:
    """One of the predictors of each row of a kind.

    Parameters
    ----------
    depends : Dependence
        On which coordinates that of each row depends, (n_rows,).
    number : ndarray of int, shape (n_rows,)
        Which of all predictors it is.
    is_coordinate : bool
        Whether it is a coordinate itself, and no linear combination.
    """

    depends: Dependence
    number: Ints
    is_coordinate: bool

    @property
    def n_different(self) -> int:
        """Different predictors, all rows together."""
        return len(np.unique(self.number))

    @functools.cached_property
    def coordinates(self) -> Ints:
        """Coordinates that any row's depends on, ascending."""
        return np.unique(self.depends.sets[np.unique(self.depends.index)].indices)


@dataclass(frozen=True, eq=False)
class RowKind:
    """Rows that are the same function of different predictors.

    Parameters
    ----------
    variable : str
        The one of the model whose log density they are of.
    role : {"observed", "prior", "potential"}
    predictors : tuple of PredictorKind
    n_directions : int
        In how many directions the function varies.
    """

    variable: str
    role: Role
    predictors: tuple[PredictorKind, ...]
    n_directions: int

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.predictors[0].number)


@dataclass(frozen=True)
class NoRows:
    """A variable whose log density is no sum over rows, and why."""

    variable: str
    role: Role
    why: str


@dataclass(frozen=True)
class ModelRows:
    """Log p as a sum over rows, as far as it is one.

    Parameters
    ----------
    kinds : tuple of RowKind
        Those of observed variables first.
    rest : tuple of NoRows
        Variables with parts that are no rows.
    n_dim : int
        Coordinates.
    n_linear, n_entries : int
        Rows and entries of X, where predictors that are no coordinates themselves are an offset plus X theta.
    why_not : str
        Why no expectations are taken by rows, where they are not; empty where they are.
    """

    kinds: tuple[RowKind, ...] = ()
    rest: tuple[NoRows, ...] = ()
    n_dim: int = 0
    n_linear: int = 0
    n_entries: int = 0
    why_not: str = ""


def described_rows(model: pm.Model, graphs: FlatGraphs, functions: Functions, by_rows: ByRows) -> ModelRows:
    """Return what the rows of a model are, or why there are none; variable by variable.

    Parameters
    ----------
    model : pymc.Model
    graphs : FlatGraphs
    functions : Functions
    by_rows : ByRows
        Those that a fit goes by.
    """
    if graphs.is_large:  # thousands of nodes, each of which would be looked at
        return ModelRows(why_not=TOO_LARGE)
    try:
        found = kinds_of_rows(model, graphs)
    except (ValueError, TooDenseError) as error:
        # With sums over many coordinates, rows may be too wide to be told of.
        found = ModelRows(why_not=(str(error) or TOO_DENSE) if by_rows.found is None else "")
    if graphs.minibatches:
        return replace(found, why_not="the data are minibatches")
    if by_rows.found is None and not found.why_not:
        return replace(found, why_not=by_rows.why_not)
    return found


def kinds_of_rows(model: pm.Model, graphs: FlatGraphs) -> ModelRows:
    """Take the log density of each variable of a model apart.

    Parameters
    ----------
    model : pymc.Model
    graphs : FlatGraphs
        Of the model.

    Raises
    ------
    ValueError, TooDenseError
        Where nothing can be told.
    """
    factors = _factors(model, graphs)
    theta = graphs.theta
    with without_c():
        logp, outer = written_apart(_stacked([factor for _, _, factor in factors]), theta)
        found = predictors(logp, theta, outer)
        if not found:
            raise ValueError("log p has no predictors")
        sizes = [int(np.prod(outer.shape(var))) for var in found]
        vector = pt.vector("predictors", dtype="float64", shape=(sum(sizes),))
        inner = _of_predictors(logp, theta, vector, {var: outer.shape(var) for var in found})
    whole = as_sum(without_checks(_stacked(inner)), vector)
    inner = list(whole.owner.inputs)
    facts = Facts(whole, vector, conditions=True)
    depends = _dependence(outer, theta, found)
    is_coordinate = np.repeat([var is theta for var in found], sizes)
    compile_ = CompiledOnce(quickly)
    kinds: list[RowKind] = []
    rest: list[NoRows] = []
    for (name, role, _), part in zip(factors, inner, strict=True):
        if facts.is_known(part):
            continue
        terms = _apart(part, vector, facts, compile_)
        if isinstance(terms, str):
            rest.append(NoRows(name, role, terms))
            continue
        kinds += _united([_kind(name, role, rows, depends, is_coordinate) for rows in terms.rows])
        if terms.rest:
            rest.append(NoRows(name, role, terms.why[0]))
    slots = [p.number for kind in kinds for p in kind.predictors if not p.is_coordinate]
    used = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *slots]))
    n_entries = int(np.diff(depends.sets.indptr)[depends.index[used]].sum())
    kinds.sort(key=lambda kind: ("observed", "potential", "prior").index(kind.role))
    return ModelRows(tuple(kinds), tuple(rest), int(theta.type.shape[0]), len(used), n_entries)


def _factors(model: pm.Model, graphs: FlatGraphs) -> list[tuple[str, Role, Variable]]:
    """Return the log densities of all variables, functions of theta, with the names of these."""
    roles: list[tuple[Variable, Role]] = [(rv, "prior") for rv in model.free_RVs]
    roles += [(rv, "observed") for rv in model.observed_RVs]
    roles += [(potential, "potential") for potential in model.potentials]
    with without_c(model):
        terms = model.logp(vars=[var for var, _ in roles], sum=False)
        sums = [pt.as_tensor(term, allow_xtensor_conversion=True).sum() for term in terms]
    with without_c():
        sums = graphs.simplify(graphs.on_flat_vector(sums))
    return [(str(var.name), role, total) for (var, role), total in zip(roles, sums, strict=True)]


def _stacked(scalars: Sequence[Variable]) -> Variable:
    return pt.basic.MakeVector("float64")(*[pt.cast(scalar, "float64") for scalar in scalars])


def _of_predictors(
    logp: Variable, theta: Variable, vector: Variable, shapes: dict[Variable, tuple[int, ...]]
) -> list[Variable]:
    """Return the elements of log p as functions of the predictors."""
    pieces, start = {}, 0
    for var, shape in shapes.items():
        stop = start + int(np.prod(shape))
        pieces[var] = pt.specify_shape(vector[start:stop].reshape(shape), shape)
        start = stop
    inner = graph_replace(list(logp.owner.inputs), pieces, strict=False)
    if theta in set(ancestors(inner)):
        raise ValueError("theta has a part that is no predictor's")
    simplified: list[Variable] = graph.inline_inner_graphs(graph.simplify(inner, check_bounds=False))
    return simplified


def _dependence(facts: Facts, theta: Variable, found: list[Variable]) -> Dependence:
    """Return on which coordinates each predictor depends."""
    dependences = Dependences(facts, theta)
    sets, indices = joined([dependences.of(var) for var in found])
    return Dependence(sets, np.concatenate([index.ravel() for index in indices]))


def _apart(part: Variable, vector: Variable, facts: Facts, compile_: CompiledOnce) -> Terms | str:
    """Take a part of log p apart, or return why it can't be."""
    try:
        return terms_of(part, vector, facts, compile_)
    except (ValueError, TooDenseError) as error:
        return str(error)


def _kind(name: str, role: Role, rows: Rows, depends: Dependence, is_coordinate: Array) -> RowKind:
    slots = [
        PredictorKind(Dependence(depends.sets, depends.index[at]), at, bool(is_coordinate[at].all()))
        for at in rows.index.T
    ]
    slots.sort(key=lambda slot: (slot.is_coordinate, slot.coordinates[:1].tolist()))
    return RowKind(name, role, tuple(slots), rows.n_directions)


def _united(kinds: list[RowKind]) -> list[RowKind]:
    """Put rows together that have as many predictors of the same kinds, and were found apart."""
    alike: dict[tuple[object, ...], list[RowKind]] = {}
    for kind in kinds:
        key = (kind.n_directions, *((p.is_coordinate, p.coordinates.tobytes()) for p in kind.predictors))
        alike.setdefault(key, []).append(kind)
    return [group[0] if len(group) == 1 else _joined(group) for group in alike.values()]


def _joined(group: list[RowKind]) -> RowKind:
    first = group[0]
    slots = []
    for same in zip(*(kind.predictors for kind in group), strict=True):
        index = np.concatenate([p.depends.index for p in same])
        number = np.concatenate([p.number for p in same])
        slots.append(PredictorKind(Dependence(same[0].depends.sets, index), number, same[0].is_coordinate))
    return RowKind(first.variable, first.role, tuple(slots), first.n_directions)
