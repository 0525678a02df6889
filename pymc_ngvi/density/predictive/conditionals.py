"""Random variables some of whose elements are known: the others given these and their parents."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.distributions.moments import mean
from pymc.distributions.multivariate import ZeroSumNormalRV
from pymc.distributions.timeseries import AutoRegressiveRV, RandomWalkRV
from pymc.exceptions import UndefinedMomentException
from pytensor.graph.basic import Variable
from pytensor.tensor.linalg import cholesky, solve_triangular
from pytensor.tensor.random.basic import MvNormalRV

#: Distributions that go on from the elements that are known.
_CONTINUED = {RandomWalkRV: "a random walk", AutoRegressiveRV: "an autoregression", MvNormalRV: "a multivariate normal"}


def n_batch_axes(rv: Variable) -> int:
    """Return the number of leading axes along which the elements of a random variable are independent draws."""
    return int(rv.type.ndim - rv.owner.op.ndim_supp)


def is_continued(rv: Variable, axis: int) -> bool:
    """Tell whether a variable can go on along an axis from the elements that are known.

    That is the first axis of its support: time, or the points of a process.
    """
    return isinstance(rv.owner.op, tuple(_CONTINUED)) and axis == n_batch_axes(rv)


def continued(rv: Variable, known: Variable, n_known: int) -> Variable:
    """Return a random variable whose first elements along its support are known, with draws of the others."""
    op = rv.owner.op
    if isinstance(op, RandomWalkRV):
        return _walk(rv, known, n_known, axis=n_batch_axes(rv))
    if n_batch_axes(rv):
        raise NotImplementedError("several series in one variable")
    if isinstance(op, AutoRegressiveRV):
        return _autoregression(rv, known, n_known)
    return _multivariate_normal(rv, known, n_known)


def _walk(rv: Variable, known: Variable, n_known: int, axis: int) -> Variable:
    """Add the later steps of a new walk to the last known value: steps are independent of all before them."""
    before = (slice(None),) * axis
    last = (*before, n_known - 1)
    later = rv[(*before, slice(n_known, None))] + pt.expand_dims(known[last] - rv[last], axis)
    return pt.concatenate([known[(*before, slice(None, n_known))], later], axis=axis)


def _autoregression(rv: Variable, known: Variable, n_known: int) -> Variable:
    op = rv.owner.op
    coefficients, scale = rv.owner.inputs[:2]
    if n_known < op.ar_order:
        raise NotImplementedError(f"{n_known} known values for an autoregression of order {op.ar_order}")
    constant = coefficients[0] if op.constant_term else pt.constant(0.0)
    lags = coefficients[1:] if op.constant_term else coefficients
    noise = scale * pm.Normal.dist(0.0, 1.0, shape=(rv.shape[0] - n_known,))

    def step(*args: Variable) -> Variable:
        shock, *values, level, weights = args  # the oldest value first
        return level + pt.sum(pt.stack(values[::-1]) * weights) + shock

    # Of one value alone, a loop takes the value.
    last = known[n_known - 1] if op.ar_order == 1 else known[n_known - op.ar_order : n_known]
    later = pytensor.scan(
        step,
        sequences=[noise],
        outputs_info=[{"initial": last, "taps": list(range(-op.ar_order, 0))}],
        non_sequences=[constant, lags],
        strict=True,
        return_updates=False,
    )
    return pt.concatenate([known[:n_known], later])


def _multivariate_normal(rv: Variable, known: Variable, n_known: int) -> Variable:
    """Move a draw of all elements by what it misses the known ones by (Matheron's rule)."""
    cov = rv.owner.op.dist_params(rv.owner)[1]
    factor = cholesky(cov[:n_known, :n_known])
    missed = solve_triangular(factor, (known - rv)[:n_known], lower=True)
    weights = solve_triangular(factor, cov[:n_known, n_known:], lower=True)
    return pt.concatenate([known[:n_known], rv[n_known:] + weights.T @ missed])


def expected(rv: Variable) -> Variable:
    """Return the mean of a random variable given its parents."""
    if isinstance(rv.owner.op, ZeroSumNormalRV):
        return pt.zeros_like(rv)
    try:
        return pt.broadcast_to(pt.cast(mean(rv), rv.type.dtype), rv.shape)
    except (NotImplementedError, UndefinedMomentException) as error:
        raise NotImplementedError(str(error)) from error


def with_known(rv: Variable, known: Variable, mask: np.ndarray) -> Variable:
    """Return the known elements where the mask says so, and those of ``rv`` elsewhere."""
    return pt.where(pt.constant(mask), known, rv)
