"""A narrow peak in a broad one: nearly equal weights of a Gaussian that is one of the two are no proof."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import fit_ngvi

#: Standard errors that no mean and no standard deviation exceeds; kurtosis of the mixtures, at most.
MOST_ERRORS, KURTOSIS = 4.0, 25.0


@pytest.mark.parametrize(
    ("share", "shift"),
    [
        (0.9, 0.0),  # a fit ends in the narrow one
        (0.4, 0.0),  # in the broad one, as in the next
        (0.4, 1.0),
    ],
)
def test_both_peaks_are_in_the_posterior(share, shift):
    p, scale = 6, 0.1
    with pm.Model() as model:
        x = pm.Flat("x", shape=p, initval=np.zeros(p) if share > 0.5 else np.full(p, -1.0))
        narrow = -0.5 * ((x - shift / np.sqrt(p)) ** 2).sum() / scale**2 - p * np.log(scale)
        pm.Potential("both", pt.logaddexp(np.log(share) + narrow, np.log1p(-share) - 0.5 * (x**2).sum()))
    approx = fit_ngvi(model=model, random_seed=1, progressbar=False)
    assert approx.is_exact
    mean = share * shift / np.sqrt(p)
    sd = np.sqrt(share * (scale**2 + shift**2 / p) + 1.0 - share - mean**2)
    size = approx.checks.effective_size
    np.testing.assert_allclose((approx.mean_flat - mean) / sd, 0.0, atol=MOST_ERRORS / np.sqrt(size))
    np.testing.assert_allclose(approx.sd_flat / sd, 1.0, atol=MOST_ERRORS * np.sqrt(KURTOSIS / (4.0 * size)))
