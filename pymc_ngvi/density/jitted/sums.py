"""Expectations of rows under a Gaussian, traced by JAX: what `Expectations` does, by rules that are given.

Three parts, none of which holds more than a few numbers a row: how the predictors of each row are distributed; the
expectations of each row, by its own rule, rows with the same rule together; and their sums by coordinate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax import lax

from pymc_ngvi.families.matrices.on_jax import Form, Traced

#: Numbers of X that are multiplied at once: on a processor, what its cache holds; elsewhere, what keeps it busy.
_AT_A_TIME, _ON_DEVICE = 2**18, 2**25
#: As in `expectation`, and in `taken`.
_LEAST_VARIANCE, _WIDER, _NARROWER = 1e-12, 1.25, 0.5


#: Entries of lower-triangular matrices, of each row.
type Roots = dict[tuple[int, int], Traced]


@dataclass(frozen=True, eq=False)
class KindOnJax:
    """Rows that are the same function.

    Parameters
    ----------
    function : callable
        From predictors, (1, n_rows) or (1, 1) each, and data to a tuple of values.
    k, n_shared, n_rows : int
        Predictors of a row; how many of the first are the same for all; rows.
    interacts : tuple of tuple of bool
        By which pairs of predictors a second derivative may differ from 0.
    """

    function: Callable[..., Traced]
    k: int
    n_shared: int
    n_rows: int
    interacts: tuple[tuple[bool, ...], ...]

    @property
    def own(self) -> range:
        """Predictors that differ from row to row."""
        return range(self.n_shared, self.k)

    @property
    def n_moments(self) -> int:
        """Expectations that gradient and Hessian are made of, and the value."""
        return 1 + self.k + self.k * (self.k + 1) // 2

    def moments(self, rules: Any, at: Traced, mean: list[Traced], root: Roots, data: list[Traced]) -> Traced:
        """Return E[f], E[f z] and E[f (z z^T - I)], (n_moments, n_rows), of rows that have the same rule.

        Parameters
        ----------
        rules : dict
            Nodes and weights of all rules.
        at : int
            Number of this one.
        mean, root : array, shape (n_rows,), or scalars where all rows share them
        data : list of array, shape (1, n_rows) or (1, 1)
        """
        size = max(x.size for x in (*mean, *data))  # predictors of all may be shared, and data not

        def node(j: Traced, acc: Traced) -> Traced:
            z = rules["nodes"][at, j]
            points = [(mean[a] + sum(root[a, b] * z[b] for b in range(a + 1))).reshape(1, -1) for a in range(self.k)]
            [values] = self.function(*points, *data)
            return acc + rules["weights"][at, :, j][:, None] * jnp.broadcast_to(values, (1, size))

        return lax.fori_loop(0, rules["n_nodes"][at], node, jnp.zeros((self.n_moments, size)))

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of predictors, lower triangle by rows."""
        return ((a, b) for a in range(self.k) for b in range(a + 1))


class Sums(NamedTuple):
    """Sums over rows.

    Parameters
    ----------
    value : scalar
        E[log p].
    grad : array, shape (n_dim,)
    hessian : array
        Or its diagonal.
    is_stale : bool
        Whether the rules are those of other widths.
    second : list of array
        E[f''] of each row with one predictor; empty for kinds of more.
    """

    value: Traced
    grad: Traced
    hessian: Traced
    is_stale: Traced
    second: list[Traced]


def sums(kinds: tuple[KindOnJax, ...], form: Form, arrays: Any, mean: Traced, factor: Traced) -> Sums:
    """Return expectations under N(mean, C C^T).

    Parameters
    ----------
    kinds : tuple of KindOnJax
    form : Form
    arrays : dict
        Made by `RowsOnJax`.
    mean, factor : array
    """
    grad, hessian = arrays["slope"], form.zeros(len(mean))
    value = arrays["constant"] + arrays["slope"] @ mean
    is_stale, second = jnp.array(False), []
    for kind, of_kind in zip(kinds, arrays["kinds"], strict=True):
        eta, cov = distribution(kind, form, of_kind, mean, factor)
        root = _roots(kind, cov)
        whitened = _whitened(kind, of_kind, eta, root)
        slopes, bends = _derivatives(kind, whitened, root)
        value = value + whitened[0].sum()
        grad = _gradient_added(kind, of_kind, slopes, grad)
        hessian = hessian_added(kind, form, of_kind, bends, hessian)
        is_stale = is_stale | _stale(kind, of_kind, cov)
        second.append(bends[0, 0] if kind.k == 1 else jnp.zeros(0))
    return Sums(value, grad, hessian, is_stale, second)


# --- how predictors are distributed ---


def distribution(kind: KindOnJax, form: Form, arrays: Any, mean: Traced, factor: Traced) -> tuple[list[Traced], Roots]:
    """Return means and covariances of the predictors of each row; of those that all rows share, one number."""
    eta = [x @ mean + offset for x, offset in zip(arrays["x"], arrays["offset"], strict=True)]
    shared = [form.spread(factor, x[None])[0] for x in arrays["x"][: kind.n_shared]]
    cov = {(a, b): shared[a] @ shared[b] for a in range(kind.n_shared) for b in range(a + 1)}
    mixed = [(a, b) for a, b in kind.pairs() if a >= kind.n_shared]
    if not mixed:
        return eta, cov
    n, size = kind.n_rows, _size(kind.n_rows, len(mean))

    def fill(i: Traced, out: Traced) -> Traced:
        start = jnp.minimum(i * size, n - size)
        own = {a: form.spread(factor, _part(arrays["x"][a], start, size)) for a in kind.own}
        found = [(own[a] * own[b]).sum(axis=1) if b in own else own[a] @ shared[b] for a, b in mixed]
        return lax.dynamic_update_slice(out, jnp.stack(found), (0, start))

    found = lax.fori_loop(0, -(-n // size), fill, jnp.zeros((len(mixed), n)))
    return eta, cov | {pair: found[i] for i, pair in enumerate(mixed)}


def _size(n_rows: int, n_dim: int) -> int:
    """Return the rows of X that are multiplied at once."""
    most = _AT_A_TIME if jax.default_backend() == "cpu" else _ON_DEVICE
    return min(n_rows, max(1, most // n_dim))


def _part(x: Traced, start: Traced, size: int) -> Traced:
    return lax.dynamic_slice_in_dim(x, start, size)


def _stale(kind: KindOnJax, arrays: Any, cov: Roots) -> Traced:
    """Tell whether rows are wider, or much narrower, than those that rules were chosen for; as `changed`."""
    widest = cov[0, 0]
    for a in range(1, kind.k):
        widest = jnp.maximum(widest, cov[a, a])
    now, before = jnp.sqrt(widest).astype(jnp.float32), arrays["sd"]
    return ((now > _WIDER * before) | (arrays["fine"] & (now < _NARROWER * before))).any()


def _roots(kind: KindOnJax, cov: Roots) -> Roots:
    """Return lower-triangular Cholesky factors, with zeros for what has no variance left."""
    root: Roots = {}
    for a in range(kind.k):
        for b in range(a):
            left = cov[a, b] - sum(root[a, c] * root[b, c] for c in range(b))
            root[a, b] = left * reciprocal(root[b, b])
        left = cov[a, a] - sum(root[a, c] ** 2 for c in range(a))
        root[a, a] = jnp.sqrt(jnp.where(left > _LEAST_VARIANCE * cov[a, a], left, 0.0))
    return root


def reciprocal(x: Traced) -> Traced:
    """Return 1 / x, and 0 of what is not positive."""
    return jnp.where(x > 0.0, 1.0 / jnp.where(x > 0.0, x, 1.0), 0.0)


# --- expectations of each row ---


def _whitened(kind: KindOnJax, arrays: Any, eta: list[Traced], root: Roots) -> Traced:
    """Return E[f], E[f z] and E[f (z z^T - I)], (n_moments, n_rows), each by its own rule."""
    order = arrays["order"]
    eta = [eta[a] if a < kind.n_shared else eta[a][order] for a in range(kind.k)]
    root = {pair: r if pair[0] < kind.n_shared else r[order] for pair, r in root.items()}
    size = len(order) // len(arrays["rule"])

    def part(i: Traced, out: Traced) -> Traced:
        start, rule = i * size, arrays["rule"][i]
        here = [m if a < kind.n_shared else _part(m, start, size) for a, m in enumerate(eta)]
        own = {pair: r if pair[0] < kind.n_shared else _part(r, start, size) for pair, r in root.items()}
        data = [d if d.shape[1] == 1 else lax.dynamic_slice_in_dim(d, start, size, axis=1) for d in arrays["data"]]

        found = kind.moments(arrays["rules"], rule, here, own, data)
        return lax.dynamic_update_slice(out, found, (0, start))

    out = lax.fori_loop(0, arrays["n_parts"], part, jnp.zeros((kind.n_moments, len(order))))
    return out[:, arrays["place"]]


def _derivatives(kind: KindOnJax, whitened: Traced, root: Roots) -> tuple[list[Traced], Roots]:
    """Return E[grad f], an array for each predictor, and E[hess f], one for each pair."""
    k, inverse = kind.k, _inverse_roots(kind.k, root)
    whole = {pair: whitened[1 + k + i] for i, pair in enumerate(kind.pairs())}
    slopes = [sum(inverse[b, a] * whitened[1 + b] for b in range(a, k)) for a in range(k)]
    bends = {
        (a, b): sum(
            inverse[c, a] * whole[max(c, d), min(c, d)] * inverse[d, b] for c in range(a, k) for d in range(b, k)
        )
        if kind.interacts[a][b]
        else jnp.zeros(kind.n_rows)
        for a, b in kind.pairs()
    }
    return slopes, bends


def _inverse_roots(k: int, root: Roots) -> Roots:
    """Return inverses of lower-triangular matrices; what has a zero on the diagonal has zeros there."""
    inverse: Roots = {}
    for a in range(k):
        inverse[a, a] = reciprocal(root[a, a])
        for b in range(a):
            inner = sum(root[a, c] * inverse[c, b] for c in range(b, a))
            inverse[a, b] = -inner * inverse[a, a]
    return inverse


# --- sums by coordinate ---


def _gradient_added(kind: KindOnJax, arrays: Any, slopes: list[Traced], grad: Traced) -> Traced:
    """Add X^T alpha to a gradient."""
    for a, (x, slope) in enumerate(zip(arrays["x"], slopes, strict=True)):
        grad = grad + (x * slope.sum() if a < kind.n_shared else slope @ x)
    return grad


def hessian_added(kind: KindOnJax, form: Form, arrays: Any, bends: Roots, hessian: Traced) -> Traced:
    """Add X_a^T diag(h_ab) X_b to a Hessian, for each pair of predictors."""
    x = arrays["x"]
    for a in range(kind.n_shared):
        for b in range(a + 1):
            product = form.outer(x[a], x[b]) * bends[a, b].sum()
            hessian = hessian + (product if a == b else product + form.transposed(product))
    for a in kind.own:
        for b in range(kind.n_shared):
            product = form.outer(bends[a, b] @ x[a], x[b])
            hessian = hessian + product + form.transposed(product)
    if not kind.own:
        return hessian
    n, size = kind.n_rows, _size(kind.n_rows, len(hessian))

    def add(i: Traced, total: Traced) -> Traced:
        start = jnp.minimum(i * size, n - size)
        is_new = start + jnp.arange(size) >= i * size  # the last part overlaps the one before
        own = {a: _part(x[a], start, size) for a in kind.own}
        for a, b in kind.pairs():
            if b in own and kind.interacts[a][b]:
                weights = jnp.where(is_new, _part(bends[a, b], start, size), 0.0)
                product = form.quadratic(own[a], weights, own[b])
                total = total + (product if a == b else product + form.transposed(product))
        return total

    return lax.fori_loop(0, -(-n // size), add, hessian)
