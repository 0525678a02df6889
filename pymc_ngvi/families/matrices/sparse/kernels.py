"""Loops over the fronts of sparse matrices, compiled by Numba: of small fronts as they are, of large ones by LAPACK.

Each takes matrices of one pattern, one after the other, an axis in front. Panels are held by columns, zeros above the
diagonal. Going up, what a front changes beside it waits in an (m, m) matrix until all is passed on to the parent; going
down, a front holds the inverse of its coordinates, from which children take theirs. What is held is that of the way to
the root alone.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np

from numba import types
from numba.extending import get_cython_function_address

# Columns of a table of fronts, those first that are eliminated first: coordinates of its own, and beside; leaves in
# this row, one after the other, that have the same beside; where panels begin, its own in the order of elimination, and
# the list of what is beside; the row of the parent, -1 for none; whether it has no children; where what is held begins;
# whether it is the first child; where its root begins.
OWN, BESIDE, ALIKE, PANEL, START, FIRST, PARENT, IS_LEAF, HELD, OPENS, ROOT = range(11)

#: Multiplications from which on a call of LAPACK takes no longer than loops.
_LARGE = 16_000.0
_ROOT_2 = 1.4142135623730951
_N, _T, _L, _R, _U = (ord(letter) for letter in "NTLRU")


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call; without a cache where none can be written."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


def _routine(library: str, name: str, kinds: str) -> Any:
    """Return a routine of SciPy's LAPACK, whose arguments are addresses: of characters, integers, numbers."""
    symbol = f"pymc_ngvi_{name}"  # addresses would keep compiled code from being cached
    llvmlite.binding.add_symbol(symbol, get_cython_function_address(f"scipy.linalg.cython_{library}", name))
    of_kind = {"c": types.uint8, "i": types.int32, "d": types.float64}
    return types.ExternalFunction(symbol, types.void(*(types.CPointer(of_kind[kind]) for kind in kinds)))


_dgemm = _routine("blas", "dgemm", "cciiiddididdi")
_dsyrk = _routine("blas", "dsyrk", "cciiddiddi")
_dtrsm = _routine("blas", "dtrsm", "cccciiddidi")
_dpotrf = _routine("lapack", "dpotrf", "cidii")
_dpotri = _routine("lapack", "dpotri", "cidii")
_dsygst = _routine("lapack", "dsygst", "icididii")


# --- dense matrices, held by columns: an array, where they begin, and the distance of columns ---


@numba.njit
def _letters(a, b, c):
    return np.array((a, b, c, _N), dtype=np.uint8)


@numba.njit
def _integers(a, b, c, d, e, f):
    return np.array((a, b, c, d, e, f), dtype=np.int32)


@numba.njit
def _multiply(factor, a, i, da, of_a, b, j, db, of_b, c, h, dc, m, n, k):
    """Add a multiple of A B to C, (m, n); A or B may be transposed."""
    if 1.0 * m * n * k > _LARGE:
        how, size, numbers = _letters(of_a, of_b, 0), _integers(m, n, k, da, db, dc), np.array((factor, 1.0))
        _dgemm(
            how.ctypes, how[1:].ctypes, size.ctypes, size[1:].ctypes, size[2:].ctypes, numbers.ctypes, a[i:].ctypes,
            size[3:].ctypes, b[j:].ctypes, size[4:].ctypes, numbers[1:].ctypes, c[h:].ctypes, size[5:].ctypes,
        )  # fmt: skip
        return
    for q in range(n):
        y = c[h + q * dc : h + q * dc + m]
        for r in range(k):
            weight = factor * (b[j + r * db + q] if of_b == _T else b[j + q * db + r])
            if weight == 0.0:
                continue
            if of_a == _T:
                for p in range(m):
                    y[p] += weight * a[i + p * da + r]
            else:
                x = a[i + r * da : i + r * da + m]
                for p in range(m):
                    y[p] += weight * x[p]


@numba.njit
def _add_gram(factor, a, i, da, c, h, m, n):
    """Add a multiple of A A^T, A being (m, n), to the lower triangle of C."""
    if 1.0 * m * m * n > _LARGE:
        how, size, numbers = _letters(_L, _N, 0), _integers(m, n, da, m, 0, 0), np.array((factor, 1.0))
        _dsyrk(
            how.ctypes, how[1:].ctypes, size.ctypes, size[1:].ctypes, numbers.ctypes, a[i:].ctypes, size[2:].ctypes,
            numbers[1:].ctypes, c[h:].ctypes, size[3:].ctypes,
        )  # fmt: skip
        return
    for r in range(n):
        x = a[i + r * da : i + r * da + m]
        for q in range(m):
            weight = factor * x[q]
            if weight != 0.0:
                y = c[h + q * m : h + q * m + m]
                for p in range(q, m):
                    y[p] += weight * x[p]


@numba.njit
def _by_blas(side, triangle, turned, m, n, t, i, dt, b, j, db):
    """Solve with a triangle, as ``dtrsm`` does."""
    how, size, one = _letters(side, triangle, turned), _integers(m, n, dt, db, 0, 0), np.ones(1)
    _dtrsm(
        how.ctypes, how[1:].ctypes, how[2:].ctypes, how[3:].ctypes, size.ctypes, size[1:].ctypes, one.ctypes,
        t[i:].ctypes, size[2:].ctypes, b[j:].ctypes, size[3:].ctypes,
    )  # fmt: skip


@numba.njit
def _divide(b, j, db, m, t, i, dt, k, turned):
    """Make B, (m, k), B L^-T or B L^-1."""
    if 1.0 * m * k * k > _LARGE:
        _by_blas(_R, _L, turned, m, k, t, i, dt, b, j, db)
        return
    for step in range(k):
        q = step if turned == _T else k - 1 - step
        x = b[j + q * db : j + q * db + m]
        scale = 1.0 / t[i + q * dt + q]
        for p in range(m):
            x[p] *= scale
        for other in range(q + 1, k) if turned == _T else range(q):
            weight = t[i + q * dt + other] if turned == _T else t[i + other * dt + q]
            if weight != 0.0:
                y = b[j + other * db : j + other * db + m]
                for p in range(m):
                    y[p] -= weight * x[p]


@numba.njit
def _eliminate(a, i, s, k):
    """Make the first k columns of a symmetric matrix of size s those of its factor; tell whether that went well."""
    if 1.0 * s * k * k > _LARGE:
        how, size = _letters(_L, 0, 0), _integers(k, s, 0, 0, 0, 0)
        _dpotrf(how.ctypes, size.ctypes, a[i:].ctypes, size[1:].ctypes, size[2:].ctypes)
        if size[2] != 0:
            return False
        if s > k:
            _divide(a, i + k, s, s - k, a, i, s, k, _T)
        return True
    for q in range(k):
        x = a[i + q * s : i + q * s + s]
        if not x[q] > 0.0:
            return False
        scale = 1.0 / np.sqrt(x[q])
        for p in range(q, s):
            x[p] *= scale
        for r in range(q + 1, k):
            weight = x[r]
            if weight != 0.0:
                y = a[i + r * s : i + r * s + s]
                for p in range(r, s):
                    y[p] -= weight * x[p]
    return True


@numba.njit
def _copy(a, i, da, b, j, db, m, n):
    """Copy (m, n) numbers to B."""
    for q in range(n):
        for p in range(m):
            b[j + q * db + p] = a[i + q * da + p]


@numba.njit
def _mirror(a, i, da, b, j, db, n, below):
    """Copy the lower triangle of a symmetric matrix to both of B, with a factor off the diagonal."""
    for q in range(n):
        b[j + q * db + q] = a[i + q * da + q]
        for p in range(q + 1, n):
            b[j + q * db + p] = b[j + p * db + q] = below * a[i + q * da + p]


@numba.njit
def _clear(a, i, da, n):
    """Put zeros above the diagonal."""
    for q in range(1, n):
        for p in range(q):
            a[i + q * da + p] = 0.0


# --- up and down the tree of fronts ---


@numba.njit
def _begin(fronts, f, work):
    """Let a leaf begin with zeros beside it; where there are children, the first of them does."""
    if fronts[f, IS_LEAF]:
        work[fronts[f, HELD] : fronts[f, HELD] + fronts[f, BESIDE] ** 2] = 0.0


@numba.njit
def _pass_on(fronts, inner, f, work, panels):
    """Add what a front changes beside it to the parent."""
    m, up = fronts[f, BESIDE], fronts[f, PARENT]
    if m == 0:
        return
    k_up, m_up, panel, held = fronts[up, OWN], fronts[up, BESIDE], fronts[up, PANEL], fronts[up, HELD]
    if fronts[f, OPENS]:
        work[held : held + m_up * m_up] = 0.0
    to = inner[fronts[f, FIRST] : fronts[f, FIRST] + m]
    for q in range(m):
        change = work[fronts[f, HELD] + q * m : fronts[f, HELD] + q * m + m]
        if to[q] < k_up:
            at = panel + to[q] * (k_up + m_up)
            for p in range(q, m):
                panels[at + to[p]] += change[p]
        else:
            at = held + (to[q] - k_up) * m_up - k_up
            for p in range(q, m):
                work[at + to[p]] += change[p]


@numba.njit
def _take(fronts, inner, f, work):
    """Take from the parent what a front has beside it, both triangles."""
    k, m, up, held = fronts[f, OWN], fronts[f, BESIDE], fronts[f, PARENT], fronts[f, HELD]
    s, s_up, at_up = k + m, fronts[up, OWN] + fronts[up, BESIDE], fronts[up, HELD]
    to = inner[fronts[f, FIRST] : fronts[f, FIRST] + m]
    for q in range(m):
        at = at_up + to[q] * s_up
        for p in range(q, m):
            work[held + (k + q) * s + k + p] = work[held + (k + p) * s + k + q] = work[at + to[p]]


@numba.njit
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
                found[h] = found[h] and _eliminate(a, at + b * k * (k + m), k + m, k)
            if not found[h]:
                break
            _begin(fronts, f, work)
            _add_gram(-1.0, a, at + k, k + m, work, fronts[f, HELD], m, n * k)
            _pass_on(fronts, inner, f, work, a)
        for d in range(len(diagonal)):
            term = max(before[diagonal[d]], terms[h, d]) if len(terms) else before[diagonal[d]]
            square = a[diagonal[d]] ** 2
            found[h] = found[h] and least**2 * term < square < np.inf
    return result, found


@_kernel
def matrix(fronts, inner, n_held, factors):
    """Return the lower triangles of L L^T."""
    result, work = np.zeros_like(factors), np.empty(n_held)
    for h in range(len(factors)):
        lower, a = factors[h], result[h]
        for f in range(len(fronts)):
            k, m, n, at = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL]
            s = k + m
            for i in range(at, at + n * k * s, k * s):
                _multiply(1.0, lower, i, s, _N, lower, i, s, _T, a, i, s, s, k, k)
                _clear(a, i, s, k)
            _begin(fronts, f, work)
            _add_gram(1.0, lower, at + k, s, work, fronts[f, HELD], m, n * k)
            _pass_on(fronts, inner, f, work, a)
    return result


@_kernel
def squares(fronts, beside, factors, n_dim):
    """Return the diagonals of L L^T, in the order of elimination."""
    result = np.zeros((len(factors), n_dim))
    for h in range(len(factors)):
        for f in range(len(fronts)):
            k, m, n, start = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, START]
            for q in range(n * k):
                x = factors[h, fronts[f, PANEL] + q * (k + m) : fronts[f, PANEL] + (q + 1) * (k + m)]
                for p in range(q % k, k):
                    result[h, start + q - q % k + p] += x[p] ** 2
                for p in range(m):
                    result[h, beside[fronts[f, FIRST] + p]] += x[k + p] ** 2
    return result


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
            first, s, to = fronts[f, START] * r, k + m, beside[fronts[f, FIRST] : fronts[f, FIRST] + m]
            for turn in range(2):
                if (turn == 0) == is_up:
                    for b in range(n):
                        i, j = at + b * k * s, first + b * k * r
                        if inverse:
                            _divide(x, j, r, r, lower, i, s, k, _N if transposed else _T)
                            continue
                        apart[: r * k] = 0.0
                        _multiply(1.0, x, j, r, _N, lower, i, s, _N if transposed else _T, apart, 0, r, r, k, k)
                        x[j : j + r * k] = apart[: r * k]
                elif transposed:
                    for p in range(m):
                        apart[p * r : (p + 1) * r] = x[to[p] * r : (to[p] + 1) * r]
                    _multiply(sign, apart, 0, r, _N, lower, at + k, s, _N, x, first, r, r, n * k, m)
                else:
                    apart[: r * m] = 0.0
                    _multiply(sign, x, first, r, _N, lower, at + k, s, _T, apart, 0, r, r, m, n * k)
                    for p in range(m):
                        for c in range(r):
                            x[to[p] * r + c] += apart[p * r + c]


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
            if 1.0 * s * s * n * k > _LARGE:
                _invert(lower, a, at, k, m, n, work, held + k * s + k)
                if not fronts[f, IS_LEAF]:
                    _hold(fronts, f, a, work)
                continue
            for i in range(at, at + n * k * s, k * s):
                for q in range(k - 1, -1, -1):
                    column = lower[i + q * s : i + (q + 1) * s]
                    scale = 1.0 / column[q]
                    y = work[held + q * s : held + (q + 1) * s]
                    y[q + 1 :] = 0.0
                    for p in range(q + 1, s):
                        weight = scale * column[p]
                        if weight != 0.0:
                            x = work[held + p * s : held + (p + 1) * s]
                            for c in range(q + 1, s):
                                y[c] -= weight * x[c]
                    y[q] = scale
                    for p in range(q + 1, s):
                        y[q] -= column[p] * y[p]
                        work[held + p * s + q] = y[p]
                    y[q] *= scale
                    a[i + q * s + q : i + (q + 1) * s] = y[q:]
    return result


@numba.njit
def _invert(lower, a, at, k, m, n, work, among):
    """Find the inverse in a row of large fronts, or of many, from that beside them."""
    s, slopes = k + m, np.empty(m * n * k)
    _copy(lower, at + k, s, slopes, 0, m, m, n * k)
    for b in range(n):
        _divide(slopes, b * m * k, m, m, lower, at + b * k * s, s, k, _N)
    _multiply(-1.0, work, among, s, _N, slopes, 0, m, _N, a, at + k, s, m, n * k, m)
    for b in range(n):
        i = at + b * k * s
        if k == 1:
            a[i] = lower[i] ** -2.0
        else:
            _copy(lower, i, s, a, i, s, k, k)
            how, size = _letters(_L, 0, 0), _integers(k, s, 0, 0, 0, 0)
            _dpotri(how.ctypes, size.ctypes, a[i:].ctypes, size[1:].ctypes, size[2:].ctypes)
        _multiply(-1.0, slopes, b * m * k, m, _T, a, i + k, s, _N, a, i, s, k, k, m)
        _clear(a, i, s, k)


# --- the metric: see the formula of `cholesky` ---


@_kernel
def roots(fronts, inner, n_held, n_roots, inverses):
    """Return the roots R^T of the inverse beside each row of fronts, upper triangles, and which there are."""
    result, found, work = np.zeros((len(inverses), n_roots)), np.ones(len(inverses), np.bool_), np.empty(n_held)
    for h in range(len(inverses)):
        for f in range(len(fronts) - 1, -1, -1):
            k, m, root = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ROOT]
            _take(fronts, inner, f, work)
            square = np.empty(m * m)
            _copy(work, fronts[f, HELD] + k * (k + m) + k, k + m, square, 0, m, m, m)
            found[h] = found[h] and _eliminate(square, 0, m, m)
            for q in range(m):
                for p in range(q, m):
                    result[h, root + p * m + q] = square[q * m + p]
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
            own, slopes, apart = np.empty(k * k), np.empty(m * k), np.empty(m * k)
            _begin(fronts, f, work)
            for i in range(at, at + n * k * s, k * s):
                _mirror(e, i, s, own, 0, k, k, 1.0)
                _copy(lower, i + k, s, slopes, 0, m, m, k)
                _divide(slopes, 0, m, m, lower, i, s, k, _N)
                _copy(e, i + k, s, apart, 0, m, m, k)
                _multiply(-1.0, slopes, 0, m, _N, own, 0, k, _N, apart, 0, m, m, k, k)
                _multiply(-1.0, slopes, 0, m, _N, e, i + k, s, _T, work, held, m, m, m, k)
                _multiply(-1.0, apart, 0, m, _N, slopes, 0, m, _T, work, held, m, m, m, k)
                _multiply(_ROOT_2, root, fronts[f, ROOT], m, _N, apart, 0, m, _N, a, i + k, s, m, k, m)
                _divide(a, i + k, s, m, lower, i, s, k, _T)
                _within(own, lower, i, s, k)
                for q in range(k):
                    a[i + q * s + q] = own[q * k + q]
                    for p in range(q + 1, k):
                        a[i + q * s + p] = _ROOT_2 * own[q * k + p]
            _pass_on(fronts, inner, f, work, e)
    return result


@numba.njit
def _within(a, lower, i, s, k):
    """Make a symmetric matrix A L^-1 A L^-T, in the lower triangle."""
    if 1.0 * k * k * k > _LARGE:
        how, size = _letters(_L, 0, 0), _integers(1, k, k, s, 0, 0)
        _dsygst(
            size.ctypes, how.ctypes, size[1:].ctypes, a.ctypes, size[2:].ctypes, lower[i:].ctypes, size[3:].ctypes,
            size[4:].ctypes,
        )  # fmt: skip
        return
    _divide(a, 0, k, k, lower, i, s, k, _T)
    for q in range(k):
        for p in range(q):
            a[q * k + p], a[p * k + q] = a[p * k + q], a[q * k + p]
    _divide(a, 0, k, k, lower, i, s, k, _T)


@numba.njit
def _divide_upper(b, t, i, m, k):
    """Make B, (m, k), U^-1 B."""
    if 1.0 * m * m * k > _LARGE:
        _by_blas(_L, _U, _N, m, k, t, i, m, b, 0, m)
        return
    for q in range(k):
        y = b[q * m : (q + 1) * m]
        for r in range(m - 1, -1, -1):
            x = t[i + r * m : i + (r + 1) * m]
            y[r] /= x[r]
            for p in range(r):
                y[p] -= y[r] * x[p]


@_kernel
def unwhiten(fronts, inner, n_held, factors, of_roots, vectors):
    """Return the matrices of vectors: the inverse of `whiten`."""
    result, rest, work = np.zeros_like(vectors), np.zeros_like(vectors), np.empty(n_held)
    for h in range(len(factors)):
        lower, root, given, e, a = factors[h], of_roots[h], vectors[h], rest[h], result[h]
        for f in range(len(fronts)):
            k, m, n, at, held = fronts[f, OWN], fronts[f, BESIDE], fronts[f, ALIKE], fronts[f, PANEL], fronts[f, HELD]
            s = k + m
            _begin(fronts, f, work)
            for i in range(at, at + n * k * s, k * s):
                own, half, both = np.zeros(k * k), np.zeros(k * k), np.empty(k * k)
                _mirror(given, i, s, both, 0, k, k, 1.0 / _ROOT_2)
                _multiply(1.0, both, 0, k, _N, lower, i, s, _T, half, 0, k, k, k, k)
                _multiply(1.0, lower, i, s, _N, half, 0, k, _N, own, 0, k, k, k, k)
                slopes, turned, apart = np.empty(m * k), np.empty(m * k), np.zeros(m * k)
                _copy(given, i + k, s, turned, 0, m, m, k)
                _divide_upper(turned, root, fronts[f, ROOT], m, k)
                _multiply(1.0 / _ROOT_2, turned, 0, m, _N, lower, i, s, _T, apart, 0, m, m, k, k)
                _copy(lower, i + k, s, slopes, 0, m, m, k)
                _divide(slopes, 0, m, m, lower, i, s, k, _N)
                _multiply(-1.0, apart, 0, m, _N, slopes, 0, m, _T, work, held, m, m, m, k)
                _multiply(1.0, slopes, 0, m, _N, own, 0, k, _N, apart, 0, m, m, k, k)
                _multiply(-1.0, slopes, 0, m, _N, apart, 0, m, _T, work, held, m, m, m, k)
                for q in range(k):
                    for p in range(q, k):
                        a[i + q * s + p] = own[q * k + p] - e[i + q * s + p]
                    for p in range(m):
                        a[i + q * s + k + p] = apart[q * m + p] - e[i + q * s + k + p]
            _pass_on(fronts, inner, f, work, e)
    return result
