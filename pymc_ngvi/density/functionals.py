"""What people look at beside coordinates: Deterministics, linear predictors, and their sums."""

import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.model_density import ModelDensity
from pymc_ngvi.rows.linear_map import LinearMap

#: Elements that are looked at, at most.
_MOST = 300
#: Time of the evaluations, as a part of that of the gradients that moved the draws, and seconds in any case.
_PART, _FLOOR = 0.15, 0.02
#: Names in a list.
_N_NAMED = 4
#: Seed of Deterministics that draw random numbers.
_SEED = 3_000_003
#: The group of linear predictors.
PREDICTORS = "linear predictors"

type Evaluate = Callable[[Array], dict[str, AnyArray]]


@dataclass(frozen=True)
class Group:
    """Elements of one quantity that are compared, and their sum."""

    #: Of a Deterministic, or `PREDICTORS`.
    name: str
    shape: tuple[int, ...]
    #: Elements that are compared; the sum is that of all, where these are two at least.
    index: NDArray[np.intp]

    @property
    def size(self) -> int:
        """Elements in all."""
        return math.prod(self.shape)

    @property
    def has_sum(self) -> bool:
        """Whether the last of its columns is the sum."""
        return self.size > 1

    @property
    def n_columns(self) -> int:
        """Columns that it has: elements, and the sum."""
        return len(self.index) + self.has_sum

    def columns(self, values: AnyArray) -> Array:
        """Return these, (n_draws, n_columns), of values, (n_draws, *shape)."""
        flat = values.reshape(len(values), -1).astype(np.float64, copy=False)
        if not self.has_sum:
            return flat[:, self.index]
        with np.errstate(all="ignore"):
            return np.column_stack([flat[:, self.index], flat.sum(axis=1)])

    def label(self, column: int) -> str:
        """Return what a column is, for a sentence."""
        of_predictors = self.name == PREDICTORS
        if column == len(self.index):
            return f"the sum of {self.name if of_predictors else f'`{self.name}`'}"
        element = int(self.index[column])
        if of_predictors:
            return f"linear predictor {element}"
        position = ", ".join(str(int(i)) for i in np.unravel_index(element, self.shape))
        return f"`{self.name}[{position}]`" if self.shape else f"`{self.name}`"


@dataclass(frozen=True)
class Functionals:
    """Quantities that can be computed of draws, and are no coordinates."""

    #: In the order of their columns.
    groups: tuple[Group, ...]
    #: Values by name of group, (n_draws, *shape), of draws, (n_draws, n_dim).
    evaluate: Evaluate
    #: Estimated, of one draw.
    seconds: float
    #: Those of the last group, where that is of linear predictors.
    of_predictors: "Columns | None" = None

    def only_predictors(self) -> "Functionals":
        """Return the linear predictors alone."""
        groups = tuple(group for group in self.groups if group.name == PREDICTORS)
        return replace(self, groups=groups, seconds=0.0)

    def without_predictors(self) -> "Functionals | None":
        """Return all others; None where there are none."""
        groups = tuple(group for group in self.groups if group.name != PREDICTORS)
        return replace(self, groups=groups, of_predictors=None) if groups else None

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """Which columns are a sum, or all that there is of a quantity."""
        parts = [np.arange(g.n_columns) == g.n_columns - 1 for g in self.groups]
        return np.concatenate(parts) if parts else np.empty(0, dtype=bool)

    def at(self, theta: Array) -> Array:
        """Return all columns at draws, (n_draws, n_columns)."""
        held = max(1, AT_ONCE // max(sum(g.size for g in self.groups if g.name != PREDICTORS), 1))
        rows = []
        for start in range(0, len(theta), held):
            values = self.evaluate(theta[start : start + held])
            rows.append(np.column_stack([self._columns(g, values, theta[start : start + held]) for g in self.groups]))
        return np.concatenate(rows)

    def _columns(self, group: Group, values: dict[str, AnyArray], theta: Array) -> Array:
        if group.name == PREDICTORS and self.of_predictors is not None:
            return self.of_predictors(theta)
        return group.columns(values[group.name])

    def in_words(self) -> str:
        """Return how many there are, as they are compared."""
        return f"{self.of_elements()}, before and after"

    def of_elements(self) -> str:
        """Return how many there are."""
        named = [f"{PREDICTORS}" if g.name == PREDICTORS else f"`{g.name}`" for g in self.groups]
        names = ", ".join(named[:_N_NAMED]) + (f" and {len(named) - _N_NAMED} more" if len(named) > _N_NAMED else "")
        sums = ", and sums" if any(g.has_sum for g in self.groups) else ""
        n = sum(len(g.index) for g in self.groups)
        return f"{n:,} element{'s'[: n != 1]} of {names}{sums}"

    def affordable(self, seconds: float) -> int:
        """Return how many draws can be evaluated in estimated seconds, beside some that always may be."""
        return int((_PART * seconds + _FLOOR) / max(self.seconds, 1e-9))

    def where(self, column: int) -> tuple[Group, int]:
        """Return the group of a column, and which of its columns that is."""
        for group in self.groups:
            if column < group.n_columns:
                return group, column
            column -= group.n_columns
        raise IndexError("there is no such column")


def functionals_of(density: ModelDensity, constrain: Constrainer) -> Functionals | None:
    """Return what can be computed of draws; None where there is nothing, or it can't be computed."""
    names = _deterministics(density, constrain)
    predictors = _predictors(density)
    point = density.initial_point()[None]
    try:
        seconds = constrain.seconds if names else 0.0
        values = constrain(point, random_seed=_SEED) if names else {}
    except Exception:  # what a Deterministic raises is not for a diagnosis to tell
        names, values, seconds = [], {}, 0.0
    shapes = {name: values[name].shape[1:] for name in names}
    if predictors is not None:
        shapes[PREDICTORS] = (len(predictors[1]),)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if math.prod(shape)}
    each = _most_each(list(sizes.values()))
    groups = tuple(
        Group(name, shapes[name], np.unique(np.linspace(0, size - 1, min(size, each)).round().astype(np.intp)))
        for name, size in sizes.items()
    )
    if not groups:
        return None
    of_predictors = None if predictors is None else _of_columns(*predictors, groups[-1])

    def evaluate(theta: Array) -> dict[str, AnyArray]:
        return constrain(theta, random_seed=_SEED) if names else {}

    return Functionals(groups, evaluate, seconds, of_predictors)


def _deterministics(density: ModelDensity, constrain: Constrainer) -> list[str]:
    """Return the names of the Deterministics that draws have."""
    known = {d.name for d in density.deterministics}
    return [name for name in constrain.computed if name in known]


def _predictors(density: ModelDensity) -> tuple[LinearMap, NDArray[np.intp]] | None:
    """Return linear predictors, and those that people look at, where rows are known already.

    These depend on two coordinates or more, and a likelihood or a Potential is a function of them: what a prior is
    written by, such as the whitened vector of a normal distribution, means nothing to anybody.
    """
    if not density.by_rows.are_known or density.n_directions is None or (rows := density.by_rows.found) is None:
        return None
    linear = rows.linear_map.plain
    entries = np.count_nonzero(linear.dense, axis=1) + np.diff(linear.rest.indptr)
    kinds = described.kinds if (described := density.described_rows()) is not None else ()
    numbers = [p.number for kind in kinds if kind.role != "prior" for p in kind.predictors]
    is_looked_at = np.zeros(len(entries), dtype=bool)
    is_looked_at[np.concatenate([np.empty(0, dtype=np.intp), *numbers])] = True
    several = np.flatnonzero((entries > 1) & is_looked_at)
    return (linear, several) if len(several) else None


@dataclass(frozen=True, eq=False)
class Columns:
    """Linear predictors, as columns."""

    #: shape (n_columns,).
    offset: Array
    #: shape (n_columns, n_dim).
    matrix: Array

    def __call__(self, theta: Array) -> Array:
        """Return them at draws, (n_draws, n_columns)."""
        return self.offset + theta @ self.matrix.T


def _of_columns(linear: LinearMap, several: NDArray[np.intp], group: Group) -> Columns:
    """Return the columns of the group of predictors, without the others."""
    shown, dense, rest = several[group.index], linear.dense[several], linear.rest[several]
    matrix = np.zeros((group.n_columns, linear.n_dim))
    matrix[: len(shown), linear.columns] = linear.dense[shown]
    matrix[: len(shown)] += linear.rest[shown].toarray()
    offset = linear.offset[shown]
    if group.has_sum:
        matrix[-1, linear.columns] = dense.sum(axis=0)
        matrix[-1] += np.asarray(rest.sum(axis=0)).ravel()
        offset = np.append(offset, linear.offset[several].sum())
    return Columns(offset, matrix)


def _most_each(sizes: Sequence[int]) -> int:
    each = _MOST
    while each > 1 and sum(min(size, each) for size in sizes) > _MOST:
        each -= 1
    return each
