"""What the rows of a model are: of which of its variables, and functions of what. For people to read."""

import functools

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.flat import FlatGraphs
from pymc_ngvi.reading.affine import Role
from pymc_ngvi.reading.terms import Rows


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

    def beside(self, other: "ModelRows") -> "ModelRows":
        """Return these, and those of another part of log p."""
        kinds, rest, why_not = self.kinds + other.kinds, self.rest + other.rest, self.why_not or other.why_not
        n_linear, n_entries = self.n_linear + other.n_linear, self.n_entries + other.n_entries
        return ModelRows(_in_order(kinds), rest, self.n_dim, n_linear, n_entries, why_not)


def described_rows(graphs: FlatGraphs, by_rows: ByRows) -> ModelRows:
    """Return what the rows of a model are, or why there are none; variable by variable."""
    reading = by_rows.reading
    if reading is None:
        return ModelRows(why_not=by_rows.why_not)
    try:
        depends, is_coordinate = reading.predictors.dependence, reading.predictors.are_coordinates
        kinds: list[RowKind] = []
        rest: list[NoRows] = []
        for part, factor in enumerate(graphs.factors):
            of_part, why = reading.terms.of_part(part)
            kinds += _united([_kind(factor.name, factor.role, rows, depends, is_coordinate) for rows in of_part])
            rest += [NoRows(factor.name, factor.role, reason) for reason in why[:1]]
        slots = [p.number for kind in kinds for p in kind.predictors if not p.is_coordinate]
        used = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *slots]))
        n_entries = int(np.diff(depends.sets.indptr)[depends.index[used]].sum())
        found = ModelRows(_in_order(kinds), tuple(rest), graphs.layout.n_dim, len(used), n_entries)
    except NotApart:  # with sums over many coordinates, rows may be too wide to be told of
        found = ModelRows()
    return replace(found, why_not=by_rows.why_not)


def _in_order(kinds: Iterable[RowKind]) -> tuple[RowKind, ...]:
    return tuple(sorted(kinds, key=lambda kind: ("observed", "potential", "prior").index(kind.role)))


def _kind(name: str, role: Role, rows: Rows, depends: Dependence, is_coordinate: NDArray[np.bool_]) -> RowKind:
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
