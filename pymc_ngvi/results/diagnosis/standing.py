"""The diagnosis that belongs to a fit, made once, and those that are asked for."""

import functools

import numpy as np

from pymc_ngvi.core.psis import MIN_KHAT_DRAWS
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.results.diagnosis.budget import DIAGNOSIS
from pymc_ngvi.results.diagnosis.diagnose import budget_of, diagnose, full_budget
from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.diagnosis.weights import DRAWS, own_generator, own_log_ratio
from pymc_ngvi.results.posterior import Posterior

#: Number of the random stream behind the draws of the standing diagnosis that are moved.
_MOVES_STREAM = 3_000_001


def standing_diagnosis(posterior: Posterior, kept: Kept, share: tuple[float, float]) -> Diagnosis:
    """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
    if kept.diagnosis is None or (kept.diagnosis.left_out and kept.share < share):
        with few_threads(posterior.density):
            budget, rng = budget_of(posterior, share), own_generator(posterior.record, _MOVES_STREAM)
            ratio = functools.partial(own_log_ratio, posterior, kept)
            kept.diagnosis, kept.share = diagnose(posterior, budget, ratio, rng), share
    return kept.diagnosis


def requested_diagnosis(
    posterior: Posterior, kept: Kept, rng: np.random.Generator | None, draws: int | None, *, thorough: bool
) -> Diagnosis:
    """Return a diagnosis as `NGVIApproximation.diagnose` takes its arguments; without ``rng``, the standing one.

    A thorough one is kept as that of the fit.
    """
    if draws is not None and check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
    posterior.check_weights()
    if rng is None:
        return standing_diagnosis(posterior, kept, DIAGNOSIS)
    if thorough or draws is not None:
        budget = full_budget(posterior, DRAWS if draws is None else draws, thorough=thorough)
    else:
        budget = budget_of(posterior, DIAGNOSIS)
    with few_threads(posterior.density):
        found = diagnose(posterior, budget, rng, rng, thorough=thorough)
    if thorough:
        kept.diagnosis, kept.share = found, DIAGNOSIS
    return found
