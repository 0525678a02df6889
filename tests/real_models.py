"""Models of real data that tests and measurements share."""

from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm

EXAMPLE_DATA = Path(__file__).parents[1] / "examples" / "data"


def regression(design, y, prior_sd):
    """Return a logistic regression with a coefficient for each column."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, prior_sd, shape=design.shape[1])
        pm.Bernoulli("y", logit_p=design @ beta, observed=y)
    return model


def epilepsy():
    """Return the Poisson GLMM of the example, non-centred and without names."""
    table = pd.read_csv(EXAMPLE_DATA / "epilepsy.csv")
    log_age = np.log(table["age"].to_numpy(dtype=float))
    base, treated, visit = (table[c].to_numpy(dtype=float) for c in ("log_base4", "trt", "visit_code"))
    design = np.column_stack([np.ones(len(table)), base, treated, base * treated, log_age - log_age.mean(), visit])
    patient = table["subject"].to_numpy() - 1
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=6)
        sd = pm.HalfNormal("sd", 1, shape=2)
        z = pm.Normal("z", 0, 1, shape=(59, 2))
        eta = design @ beta + sd[0] * z[patient, 0] + sd[1] * z[patient, 1] * visit
        pm.Poisson("seizures", pm.math.exp(eta), observed=table["seizures"].to_numpy())
    return model
