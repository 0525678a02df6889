"""What a fit has come to, and what the user is told of it."""

import logging
import math
import warnings

from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.status import ConvergenceWarning, Status
from pymc_ngvi.core.types import Array, Assessment, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.checks import constant_data
from pymc_ngvi.fitting.record import FitRecord

logger = logging.getLogger("pymc.ngvi")


class Outcome(NamedTuple):
    """What a fit has come to."""

    #: On the model's unconstrained scale.
    q: VariationalState
    record: FitRecord
    #: Loss, and estimated nats still to be gained, after each iteration; shape (n_iterations,).
    hist: Array
    gap_hist: Array


def constant_after(status: Status, density: ModelDensity) -> tuple[str, ...]:
    """Return the observed variables that do not vary, after a fit that ended without converging."""
    if status is Status.CONVERGED or not status.ended_by_itself or density.is_sharded or density.is_streamed:
        return ()
    return tuple(constant_data(density.model))


def report_outcome(q: VariationalState, record: FitRecord) -> None:
    """Say how a fit went, and what posterior came of it; warn where it did not converge."""
    stream = "" if record.stream is None else str(record.stream)
    said = [record.closing_line(), stream, record.posterior, record.of_discrete, record.next_step]
    logger.info(" ".join(filter(None, said)))
    for remark in filter(None, [getattr(q, "remark", ""), record.restarted]):
        logger.info(remark)
    if record.n_dropped:
        logger.info(f"{record.n_dropped} draws were left out because log p or its gradient was not finite there.")
    status = record.status
    if record.remark and (status in (Status.NOT_STARTED, Status.INTERRUPTED, Status.STOPPED) or record.converged):
        logger.info(record.remark)
    if record.is_pool:
        return
    if record.stream is not None and record.stream.warning:
        warnings.warn(record.stream.warning, UserWarning, skip_file_prefixes=OURS)
    if not (status in (Status.NOT_STARTED, Status.INTERRUPTED, Status.STOPPED) or record.converged):
        unknown = status is Status.LEVELLED and math.isnan(record.gap)
        verdict = "Whether the fit has converged is not known" if unknown else "The fit did not converge"
        warnings.warn(
            f"{verdict} ({status}). {record.sentence} {stream}{' ' * bool(stream)}{status.cure}",
            ConvergenceWarning,
            skip_file_prefixes=OURS,
        )


def elbo_of(q: VariationalState, assessment: Assessment) -> Elbo:
    """Return the ELBO on draws that had no part in reaching the state, or without draws where it is known so."""
    if assessment.elbo is not None:
        return assessment.elbo
    h: Array = assessment.logp - q.log_density(assessment.theta)
    keep, units = np.isfinite(h), assessment.units
    if not keep.any():
        return Elbo(-np.inf, np.inf)
    # Draws of an antithetic pair, or on one minibatch, are dependent: the error is that of the mean over such units.
    means = h[units[keep[units].all(axis=1)]].mean(axis=1)
    se = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else np.inf
    return Elbo(float(h[keep].mean()), se)
