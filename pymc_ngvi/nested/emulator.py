"""A function of few numbers that is dear to evaluate, known at some points and predicted elsewhere.

Universal kriging [1]_: a polynomial of the second degree, and a Gaussian process for what it leaves. The length scale
is the one whose predictions of each point from all others are best.

References
----------
.. [1] J. Sacks, W. J. Welch, T. J. Mitchell and H. P. Wynn (1989). Design and analysis of computer experiments.
   Statistical Science 4(4). https://doi.org/10.1214/ss/1177012413
"""

import contextlib
import itertools

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy.spatial import cKDTree

from pymc_ngvi.core.linalg import solve_lower, solve_upper
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.regression import Whitening, quadratic_terms
from pymc_ngvi.marginal.sampling import Plain
from pymc_ngvi.marginal.tails import Bend

#: Length scales that are tried, in units of the whitened space; parts of the variance that are noise.
_LENGTHS, _NUGGETS = (1.0, 1.5, 2.5, 4.0, 7.0), (1e-11, 1e-9, 1e-7)
#: Nats below the top beyond which a value is no more than "none", and more for each dimension.
_DEEP, _DEEP_PER_DIM = 15.0, 3.0
#: Standard deviation of a prediction at the top, in nats, that is near enough; nats below it at which it may be e times
#: as large: there is little weight there.
_NEAR, _SLACKER = 0.2, 6.0
#: Standard deviation of a prediction, in nats, beyond which it counts for less: nothing is known there.
_UNKNOWN = 1.0
#: Whitened coordinates up to which values are used.
_FARTHEST = 15.0
#: Points that predictions rest on at least: for each number of the polynomial, and more.
_PER_TERM, _MORE = 1.5, 4
#: Points that are evaluated together, at most, and how far apart they are, in length scales.
_AT_ONCE, _APART = 8, 0.5
#: Points after which the length scale is chosen anew; points that are predicted at a time.
_ANEW, _AT_A_TIME = 8, 4_096


@dataclass(frozen=True, eq=False)
class Kriging:
    """Predictions from values at points."""

    #: shape (n, p).
    points: Array
    #: Of the polynomial, and whatever else is added up; shape (n, n_terms).
    terms: Array
    length: float
    nugget: float
    #: Weights of the kernel, and of the polynomial; shape (n,), (n_terms,).
    alpha: Array
    beta: Array
    #: Cholesky factor of the kernel matrix, and an orthogonal factorisation of the polynomial whitened by it.
    root: Array
    basis: Array
    triangle: Array
    #: Of the process.
    variance: float
    #: Minus twice the mean log density of each value given all others.
    score: float

    @classmethod
    def of(cls, points: Array, terms: Array, values: Array, length: float, nugget: float) -> "Kriging":
        """Fit to values, (n,), at points, (n, p), with terms (n, n_terms)."""
        kernel = _kernel(points, points, length) + nugget * np.eye(len(points))
        root = np.linalg.cholesky(kernel)
        basis, triangle = np.linalg.qr(solve_lower(root, terms))
        whitened = solve_lower(root, values)
        beta = solve_upper(triangle, basis.T @ whitened)
        alpha = solve_lower(root, whitened - basis @ (basis.T @ whitened), transpose=True)
        # Of what is projected off the polynomial: what each value is from its prediction by the others.
        half = solve_lower(root, np.eye(len(points)))
        half -= basis @ (basis.T @ half)
        precision = np.maximum((half**2).sum(axis=0), 1e-12)
        square = (alpha / precision) ** 2 * precision
        variance = float(square.mean())
        score = float(np.mean(np.log(variance / precision) + square / variance)) if variance else -np.inf
        return cls(points, terms, length, nugget, alpha, beta, root, basis, triangle, variance, score)

    def __call__(self, points: Array, terms: Array) -> tuple[Array, Array]:
        """Return predictions and their standard deviations, (n,) each, at points (n, p)."""
        kernel = _kernel(points, self.points, self.length)
        solved = solve_lower(self.root, np.ascontiguousarray(kernel.T))
        left = solve_lower(
            np.ascontiguousarray(self.triangle.T), np.ascontiguousarray(terms.T - self.basis_terms.T @ solved)
        )
        part = 1.0 + self.nugget - (solved**2).sum(axis=0) + (left**2).sum(axis=0)
        return terms @ self.beta + kernel @ self.alpha, np.sqrt(self.variance * np.maximum(part, 0.0))

    @property
    def basis_terms(self) -> Array:
        """The polynomial at the points, whitened."""
        return self.basis @ self.triangle


def _kernel(a: Array, b: Array, length: float) -> Array:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2.0 * a @ b.T
    return np.exp(-0.5 * np.maximum(squares, 0.0) / length**2)


def _fitted(points: Array, terms: Array, values: Array, kinds: Iterable[tuple[float, float]]) -> list[Kriging]:
    """Return fits by length and nugget: points side by side take a larger one, and have no fit with the others."""
    fits = []
    for kind in kinds:
        with contextlib.suppress(np.linalg.LinAlgError):
            fits.append(Kriging.of(points, terms, values, *kind))
    return fits


def _standardised(points: Array, whitening: Whitening) -> tuple[Array, Array]:
    """Return standardised points, however far they are, and the terms of the polynomial."""
    u: Array = np.linalg.solve(whitening.factor, (whitening.forward(points) - whitening.mean).T).T
    return u, np.concatenate([quadratic_terms(u), whitening.in_tails(points)], axis=1)


class Predicted:
    """A log density as it is predicted, wherever."""

    def __init__(self, kriging: Kriging, whitening: Whitening, bend: Bend) -> None:
        self.kriging, self.whitening, self.bend = kriging, whitening, bend

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Return predictions and their standard deviations, (n,) each."""
        mean, sd = self.kriging(*_standardised(points, self.whitening))
        return mean + self.bend.log_slope(points), sd


class Emulated(Plain):
    """A log density that is evaluated where its prediction is not near enough, and predicted elsewhere.

    Notes
    -----
    All is evaluated before `standardise`.
    """

    def __init__(self, function: Callable[[Array], Array], most: int) -> None:
        super().__init__(self._values)
        self._function, self._most = function, most
        self._points: list[Array] = []
        self._known: list[float] = []
        self._kriging: Kriging | None = None
        self._n_used = 0
        self._whitening: Whitening | None = None
        self._bend = Bend()

    @property
    def n_evaluated(self) -> int:
        """Points at which the function has been evaluated."""
        return len(self._points)

    def standardise(self, whitening: Whitening, bend: Bend) -> None:
        """Predict from now on, in standardised coordinates without straight tails, in which the density is smooth."""
        self._whitening, self._bend, self._kriging = whitening, bend, None

    @property
    def top(self) -> float:
        """The largest value so far."""
        return max(self._known, default=-np.inf)

    def evaluate(self, points: Array) -> Array:
        """Evaluate at points, (n, p)."""
        values = self._function(points)
        for point, value in zip(points, values, strict=True):
            self.tell(point, float(value))
        self._refit()
        return values

    def tell(self, point: Array, value: float) -> None:
        """Take a value that is known."""
        self._points.append(np.array(point))
        self._known.append(value)
        self._kriging = None

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Return predictions and their standard deviations."""
        predicted = self.predicted()
        if predicted is None:
            return np.full(len(points), self.top), np.full(len(points), np.inf)
        return predicted.predict(points)

    def predicted(self) -> Predicted | None:
        """Return what is predicted of all that is known; None where that is too little."""
        assert self._whitening is not None
        if self._kriging is None:
            self._refit()
        return None if self._kriging is None else Predicted(self._kriging, self._whitening, self._bend)

    def bounded(self) -> Callable[[Array], Array] | None:
        """Return what is predicted of all that is known, low beside points at which there is next to nothing.

        Such points are too far down for predictions, which know nothing of them. It stays as it is when more is known.
        """
        predicted = self.predicted()
        if predicted is None:
            return None
        whitening = predicted.whitening
        tree = cKDTree(_standardised(np.array(self._points), whitening)[0])
        lowest = self.top - self._deep(len(whitening.mean))
        is_nothing = np.array(self._known) < lowest

        def value(points: Array) -> Array:
            mean, sd = predicted.predict(points)
            result: Array = mean - np.maximum(sd - _UNKNOWN, 0.0)
            beside = is_nothing[tree.query(_standardised(points, whitening)[0])[1]]
            return np.where(beside, np.minimum(result, lowest), result)

        return value

    def _values(self, points: Array) -> Array:
        if self._whitening is None:
            return self.evaluate(points)
        parts = [self._near_enough(points[at : at + _AT_A_TIME]) for at in range(0, len(points), _AT_A_TIME)]
        return np.concatenate(parts)

    def _near_enough(self, points: Array) -> Array:
        """Evaluate at points whose predictions are worst, far from each other, until all are near enough."""
        own: dict[int, float] = {}
        while True:
            mean, sd = self.predict(points)
            lowest = self.top - self._deep(points.shape[1])
            depth = np.maximum(self.top - mean, 0.0)
            excess = np.where(mean + 3.0 * sd < lowest, 0.0, sd / (_NEAR * np.exp(depth / _SLACKER)))
            beside = self._beside_nothing(points, lowest)
            excess = np.where(beside & (mean > lowest), np.inf, excess)
            excess[list(own)] = 0.0
            worst = [self._loneliest(points)] if self._kriging is None else self._worst(points, excess)
            if not len(worst) or self.n_evaluated >= self._most:
                break
            own.update(zip(worst, self.evaluate(points[worst]).tolist(), strict=True))
        # Where there is no more to be evaluated: rather too low than too high, which would take all of the weight.
        mean = np.where(excess > 1.0, np.where(beside, np.minimum(mean, lowest), mean - 2.0 * sd), mean)
        mean[list(own)] = list(own.values())
        return mean

    def _worst(self, points: Array, excess: Array) -> list[int]:
        """Return which points are predicted worst, none of them near another: the one would tell of the other."""
        assert self._whitening is not None
        assert self._kriging is not None
        left, found = excess.copy(), list[int]()
        u = _standardised(points, self._whitening)[0]
        while len(found) < _AT_ONCE and (left > 1.0).any():
            worst = int(np.argmax(left))
            found.append(worst)
            left[((u - u[worst]) ** 2).sum(axis=1) < (_APART * self._kriging.length) ** 2] = 0.0
            left[worst] = 0.0
        return found

    def _beside_nothing(self, points: Array, lowest: float) -> NDArray[np.bool_]:
        """Tell which points are nearest to one at which the function is so low that predictions know nothing of it."""
        assert self._whitening is not None
        if not self._points:
            return np.zeros(len(points), dtype=bool)
        tree = cKDTree(_standardised(np.array(self._points), self._whitening)[0])
        nearest = tree.query(_standardised(points, self._whitening)[0])[1]
        return np.array(self._known)[nearest] < lowest

    def _loneliest(self, points: Array) -> int:
        """Return which point is farthest from all that is known: the first ones are to fill the space."""
        assert self._whitening is not None
        if not self._points:
            return 0
        known, new = (self._whitening.whitened(np.array(p)) for p in (self._points, points))
        return int(np.argmax(((new[:, None] - known) ** 2).sum(axis=2).min(axis=1)))

    def _refit(self) -> None:
        """Fit to what is known, of what is not too far down."""
        if self._whitening is None or not self._known:
            return
        values = np.array(self._known)
        points = np.array(self._points)
        (u, terms), of_y = _standardised(points, self._whitening), values - self._bend.log_slope(points)
        keep = (values > self.top - self._deep(u.shape[1])) & (np.abs(u) < _FARTHEST).all(axis=1)
        u, terms = u[keep], terms[keep]
        if len(u) < _PER_TERM * terms.shape[1] + _MORE:
            self._kriging = None
            return
        old = self._kriging
        few = len(u) < self._n_used + _ANEW
        if old is not None and few and (fits := _fitted(u, terms, of_y[keep], [(old.length, old.nugget)])):
            self._kriging = fits[0]
            return
        fits = _fitted(u, terms, of_y[keep], itertools.product(_LENGTHS, _NUGGETS))
        self._kriging, self._n_used = min(fits, key=lambda fit: fit.score, default=None), len(u)

    @staticmethod
    def _deep(p: int) -> float:
        return _DEEP + _DEEP_PER_DIM * p
