"""Each model by the default: kind, verdict, moments and limits of coordinates and functionals, evidence, seconds."""

import warnings

import numpy as np
import pytest

from battery.conftest import N_DRAWS, kind_of
from battery.models import GAUSSIAN, WRONG


def test_outcome(outcome, request):
    if outcome.name in WRONG:
        request.applymarker(pytest.mark.xfail(reason=WRONG[outcome.name], strict=True))
    approx, entry = outcome.approx, outcome.entry
    diagnosis = approx.diagnose(random_seed=1) if "minibatch" not in outcome.name else None
    is_reliable = diagnosis is None or diagnosis.reliable
    assert kind_of(approx) >= entry.least, approx.record.posterior
    if entry.is_reliable is not None:
        assert is_reliable == entry.is_reliable, diagnosis.reasons
    known = None if entry.known is None else entry.known()
    if not is_reliable or known is None:
        return
    wrong = wrong_of(approx, known, entry.columns)
    if kind_of(approx) > GAUSSIAN and np.isfinite(known.evidence[0]):
        evidence = approx.log_marginal_likelihood
        wrong += known.wrong_evidence(evidence.value, evidence.se)
    assert not wrong, "\n".join([approx.record.posterior, *wrong])


@pytest.mark.battery
def test_seconds(outcome, seconds):
    """No fit takes three times as long as it did."""
    if outcome.name not in seconds:
        pytest.skip("it has not been timed")
    assert outcome.ratio < 3.0 * seconds[outcome.name]


def wrong_of(approx, known, columns):
    """Return what is wrong with draws of a fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = approx.sample(N_DRAWS, random_seed=1)["posterior"]
    sizes = [posterior.attrs.get(name, N_DRAWS) for name in ("effective_sample_size", "effective_global_draws")]
    draws, names = columns(posterior, approx.model)
    return known.wrong(draws, names, min(N_DRAWS, *sizes))
