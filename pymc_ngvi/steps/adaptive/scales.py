"""Scales of latent effects that a fit has lost: found, and looked for where they may be.

Effects b ~ N(0, s) in their centred form have a second place to go to: b near 0, s near 0, where the ELBO has a plateau
along log s whose slope (1 nat a unit, that of the Jacobian) natural gradients all but miss. There they measure a gap of
.02 nats where 50 are missing: each step fits s to the spread of b in q, and that spread to s.

The curvature tells. In log s it is -2 E[sum b^2] / s^2; at the mean of q alone, -2 sum E[b]^2 / s^2. Where most of it
is owed to the spread of b, s follows q, not the data. Then log s is moved, up or down, with the others fitted to it,
for as long as the ELBO rises.
"""

import functools

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import BaseDraws, Density, Estimator, Evaluation, GaussianState, Moments, Update
from pymc_ngvi.steps.adaptive.conditioned import Conditioned
from pymc_ngvi.steps.schedule.linesearch import Failure, search

#: Times that lost scales are looked for in one fit, and draws to move on and to judge by.
MAX_RECOVERIES, N_RECOVERY = 4, (16, 32)
#: Part of the curvature in log s that the mean of q has to account for.
_LEAST_OWN = 0.12
#: Steps in log s, the first tried: far, and near; and most of them in a row.
_STRIDES, _MOST_STRIDES = (1.0, 0.5), 10
#: Natural steps of the others after each, at most, and the gap per dimension below which they are fitted.
_MOST_STEPS, _FITTED = 3, 0.02
#: Nats, and standard errors, by which the ELBO must rise.
_LEAST_GAIN, _N_SE = 0.05, 2.0
#: Elements of one variable that are moved one by one; more are moved together.
_FEW = 3
#: Elements beyond which a variable is not looked at: scales of single observations, not of effects.
_MANY = 200


class Tools(NamedTuple):
    """What a fit moves with: its target, update and estimator, and draws to move on and to judge by."""

    target: Density
    update: Update
    estimator: Estimator
    base: BaseDraws
    fresh: BaseDraws


def lost_scales(target: Density, estimator: Estimator, q: GaussianState) -> list[NDArray[np.intp]]:
    """Return the coordinates of scales that follow q instead of the data, those in one array to be moved together.

    It takes one Hessian, and none for a target that does not tell which coordinates are logarithms of positive
    variables.
    """
    positive: Sequence[NDArray[np.intp]] = getattr(target, "positive", ())
    if not positive or not hasattr(q, "precision_product") or not estimator.has_hessian(target):
        return []
    hessian = estimator.hessian_at_mean(target, q)
    own, groups = -hessian.diagonal(), list[NDArray[np.intp]]()
    summed = None if hessian.summed is None else hessian.summed.weights.any(axis=0)
    for index in (i for i in positive if len(i) <= _MANY):
        if summed is not None and summed[index].any():  # what is given of a sum leaves another sum
            continue
        unit = np.zeros((len(index), q.n_dim))
        unit[np.arange(len(index)), index] = 1.0
        curvature = q.precision_product(unit)[np.arange(len(index)), index]
        with np.errstate(invalid="ignore"):
            lost = index[own[index] < _LEAST_OWN * curvature]
        groups += [lost] if len(lost) > _FEW else list(lost[:, None])
    return groups


def recovered(tools: Tools, q: GaussianState) -> GaussianState | None:
    """Return a state of higher ELBO in which scales were moved; None where there is none."""
    groups = lost_scales(tools.target, tools.estimator, q)
    if not groups:
        return None
    start, best = q, tools.estimator.evaluate(tools.target, q, tools.fresh)
    for index in groups:
        for stride in (s * sign for s in _STRIDES for sign in (1.0, -1.0)):
            moved, evaluation = _climb(tools, q, best, index, stride)
            if moved is not q:
                q, best = moved, evaluation
                break
    return None if q is start else q


def _climb(
    tools: Tools, q: GaussianState, best: Evaluation, index: NDArray[np.intp], stride: float
) -> tuple[GaussianState, Evaluation]:
    """Move some scales by strides for as long as the ELBO rises on draws that the others were not fitted to."""
    origin, sd = q.mean()[index], q.sd()[index]
    trial = q
    for k in range(_MOST_STRIDES):
        given = Conditioned(tools.target, index, origin + (k + 1) * stride, sd)
        trial = _fitted(tools, given, trial)
        evaluation = tools.estimator.evaluate(tools.target, trial, tools.fresh)
        if not _is_better(evaluation, best):
            break
        q, best = trial, evaluation
    return q, best


def _is_better(new: Evaluation, old: Evaluation) -> bool:
    if not (new.finite.all() and old.finite.all()):
        return bool(np.isfinite(new.elbo) and new.finite.sum() > old.finite.sum())
    gain = new.elbo - old.elbo
    if not len(new.logp):  # known without draws
        return bool(gain > _LEAST_GAIN)
    difference = new.logp - old.logp
    se = float(np.std(difference, ddof=1)) / np.sqrt(len(difference))
    return bool(gain > max(_LEAST_GAIN, _N_SE * se))


def _fitted(tools: Tools, given: Conditioned, q: GaussianState) -> GaussianState:
    """Return the state after a few natural steps given some coordinates."""
    evaluation = tools.estimator.evaluate(given, q, tools.base)
    for _ in range(_MOST_STEPS):
        if not evaluation.finite.any():
            break
        moments = tools.estimator.moments(given, q, tools.base, evaluation)
        found = search(
            functools.partial(_stepped, tools.update, q, moments),
            lambda state: tools.estimator.evaluate(given, state, tools.base),
            _not_below(evaluation),
            elbo=evaluation.elbo,
            slope=2.0 * moments.gap,
            first=1.0,
        )
        if isinstance(found, Failure):
            break
        q, evaluation = found.q, found.evaluation
        if found.size == 1.0 and moments.gap < _FITTED * q.n_dim:
            break
    return q


def _stepped(update: Update, q: GaussianState, moments: Moments, rho: float) -> GaussianState | None:
    return update(q, moments, rho, True)


def _not_below(old: Evaluation) -> Callable[[Evaluation], bool]:
    slack = 1e-9 * abs(old.elbo)
    return lambda new: bool(
        np.isfinite(new.elbo) and new.finite.sum() >= old.finite.sum() and new.elbo >= old.elbo - slack
    )
