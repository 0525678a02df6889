"""The rows of a log density as arrays and functions of JAX."""

import functools

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpy.typing import NDArray
from pytensor.graph.basic import Variable

from pymc_ngvi.core.normal_rules import Rule, rule
from pymc_ngvi.core.target import Expectation, RowRules, Spread
from pymc_ngvi.core.values import Array
from pymc_ngvi.density.expectations import Expectations, Seen
from pymc_ngvi.density.jitted.summed import SummedKindOnJax
from pymc_ngvi.density.jitted.sums import KindOnJax, distribution, hessian_added
from pymc_ngvi.families.matrices.on_jax import DENSE, DIAGONAL, Form, factor_of, form_of
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.jaxed import in_float64, jaxed
from pymc_ngvi.reading.row_graphs import of_sum, path_of, shared_first, with_one_column
from pymc_ngvi.reading.terms import Rows
from pymc_ngvi.rows.expectation import RowFunction, SummedRowFunction
from pymc_ngvi.rows.levels import Levels, unpacked
from pymc_ngvi.rows.linear_map import LinearMap
from pymc_ngvi.rows.mean_hessian import Patterns, PredictorMeanHessian

#: Numbers of X, at most; from which on NumPy leaves products with it to the device.
_MOST_NUMBERS, _LARGE = 2**28, 2**23
#: Rows that are evaluated at once: on a processor, what its cache holds; elsewhere, what keeps it busy.
_AT_A_TIME, _ON_DEVICE = 2**13, 2**18
#: Rules and nodes for which there is always room, so that other rules are other numbers, not other shapes.
_FEW_RULES, _FEW_NODES = 8, 512


class NotOnJax(Exception):
    """Why rows cannot go by JAX, in a clause."""


class RowsOnJax:
    """Rows on a device of JAX; to be made and used inside `in_float64`.

    Parameters
    ----------
    rows : Expectations
        All rows, anchored.
    timed : callable
        Returns a context in which time counts as spent on compiling.

    Attributes
    ----------
    kinds : tuple of KindOnJax
    compiled : dict
        What was compiled of them.

    Raises
    ------
    NotOnJax
    """

    def __init__(self, rows: Expectations, timed: Callable[[], AbstractContextManager[None]]) -> None:
        self._rows, self.timed, linear = rows, timed, rows.linear_map.plain
        self._n_numbers = sum(len(kind.index) * (kind.k - kind.n_shared) for kind in rows.functions) * linear.n_dim
        if self._n_numbers > _MOST_NUMBERS:
            raise NotOnJax(f"the matrices of its predictors would have {self._n_numbers:,} numbers")
        with in_float64():
            self.kinds = tuple(
                _kind(part, function) for part, function in zip(rows.terms.rows, rows.functions, strict=True)
            )
        self.compiled: dict[Any, Any] = {}

    @functools.cached_property
    def _fixed(self) -> dict[str, Any]:
        """What does not depend on rules."""
        rows, linear = self._rows, self._rows.linear_map.plain
        constant = rows.constant + float(rows.terms.slope @ linear.offset)
        slope = linear.transposed_times(rows.terms.slope[None])[0]
        kinds = [_matrices(linear, kind) for kind in rows.functions]
        return {"kinds": kinds, "slope": jnp.asarray(slope), "constant": jnp.asarray(constant)}

    @property
    def n_rows(self) -> int:
        """All kinds together."""
        return self._rows.n_rows

    def takes(self, q: Spread) -> bool:
        """Tell whether products with X are worth a device, under a Gaussian with a factor of its covariance."""
        return self._n_numbers >= _LARGE and form_of(q) is not None

    def under(self, q: Spread, entries: Patterns, rules: RowRules | None, *, adapt: bool, least: float) -> Expectation:
        """Return expectations under a Gaussian as `Expectations.under` does, with products with X on the device."""
        with in_float64():
            found = self._called(_covariances, form_of(q), jnp.asarray(q.location), jnp.asarray(factor_of(q)))
            wide = [
                np.broadcast_to(np.asarray(cov), (kind.n_rows,))
                for kind, of_kind in zip(self.kinds, found, strict=True)
                for cov in of_kind
            ]
        seen = Seen(self._rows.linear_map(q.location[None])[0], wide)
        expectation = self._rows.under_seen(seen, entries, rules, adapt=adapt, least=least)
        plain = expectation.hessian
        assert isinstance(plain, PredictorMeanHessian)
        hessian = HessianOnJax(plain.linear, plain.matrix, entries, None, plain.of_rows, self)
        return expectation._replace(hessian=hessian)

    def hessian(self, form: Form, of_rows: Sequence[tuple[Array, Array]]) -> Array:
        """Return the sum of X_a^T diag(h_ab) X_b over kinds and pairs of predictors, or its diagonal."""
        with in_float64():
            bends = [
                {(a, b): jnp.asarray(h[:, a, b]) for a, b in kind.pairs()}
                for kind, (_, h) in zip(self.kinds, of_rows, strict=True)
            ]
            return np.array(self._called(_hessian, form, bends))

    def _called(self, function: Callable[..., Any], form: Form | None, *given: Any) -> Any:
        """Call a function of kinds, a form, what does not depend on rules, and more; it is compiled once."""
        key = function, form
        if key not in self.compiled:
            self.compiled[key] = jax.jit(functools.partial(function, self.kinds, form))
        return self.compiled[key](self._fixed, *given)

    def arrays(self, rules: RowRules) -> Any:
        """Return what `sums` takes: what depends on theta, and the rules."""
        starts = np.cumsum([kind.n_rows for kind in self.kinds])[:-1]
        levels, sds = np.split(rules.level, starts), np.split(rules.sd, starts)
        with in_float64():
            by_kind = zip(self._rows.terms.rows, self._rows.functions, self._fixed["kinds"], levels, sds, strict=True)
            kinds = [fixed | _by_rules(rows, function, level, sd) for rows, function, fixed, level, sd in by_kind]
            return self._fixed | {"kinds": kinds}


def rows_on_jax(rows: Expectations, timed: Callable[[], AbstractContextManager[None]]) -> RowsOnJax | str:
    """Return rows on a device, or why they cannot go there, in a clause."""
    try:
        return RowsOnJax(rows, timed)
    except NotOnJax as error:
        return str(error)


@dataclass(frozen=True, eq=False)
class HessianOnJax(PredictorMeanHessian):
    """One whose products with X are made on the device.

    Parameters
    ----------
    on_jax : RowsOnJax
    """

    on_jax: RowsOnJax | None = None

    @functools.cached_property
    def _dense(self) -> Array:
        assert self.on_jax is not None
        return self.on_jax.hessian(DENSE, self.of_rows)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        assert self.on_jax is not None
        return self.on_jax.hessian(DIAGONAL, self.of_rows)


def _covariances(kinds: tuple[KindOnJax, ...], form: Form, fixed: Any, mean: Any, factor: Any) -> list[list[Any]]:
    """Return the covariances of each kind of rows, pair by pair."""
    found = [distribution(kind, form, x, mean, factor)[1] for kind, x in zip(kinds, fixed["kinds"], strict=True)]
    return [[cov[pair] for pair in kind.pairs()] for kind, cov in zip(kinds, found, strict=True)]


def _hessian(kinds: tuple[KindOnJax, ...], form: Form, fixed: Any, bends: list[Any]) -> Any:
    """Return the Hessian of all rows."""
    total = form.zeros(len(fixed["slope"]))
    for kind, x, of_kind in zip(kinds, fixed["kinds"], bends, strict=True):
        total = hessian_added(kind, form, x, of_kind, total)
    return total


def _kind(rows: Rows, function: RowFunction) -> KindOnJax:
    """Return the function of rows.

    Raises
    ------
    NotOnJax
        Where an operation of theirs has no version in JAX.
    """
    try:
        if isinstance(function, SummedRowFunction):
            return _summed_kind(rows, function)
        slots, value = rows.slots, rows.value
        if not rows.is_whole:
            slots, value = with_one_column(*shared_first(rows))
        traced = _traceable(slots, rows, [value])
    except Exception as error:
        raise NotOnJax(f"an operation has no version in JAX ({str(error).splitlines()[0]})") from error
    return KindOnJax(traced, function.k, function.n_shared, len(function.index), _interacts(function))


def _summed_kind(rows: Rows, function: SummedRowFunction) -> SummedKindOnJax:
    assert rows.sum_ is not None
    with without_c():
        path = _traceable(rows.slots[: -rows.n_summed], rows, path_of(rows, rows.sum_))
        beside, inputs, value = of_sum(rows, rows.sum_)
    return SummedKindOnJax(
        _traceable(inputs, rows, [value]), function.k, 0, len(function.index), _interacts(function), rows.n_summed,
        path, tuple(beside),
    )  # fmt: skip


def _traceable(inputs: Sequence[Variable], rows: Rows, outputs: Sequence[Variable]) -> Callable[..., Any]:
    """Return a function of predictors and data, and see that JAX can trace it."""
    traced = jaxed([*inputs, *rows.data], outputs)
    shapes = [jax.ShapeDtypeStruct((1, 1), jnp.float64) for _ in inputs]
    jax.eval_shape(traced, *shapes, *[jnp.asarray(d[:, :1]) for d in rows.data.values()])
    return traced


def _interacts(function: RowFunction) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(map(bool, line)) for line in function.interacts)


def _matrices(linear: LinearMap, kind: RowFunction) -> dict[str, Any]:
    """Return offsets and rows of X for each predictor; of those that all rows share, one."""
    x, offset = [], []
    for a in range(kind.k):
        index = kind.index[:, a]
        if a < kind.n_shared:
            x.append(jnp.asarray(linear.rows(index[:1])[0]))
            offset.append(jnp.asarray(linear.offset[index[0]]))
        else:
            x.append(jnp.asarray(_rows_of(linear, index)))
            offset.append(jnp.asarray(linear.offset[index]))
    return {"x": x, "offset": offset}


def _rows_of(linear: LinearMap, index: NDArray[np.int64]) -> Array:
    """Return rows of X, as a view where that is possible."""
    first, last, all_columns = int(index[0]), int(index[-1]), np.arange(linear.n_dim)
    follow = len(index) == last - first + 1 and (np.diff(index) == 1).all()
    if follow and not linear.rest.nnz and np.array_equal(linear.columns, all_columns):
        return linear.dense[first : last + 1]
    return linear.rows(index)


def _by_rules(rows: Rows, function: RowFunction, codes: Levels, sd: NDArray[np.float32]) -> dict[str, Any]:
    """Return rows in the order of their rules, each rule's padded to whole parts, and the rules themselves."""
    found, number = np.unique(codes, return_inverse=True)
    size = _part_size(len(codes))
    places, rules = [], []
    for i in range(len(found)):
        at = np.flatnonzero(number == i)
        n_parts = -(-len(at) // size)
        places.append(np.pad(at, (0, n_parts * size - len(at)), mode="edge"))
        rules += [i] * n_parts
    n_rules = _at_least(len(found), _FEW_RULES)
    room = -(-len(codes) // size) + n_rules  # parts, however the rules are shared out
    order = np.pad(np.concatenate(places), (0, (room - len(rules)) * size))
    place = np.empty(len(codes), dtype=np.int64)
    place[order[: len(rules) * size][::-1]] = np.arange(len(rules) * size)[::-1]  # padding comes after what it repeats
    data = [d if d.shape[1] == 1 else d[:, order] for d in rows.data.values()]
    return {
        "order": jnp.asarray(order), "place": jnp.asarray(place), "data": [jnp.asarray(d) for d in data],
        "rule": jnp.asarray(np.pad(np.array(rules, dtype=np.int64), (0, room - len(rules)))),
        "n_parts": jnp.asarray(len(rules)), "sd": jnp.asarray(sd), "fine": jnp.asarray(codes > 0),
        "rules": _tables(function, found, n_rules),
    }  # fmt: skip


def _tables(function: RowFunction, codes: Levels, n_rules: int) -> dict[str, Any]:
    """Return nodes and weights of rules, with room for more."""
    levels = [unpacked(int(code), len(function.blocks)) for code in codes]
    if isinstance(function, SummedRowFunction):
        across = _table([rule(function.n_others, level[:-1]) for level in levels], n_rules)
        nodes, weights, n_nodes = _table([rule(1, level[-1:]) for level in levels], n_rules).values()
        return across | {"along": nodes[:, :, 0], "weights_along": weights, "n_along": n_nodes}
    return _table([rule(function.k, level) for level in levels], n_rules)


def _table(rules: list[Rule], n_rules: int) -> dict[str, Any]:
    """Return nodes and weights, padded, and how many nodes there are."""
    n_nodes = np.array([len(r.nodes) for r in rules] + [0] * (n_rules - len(rules)))
    most = _at_least(int(n_nodes.max()), _FEW_NODES)
    nodes = np.zeros((n_rules, most, rules[0].nodes.shape[1]))
    weights = np.zeros((n_rules, len(rules[0].weights), most))
    for i, r in enumerate(rules):
        nodes[i, : len(r.nodes)], weights[i, :, : len(r.nodes)] = r.nodes, r.weights
    return {"nodes": jnp.asarray(nodes), "weights": jnp.asarray(weights), "n_nodes": jnp.asarray(n_nodes)}


def _at_least(n: int, least: int) -> int:
    """Return a power of 2 that is as large as either."""
    return max(least, 1 << (n - 1).bit_length())


def _part_size(n_rows: int) -> int:
    """Return how many rows are evaluated at once."""
    most = _AT_A_TIME if jax.default_backend() == "cpu" else _ON_DEVICE
    return min(most, _at_least(n_rows, 1))
