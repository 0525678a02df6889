"""Loops over the fronts of sparse matrices, compiled by Numba: of small fronts as they are, of large ones by LAPACK.

Each takes matrices of one pattern, one after the other, an axis in front. Panels are held by columns, zeros above the
diagonal. Going up, what a front changes beside it waits in an (m, m) matrix until all is passed on to the parent; going
down, a front holds the inverse of its coordinates, from which children take theirs. What is held is that of the way to
the root alone.
"""

# mypy: ignore-errors

import math

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np

from numba import types
from numba.core import cgutils
from numba.extending import get_cython_function_address, intrinsic

from pymc_ngvi.core.sizes import LARGE

# Columns of a table of fronts, those first that are eliminated first: coordinates of its own, and beside; leaves in
# this row, one after the other, that have the same beside; where panels begin, its own in the order of elimination, and
# the list of what is beside; the row of the parent, -1 for none; whether it has no children; where what is held begins;
# whether it is the first child; where its root begins.
OWN, BESIDE, ALIKE, PANEL, START, FIRST, PARENT, IS_LEAF, HELD, OPENS, ROOT = range(11)

_ROOT_2 = math.sqrt(2.0)
_N, _T, _L, _R = (ord(letter) for letter in "NTLR")


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call; without a cache where none can be written."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)


# Calls that are none: leaves of one coordinate are little but these.
_part = numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


def _routine(library: str, name: str, kinds: str) -> Any:
    """Return a routine of SciPy's LAPACK, whose arguments are addresses: of characters, integers, numbers."""
    symbol = f"pymc_ngvi_{name}"  # addresses would keep compiled code from being cached
    llvmlite.binding.add_symbol(symbol, get_cython_function_address(f"scipy.linalg.cython_{library}", name))
    of_kind = {"c": types.uint8, "i": types.int32, "d": types.float64}
    return types.ExternalFunction(symbol, types.void(*(types.CPointer(of_kind[kind]) for kind in kinds)))


_dgemm = _routine("blas", "dgemm", "cciiiddididdi")
_dgemv = _routine("blas", "dgemv", "ciiddididdi")
_dsyrk = _routine("blas", "dsyrk", "cciiddiddi")
_dtrsm = _routine("blas", "dtrsm", "cccciiddidi")
_dpotrf = _routine("lapack", "dpotrf", "cidii")
_dpotri = _routine("lapack", "dpotri", "cidii")
_dsygst = _routine("lapack", "dsygst", "icididii")


# --- addresses, which LAPACK takes ---


@intrinsic
def _to(context, array, index):
    """Return an address."""

    def code(context, builder, signature, given):
        return builder.gep(context.make_array(signature.args[0])(context, builder, given[0]).data, given[1:])

    return types.CPointer(array.dtype)(array, index), code


def _held(kind):
    """Return what puts a number somewhere, and returns its address."""

    @intrinsic
    def address(context, number):
        def code(context, builder, signature, given):
            return cgutils.alloca_once_value(builder, context.cast(builder, given[0], signature.args[0], kind))

        return types.CPointer(kind)(number), code

    return address


_c, _i, _d = map(_held, (types.uint8, types.int32, types.float64))


@_part
def _add(y, j, weight, x, i, n):
    """Add a multiple of a vector to another one."""
    if weight != 0.0:
        for p in range(n):
            y[j + p] += weight * x[i + p]


@_part
def _fill(x, i, n, value):
    for p in range(i, i + n):
        x[p] = value


# --- dense matrices, held by columns: an array, where they begin, and the distance of columns ---


@_part
def _multiply(factor, a, i, da, b, j, db, of_b, c, h, dc, m, n, k):
    """Add a multiple of A B, or A B^T, to C, (m, n)."""
    if 1.0 * n * k > LARGE and m == da == dc == 1:
        rows, columns, turned = (n, k, _N) if of_b == _T else (k, n, _T)
        _dgemv(
            _c(turned),
            _i(rows),
            _i(columns),
            _d(factor),
            _to(b, j),
            _i(db),
            _to(a, i),
            _i(1),
            _d(1.0),
            _to(c, h),
            _i(1),
        )
        return
    if 1.0 * m * n * k > LARGE:
        _dgemm(
            _c(_N), _c(of_b), _i(m), _i(n), _i(k), _d(factor), _to(a, i), _i(da), _to(b, j), _i(db), _d(1.0),
            _to(c, h), _i(dc),
        )  # fmt: skip
        return
    if m == 0:
        return
    if m == dc == 1:  # a single vector
        for r in range(k if of_b == _T else 0):
            _add(c, h, factor * a[i + r * da], b, j + r * db, n)
        for q in range(0 if of_b == _T else n):
            total = 0.0
            for r in range(k):
                total += a[i + r * da] * b[j + q * db + r]
            c[h + q] += factor * total
        return
    row, column = (db, 1) if of_b == _T else (1, db)
    for q in range(n):
        for r in range(k):
            weight = factor * b[j + q * column + r * row]
            _add(c, h + q * dc, weight, a, i + r * da, m)


@_part
def _add_gram(factor, a, i, da, c, h, dc, m, n):
    """Add a multiple of A A^T, A being (m, n), to the lower triangle of C."""
    if 1.0 * m * m * n > LARGE:
        _dsyrk(_c(_L), _c(_N), _i(m), _i(n), _d(factor), _to(a, i), _i(da), _d(1.0), _to(c, h), _i(dc))
        return
    for x in range(i, i + n * da, da):
        for q in range(m):
            _add(c, h + q * dc + q, factor * a[x + q], a, x + q, m - q)


@_part
def _divide(b, j, db, m, t, i, dt, k, turned):
    """Make B, (m, k), B L^-T or B L^-1."""
    if 1.0 * m * k * k > LARGE:
        _dtrsm(_c(_R), _c(_L), _c(turned), _c(_N), _i(m), _i(k), _d(1.0), _to(t, i), _i(dt), _to(b, j), _i(db))
        return
    for step in range(k if m else 0):
        q = step if turned == _T else k - 1 - step
        scale = 1.0 / t[i + q * dt + q]
        for p in range(j + q * db, j + q * db + m):
            b[p] = scale * b[p]
        if m == db == 1 and turned == _T:
            _add(b, j + q + 1, -b[j + q], t, i + q * dt + q + 1, k - q - 1)
            continue
        first, last, at, apart = (q + 1, k, i + q * dt, 1) if turned == _T else (0, q, i + q, dt)
        for other in range(first, last):
            _add(b, j + other * db, -t[at + other * apart], b, j + q * db, m)


@_part
def _eliminate(a, i, s, k):
    """Make the first k columns of a symmetric matrix of size s those of its factor, if there is one."""
    if 1.0 * s * k * k > LARGE:
        _dpotrf(_c(_L), _i(k), _to(a, i), _i(s), _i(0))
        if s > k:
            _divide(a, i + k, s, s - k, a, i, s, k, _T)
        return
    for q in range(k):
        x = i + q * s
        scale = 1.0 / np.sqrt(a[x + q])
        for p in range(x + q, x + s):
            a[p] = scale * a[p]
        for r in range(q + 1, k):
            _add(a, i + r * s + r, -a[x + r], a, x + r, s - r)


@_part
def _copy(a, i, da, b, j, db, m, n):
    """Copy (m, n) numbers to B."""
    for q in range(n):
        for p in range(m):
            b[j + q * db + p] = a[i + q * da + p]


@_part
def _mirror(a, i, da, b, j, db, n, below):
    """Copy the lower triangle of a symmetric matrix to both of B, with a factor off the diagonal."""
    for q in range(n):
        b[j + q * db + q] = a[i + q * da + q]
        for p in range(q + 1, n):
            number = below * a[i + q * da + p]
            b[j + q * db + p] = number
            b[j + p * db + q] = number


@_part
def _clear(a, i, da, n):
    """Put zeros above the diagonal."""
    for q in range(1, n):
        _fill(a, i + q * da, q, 0.0)


# --- up and down the tree of fronts ---


@_part
def _begin(fronts, f, work):
    """Let a leaf begin with zeros beside it; where there are children, the first of them does."""
    if fronts[f, IS_LEAF]:
        _fill(work, fronts[f, HELD], fronts[f, BESIDE] ** 2, 0.0)


@_part
def _pass_on(fronts, inner, f, work, panels):
    """Add what a front changes beside it to the parent."""
    m, up = fronts[f, BESIDE], fronts[f, PARENT]
    if m == 0:
        return
    k_up, m_up, panel, held = fronts[up, OWN], fronts[up, BESIDE], fronts[up, PANEL], fronts[up, HELD]
    if fronts[f, OPENS]:
        _fill(work, held, m_up * m_up, 0.0)
    first, change = fronts[f, FIRST], fronts[f, HELD]
    for q in range(m):
        to = inner[first + q]
        if to < k_up:
            _scatter(work, change + q * m, inner, first, q, m, panels, panel + to * (k_up + m_up))
        else:
            _scatter(work, change + q * m, inner, first, q, m, work, held + (to - k_up) * m_up - k_up)


@_part
def _scatter(x, i, inner, first, begin, end, y, j):
    for p in range(begin, end):
        y[j + inner[first + p]] += x[i + p]


@_part
def _take(fronts, inner, f, work):
    """Take from the parent what a front has beside it, both triangles."""
    k, m, up, held = fronts[f, OWN], fronts[f, BESIDE], fronts[f, PARENT], fronts[f, HELD]
    s, s_up, at_up = k + m, fronts[up, OWN] + fronts[up, BESIDE], fronts[up, HELD]
    first, corner = fronts[f, FIRST], held + k * s + k
    for q in range(m):
        at = at_up + inner[first + q] * s_up
        for p in range(q, m):
            work[corner + q * s + p] = work[corner + p * s + q] = work[at + inner[first + p]]


@_part
def _hold(fronts, f, panels, work):
    """Hold both triangles of a panel beside what was taken."""
    k, s, a, held = fronts[f, OWN], fronts[f, OWN] + fronts[f, BESIDE], fronts[f, PANEL], fronts[f, HELD]
    for q in range(k):
        for p in range(q, s):
            work[held + q * s + p] = work[held + p * s + q] = panels[a + q * s + p]


# --- the factor ---


@_kernel
def factor(fronts, inner, n_held, diagonal, matrices, terms, least):
    """Return the factors of matrices, and which of them are positive definite, by more than rounding of the terms."""
    result, found, work = matrices.copy(), np.ones(len(matrices), np.bool_), np.empty(n_held)
    for h in range(len(matrices)):
        a, before = result[h], matrices[h]
        for f in range(len(fronts)):
            k, m, n, at = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL]
            for b in range(n):
                _eliminate(a, at + b * k * (k + m), k + m, k)
            _begin(fronts, f, work)
            _add_gram(-1.0, a, at + k, k + m, work, fronts[f, HELD], m, m, n * k)
            _pass_on(fronts, inner, f, work, a)
        for d in range(len(diagonal)):
            term = before[diagonal[d]]
            if len(terms):
                term = max(term, terms[h, d])
            root = a[diagonal[d]]
            found[h] = found[h] and 0.0 < root < np.inf and root**2 > least**2 * term
    return result, found


@_kernel
def multiply(fronts, beside, factors, vectors, n_vectors, inverse, transposed):
    """Multiply vectors, (n, n_dim * n_vectors), in the order of elimination, with L or L^T, or their inverses."""
    r, sign, is_up = n_vectors, -1.0 if inverse else 1.0, inverse != transposed
    apart = np.empty(r * max(fronts[:, OWN].max(), fronts[:, BESIDE].max()))
    for h in range(len(factors)):
        lower, x = factors[h], vectors[h]
        for step in range(len(fronts)):
            f = step if is_up else len(fronts) - 1 - step
            k, m, n, at = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL]
            first, s, rows = fronts[f, START] * r, k + m, fronts[f, FIRST]
            for turn in range(2):
                if (turn == 0) == is_up:
                    for b in range(n):
                        i, j = at + b * k * s, first + b * k * r
                        if inverse:
                            _divide(x, j, r, r, lower, i, s, k, _N if transposed else _T)
                            continue
                        _fill(apart, 0, r * k, 0.0)
                        _multiply(1.0, x, j, r, lower, i, s, _N if transposed else _T, apart, 0, r, r, k, k)
                        _copy(apart, 0, r, x, j, r, r, k)
                elif transposed:
                    for p in range(m):
                        _copy(x, beside[rows + p] * r, r, apart, p * r, r, r, 1)
                    _multiply(sign, apart, 0, r, lower, at + k, s, _N, x, first, r, r, n * k, m)
                else:
                    _fill(apart, 0, r * m, 0.0)
                    _multiply(sign, x, first, r, lower, at + k, s, _T, apart, 0, r, r, m, n * k)
                    for p in range(m):
                        _add(x, beside[rows + p] * r, 1.0, apart, p * r, r)


# --- the inverse ---


@_kernel
def inverse(fronts, inner, n_held, factors):
    """Return the lower triangles of the inverses of L L^T on the entries of L."""
    result, work = np.zeros_like(factors), np.empty(n_held)
    for h in range(len(factors)):
        lower, a = factors[h], result[h]
        for f in range(len(fronts) - 1, -1, -1):
            k, m, n, at = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL]
            s, held = k + m, fronts[f, HELD]
            _take(fronts, inner, f, work)
            if 1.0 * s * s * n * k > LARGE:
                _invert(fronts, f, lower, a, work, np.empty(m * n * k))
                if not fronts[f, IS_LEAF]:
                    _hold(fronts, f, a, work)
                continue
            for i in range(at, at + n * k * s, k * s):
                for q in range(k - 1, -1, -1):
                    column, y, below = i + q * s, held + q * s, q + 1
                    scale = 1.0 / lower[column + q]
                    _fill(work, y + below, s - below, 0.0)
                    for p in range(below, s):
                        weight = -scale * lower[column + p]
                        _add(work, y + below, weight, work, held + p * s + below, s - below)
                    total = scale
                    for p in range(below, s):
                        total -= lower[column + p] * work[y + p]
                        work[held + p * s + q] = work[y + p]
                    work[y + q] = scale * total
                    _copy(work, y + q, s, a, column + q, s, s - q, 1)
    return result


@_part
def _invert(fronts, f, lower, a, work, slopes):
    """Find the inverse in a row of large fronts, or of many, from that beside them."""
    k, m, n, at = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL]
    s = k + m
    _find_slopes(fronts, f, lower, slopes)
    _multiply(-1.0, work, fronts[f, HELD] + k * s + k, s, slopes, 0, m, _N, a, at + k, s, m, n * k, m)
    for b in range(n):
        i = at + b * k * s
        if k == 1:
            a[i] = lower[i] ** -2.0
        else:
            _copy(lower, i, s, a, i, s, k, k)
            _dpotri(_c(_L), _i(k), _to(a, i), _i(s), _i(0))
        _clear(a, i, s, k)
        if 1.0 * k * k * m > LARGE:
            _dgemm(
                _c(_T), _c(_N), _i(k), _i(k), _i(m), _d(-1.0), _to(slopes, b * m * k), _i(m), _to(a, i + k), _i(s),
                _d(1.0), _to(a, i), _i(s),
            )  # fmt: skip
            continue
        for q in range(k):
            for p in range(q, k):
                for r in range(m):
                    a[i + q * s + p] -= slopes[(b * k + p) * m + r] * a[i + q * s + k + r]


# --- the metric: see the formula of `cholesky` ---


@_kernel
def roots(fronts, inner, n_held, n_roots, inverses):
    """Return the roots R^T of the inverse beside each row of fronts, lower triangles, and which there are."""
    result, found, work = np.zeros((len(inverses), n_roots)), np.ones(len(inverses), np.bool_), np.empty(n_held)
    for h in range(len(inverses)):
        root = result[h]
        for f in range(len(fronts) - 1, -1, -1):
            k, m = fronts[f, OWN], fronts[f, BESIDE]
            _take(fronts, inner, f, work)
            square, last = np.empty(m * m), m * m - 1
            for q in range(m):
                for p in range(m):
                    square[last - q * m - p] = work[fronts[f, HELD] + (k + q) * (k + m) + k + p]
            _eliminate(square, 0, m, m)
            _clear(square, 0, m, m)
            for q in range(m):
                found[h] = found[h] and 0.0 < square[q * m + q] < np.inf
                for p in range(m):
                    root[fronts[f, ROOT] + p * m + q] = square[last - q * m - p]
            if not fronts[f, IS_LEAF]:
                _hold(fronts, f, inverses[h], work)
    return result, found


@_kernel
def whiten(fronts, inner, n_held, factors, of_roots, matrices):
    """Return vectors whose inner products are tr(V E V F), V the inverse, for symmetric matrices."""
    result, rest, work = np.zeros_like(matrices), matrices.copy(), np.empty(n_held)
    for h in range(len(factors)):
        lower, root, e, a = factors[h], of_roots[h], rest[h], result[h]
        for f in range(len(fronts)):
            k, m, n, at, held = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL], fronts[f, HELD]
            s = k + m
            own, slopes, apart = np.empty(k * k), np.empty(m * n * k), np.empty(m * n * k)
            _find_slopes(fronts, f, lower, slopes)
            _begin(fronts, f, work)
            _copy(e, at + k, s, apart, 0, m, m, n * k)
            _multiply(-1.0, slopes, 0, m, e, at + k, s, _T, work, held, m, m, m, n * k)
            for b in range(n):
                _mirror(e, at + b * k * s, s, own, 0, k, k, 1.0)
                _multiply(-1.0, slopes, b * m * k, m, own, 0, k, _N, apart, b * m * k, m, m, k, k)
            _multiply(-1.0, apart, 0, m, slopes, 0, m, _T, work, held, m, m, m, n * k)
            _multiply(_ROOT_2, root, fronts[f, ROOT], m, apart, 0, m, _N, a, at + k, s, m, n * k, m)
            for i in range(at, at + n * k * s, k * s):
                _mirror(e, i, s, own, 0, k, k, 1.0)
                _divide(a, i + k, s, m, lower, i, s, k, _T)
                _within(own, lower, i, s, k)
                _mirror(own, 0, k, a, i, s, k, _ROOT_2)
                _clear(a, i, s, k)
            _pass_on(fronts, inner, f, work, e)
    return result


@_part
def _find_slopes(fronts, f, lower, slopes):
    """Find L_BN L_N^-1 for each of a row of fronts, one after the other."""
    k, m, n, at = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL]
    _copy(lower, at + k, k + m, slopes, 0, m, m, n * k)
    for b in range(n):
        _divide(slopes, b * m * k, m, m, lower, at + b * k * (k + m), k + m, k, _N)


@_part
def _within(a, lower, i, s, k):
    """Make a symmetric matrix A L^-1 A L^-T, in the lower triangle."""
    if 1.0 * k * k * k > LARGE:
        _dsygst(_i(1), _c(_L), _i(k), _to(a, 0), _i(k), _to(lower, i), _i(s), _i(0))
        return
    _divide(a, 0, k, k, lower, i, s, k, _T)
    for q in range(k):
        for p in range(q):
            other = a[q * k + p]
            a[q * k + p] = a[p * k + q]
            a[p * k + q] = other
    _divide(a, 0, k, k, lower, i, s, k, _T)


@_part
def _divide_left(b, t, i, m, k):
    """Make B, (m, k), L^-1 B."""
    if 1.0 * m * m * k > LARGE:
        _dtrsm(_c(_L), _c(_L), _c(_N), _c(_N), _i(m), _i(k), _d(1.0), _to(t, i), _i(m), _to(b, 0), _i(m))
        return
    for q in range(k):
        for r in range(m):
            number = b[q * m + r] / t[i + r * m + r]
            b[q * m + r] = number
            _add(b, q * m + r + 1, -number, t, i + r * m + r + 1, m - r - 1)


@_kernel
def unwhiten(fronts, inner, n_held, factors, of_roots, vectors):
    """Return the matrices of vectors: the inverse of `whiten`."""
    result, rest, work = np.zeros_like(vectors), np.zeros_like(vectors), np.empty(n_held)
    for h in range(len(factors)):
        lower, root, given, e, a = factors[h], of_roots[h], vectors[h], rest[h], result[h]
        for f in range(len(fronts)):
            k, m, n, at, held = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL], fronts[f, HELD]
            s = k + m
            own, half, both = np.empty(k * k), np.empty(k * k), np.empty(k * k)
            slopes, turned, apart = np.empty(m * n * k), np.empty(m * n * k), np.zeros(m * n * k)
            _find_slopes(fronts, f, lower, slopes)
            _begin(fronts, f, work)
            _copy(given, at + k, s, turned, 0, m, m, n * k)
            _divide_left(turned, root, fronts[f, ROOT], m, n * k)
            for b in range(n):
                _multiply(
                    1.0 / _ROOT_2, turned, b * m * k, m, lower, at + b * k * s, s, _T, apart, b * m * k, m, m, k, k
                )
            _multiply(-1.0, apart, 0, m, slopes, 0, m, _T, work, held, m, m, m, n * k)
            for b in range(n):
                i, j = at + b * k * s, b * m * k
                _fill(own, 0, k * k, 0.0)
                _fill(half, 0, k * k, 0.0)
                _mirror(given, i, s, both, 0, k, k, 1.0 / _ROOT_2)
                _multiply(1.0, both, 0, k, lower, i, s, _T, half, 0, k, k, k, k)
                _multiply(1.0, lower, i, s, half, 0, k, _N, own, 0, k, k, k, k)
                _multiply(1.0, slopes, j, m, own, 0, k, _N, apart, j, m, m, k, k)
                for q in range(k):
                    _add(a, i + q * s + q, 1.0, own, q * k + q, k - q)
                    _add(a, i + q * s + k, 1.0, apart, j + q * m, m)
                    _add(a, i + q * s, -1.0, e, i + q * s, s)
            _multiply(-1.0, slopes, 0, m, apart, 0, m, _T, work, held, m, m, m, n * k)
            _pass_on(fronts, inner, f, work, e)
    return result
