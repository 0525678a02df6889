"""The verdict on an approximation in a few sentences, as summaries show it."""

import numpy as np

from pymc_ngvi.core.psis import Weights
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.diagnosis.budget import SUMMARY
from pymc_ngvi.results.diagnosis.diagnose import budget_of, standing_diagnosis
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.diagnosis.weights import (
    DRAWS,
    log_ratio_of,
    own_generator,
    own_log_ratio,
    weights_and_elbo,
)
from pymc_ngvi.results.posterior import Posterior

_NOT_CONVERGED = "Not reliable: the fit did not converge."


def verdict_on(
    posterior: Posterior, kept: Kept, khat_draws: int | None, rng: np.random.Generator
) -> tuple[tuple[str, ...], float | None]:
    """Return the sentences above the table of a summary, and k-hat."""
    lines, seed = _lines_of_fit(posterior.record), int(rng.integers(2**63))
    sentence, weights = _verdict(posterior, kept, khat_draws, np.random.default_rng(seed))
    lines += [sentence] * bool(sentence)
    if weights is not None and posterior.distribution.kept_log_weights() is None:
        lines.append(weights.sentence(posterior.layout.n_dim))
        same = own_generator(posterior.record) if khat_draws == DRAWS else np.random.default_rng(seed)
        remark = posterior.distribution.remark(posterior.density, posterior.record, weights.n_draws, same)
        lines += [remark] * bool(remark)
    return tuple(lines), None if weights is None else weights.khat


def _lines_of_fit(record: FitRecord | None) -> list[str]:
    if record is None:
        return ["This approximation was not made by a fit."]
    lines = [record.closing_line(), record.posterior, record.of_discrete]
    lines.insert(1, record.remark)
    return list(filter(None, lines))


def _verdict(
    posterior: Posterior, kept: Kept, khat_draws: int | None, rng: np.random.Generator
) -> tuple[str, Weights | None]:
    """Return whether an approximation can be relied on, with the first reason and what may help, and its weights."""
    record = posterior.record
    converged = record is None or record.converged or record.is_pool
    if khat_draws is None:
        return "", None
    why = posterior.density.why_in_part or ("the data were changed" if posterior.changed_data() else "")
    if why:
        return f"Not judged: {why}." if converged else "", None
    weights = None
    if khat_draws != DRAWS:
        weights = weights_and_elbo(log_ratio_of(posterior, kept, khat_draws, rng))[0]
    if not converged:
        return _NOT_CONVERGED, weights or _weights_of_summary(posterior, kept)
    diagnosis = standing_diagnosis(posterior, kept, SUMMARY)
    if weights is None and diagnosis.weights.n_draws:
        weights = diagnosis.weights
    return diagnosis.in_short(), weights


def _weights_of_summary(posterior: Posterior, kept: Kept) -> Weights | None:
    """Return the weights that belong to the fit, as far as the budget of a summary allows."""
    n = budget_of(posterior, SUMMARY).n_weights
    return weights_and_elbo(own_log_ratio(posterior, kept, n))[0] if n else None
