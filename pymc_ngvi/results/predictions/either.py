"""Predictions for new data, of PyMC's models and Bambi's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.predictions.bambi import predict_bambi
from pymc_ngvi.results.predictions.new_data import Given as Given
from pymc_ngvi.results.predictions.predict import check_groups, predictions_at
from pymc_ngvi.results.predictions.treatments import Groups as Groups


def predict(
    posterior: Posterior,
    new_data: Any,
    *,
    groups: Groups,
    var_names: str | Sequence[str] | None,
    draws: int,
    rng: np.random.Generator,
    bambi_model: Any = None,
) -> xr.DataTree:
    """Return predictions; see `NGVIApproximation.predict`."""
    check_groups(groups)
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    theta = posterior.draw(check_draws(draws), rng)
    if bambi_model is not None:
        return predict_bambi(posterior, bambi_model, new_data, groups=groups, var_names=var_names, theta=theta, rng=rng)
    return predictions_at(posterior, theta, new_data, groups, var_names, int(rng.integers(2**31)))
