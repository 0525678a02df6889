"""Functions of rows from their values: whether they are concave or quadratic, and numbers as combinations of few."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.rows.expectation import RowFunction

#: Points on a line: a parabola has no third differences there.
_ON_LINE = np.arange(-2.0, 3.0)
_STRAIGHT = 1e-7
#: Points at which functions are compared with chords.
FAR = np.linspace(-12.0, 12.0, 49)


def is_quadratic(rows: RowFunction) -> bool:
    """Tell whether functions of rows are polynomials of the second degree, at most."""
    rng = np.random.default_rng(0)
    shape = rows.index.shape
    about, along = rng.standard_normal(shape), rng.standard_normal(shape)
    points = [about[:, a] + _ON_LINE[:, None] * along[:, a] for a in range(shape[1])]
    with np.errstate(all="ignore"):
        values: Array = rows.values(points, slice(None))
        bends, size = np.abs(np.diff(values, 3, axis=0)), np.abs(values).max(axis=0)
        return bool((bends <= _STRAIGHT * (1.0 + size)).all())


def is_concave(rows: RowFunction, about: Array) -> bool:
    """Tell whether functions of rows of one predictor are concave, near and far from where these are, (n_rows, 1)."""
    return rows.k == 1 and all(bool(are_concave(rows, 0, about, size * FAR).all()) for size in (0.1, 1.0))


def are_concave(rows: RowFunction, slot: int, about: Array, along: Array) -> Bools:
    """Tell which functions of rows are concave in one of their predictors on lines, (n_rows,)."""
    points = [np.broadcast_to(about[:, a], (len(along), len(about))).copy() for a in range(rows.k)]
    points[slot] += along[:, None]
    with np.errstate(all="ignore"):
        values = rows.values(points, slice(None))
        bends = np.diff(values, 2, axis=0)
        size = 1.0 + np.abs(values[:-2]) + np.abs(values[2:])
        # Where values are not finite, the function is out of its range.
        bent = (bends > _STRAIGHT * size) & np.isfinite(size)
    return ~bent.any(axis=0)


# --- X^T M X for X and M that are combinations of fixed matrices, whatever their weights: all products, once ---


#: Part of the entries of a matrix from which on a product with it is that of a dense one.
_DENSE = 0.25


class CrossProducts:
    """The entries of X^T M X, where X = sum_k a_k X_k and M = sum_m b_m M_m."""

    def __init__(self, designs: Sequence[sparse.csr_array], weights: Sequence[sparse.csr_array]) -> None:
        d, factors, found = designs[0].shape[1], list[tuple[int, int, int]](), list[sparse.csr_array]()
        for m, weight in enumerate(weights):
            for j, second in enumerate(designs):
                product = sparse.csr_array(weight @ second)
                for i, first in enumerate(designs[: j + 1]):
                    gram = _product(first, product)
                    gram = sparse.csr_array(sparse.tril(gram if i == j else gram + gram.T))
                    gram.eliminate_zeros()
                    if gram.nnz:
                        factors.append((m, i, j))
                        found.append(gram)
        places = [np.repeat(np.arange(d), np.diff(g.indptr)) * d + g.indices for g in found]
        every = np.unique(np.concatenate([*places, np.arange(d) * (d + 1)]))
        self.pattern = Pattern(every // d, every % d, d)
        rows = np.concatenate([np.searchsorted(every, at) for at in places])
        cols = np.repeat(np.arange(len(found)), [g.nnz for g in found])
        data = np.concatenate([g.data for g in found])
        self._sums = sparse.csr_array((data, (rows, cols)), shape=(len(every), len(found)))
        self._factors = np.array(factors).T

    def __call__(self, of_designs: Array, of_weights: Array) -> Array:
        """Return the entries, (n, n_entries), from a, (n, n_designs), and b, (n, n_weights)."""
        m, i, j = self._factors
        products = of_weights[:, m] * of_designs[:, i] * of_designs[:, j]
        return np.ascontiguousarray((self._sums @ products.T).T)


def _product(first: sparse.csr_array, second: sparse.csr_array) -> sparse.csr_array:
    """Return the product of the transpose of one matrix with another one."""
    if min(first.nnz, second.nnz) > _DENSE * first.shape[0] * first.shape[1]:
        return sparse.csr_array(first.toarray().T @ second.toarray())
    return sparse.csr_array(first.T @ second)


# --- first and second derivatives of rows that are polynomials of the second degree, from values ---


def derivatives_of(rows: RowFunction, eta: Array) -> tuple[Array, Array]:
    """Return the gradient, (n_rows, k), and the second derivatives by pairs of slots, (n_rows, n_pairs).

    Differences of a polynomial of the second degree are exact whatever the step; that of least rounding is as long as
    the function is wide, and reaches as far as its top.
    """
    slope, second = _differences(rows, eta, np.ones_like(eta))
    a, b = np.tril_indices(rows.k)
    bend = -second[:, a == b]
    with np.errstate(all="ignore"):
        step = np.where(bend > 0.0, 1.0 / np.sqrt(bend) + np.abs(slope) / bend, 1.0)
    return _differences(rows, eta, np.where(np.isfinite(step), step, 1.0))


def _differences(rows: RowFunction, eta: Array, step: Array) -> tuple[Array, Array]:
    k = rows.k
    a, b = np.tril_indices(k)
    moves = [np.zeros(k), *np.eye(k), *-np.eye(k)]
    moves += [np.eye(k)[i] + np.eye(k)[j] for i, j in zip(a, b, strict=True) if i != j]
    above, below = eta + step, eta - step
    step_up, step_down = (above - eta).T, (eta - below).T  # as they are where predictors are far larger than steps
    ends = np.stack([below, eta, above])
    points = [ends[1 + np.array(moves)[:, slot].astype(np.intp), :, slot] for slot in range(k)]
    with np.errstate(all="ignore"):
        values = rows.values(points, slice(None))
        middle, both = values[0], iter(values[1 + 2 * k :])
        up, down = values[1 : 1 + k] - middle, middle - values[1 + k : 1 + 2 * k]
        of_up, of_down, whole = up / step_up, down / step_down, step_up + step_down
        grad = (of_up * step_down + of_down * step_up) / whole
        second = [
            2.0 * (of_up[i] - of_down[i]) / whole[i]
            if i == j
            else (next(both) - middle - up[i] - up[j]) / (step_up[i] * step_up[j])
            for i, j in zip(a, b, strict=True)
        ]
    return grad.T, np.stack(second, axis=1)


#: Weights of one of the members that are rounding; square of a number, of the largest, from which on it may be one.
_NO_WEIGHT, _PIVOT = 1e-11, 1e-4


@dataclass(frozen=True, eq=False)
class Separable:
    """Numbers as combinations of some of them."""

    #: Which of the numbers; shape (n_members,).
    members: Indices
    #: shape (n, n_members).
    weights: Array

    @classmethod
    def of(cls, samples: Array, scale: Array, tolerance: float) -> "Separable | None":
        """Find which numbers all follow from; None where they are as many as there are samples, nearly."""
        n_samples, n = samples.shape
        whole = samples * np.divide(1.0, scale, out=np.zeros(n), where=scale > 0.0)
        left, members = whole.copy(), list[int]()
        while len(members) < n_samples - 2:
            size = np.einsum("sn,sn->n", left, left)
            best = int(np.argmax(size >= _PIVOT * size.max()))  # the first: with other data, it is mostly the same one
            if not size.max() > tolerance**2 * n_samples:
                break
            members.append(best)
            direction = left[:, best] / np.sqrt(size[best])
            for _ in range(2):  # once more, for what rounding has left
                left -= direction[:, None] * (direction @ left)
        else:
            return None
        if not members:
            return cls(np.empty(0, dtype=np.intp), np.zeros((n, 0)))
        weights = np.linalg.lstsq(whole[:, members], whole, rcond=None)[0].T
        weights[np.abs(weights) < _NO_WEIGHT] = 0.0
        return cls(np.array(members, dtype=np.intp), weights * scale[:, None] / scale[members])

    def agrees(self, samples: Array, scale: Array, tolerance: float) -> bool:
        """Tell whether other samples, (n_samples, n), are such combinations."""
        apart = np.abs(samples[:, self.members] @ self.weights.T - samples)
        size = np.maximum(scale, np.abs(samples))
        return bool((apart <= tolerance * size).all())
