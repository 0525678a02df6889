"""Classification by Gaussian processes as in Khan et al. (2016): the data, their kernels and step sizes, the model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm

#: Nugget of the authors' code.
NUGGET = 1e-4


@dataclass(frozen=True)
class Setting:
    """Kernel, batch and step sizes of a data set, as the paper and its code have them."""

    file: str
    log_length: float
    log_sd: float
    n_train: int | None
    batch: int
    beta_n: float
    sgd: tuple[float, float]  #: decay of steps, and the first one times n
    adagrad: float
    rmsprop: tuple[float, float]
    adadelta: tuple[float, float]  #: step size, and 1 - rho
    adam: float
    passes: tuple[int, int]  #: of PG-SVI, and of gradients


_USPS = ((0.6, 800.0), 8.0, (0.1, 0.9), (1.0, 1e-12), 2.5)
SETTINGS = {
    "Sonar": Setting(
        "sonar.csv", -1.0, 6.0, None, 5, 0.2, (0.8, 1200.0), 4.5, (0.1, 0.9), (1.0, 5e-10), 0.04, passes=(100, 500)
    ),
    "USPS, 2 against 4": Setting("usps_2vs4.csv.gz", 2.5, 5.0, 884, 20, 2.5, *_USPS, passes=(20, 40)),
    "USPS, 3 against 5": Setting("usps_3vs5.csv.gz", 2.5, 5.0, 767, 20, 2.5, *_USPS, passes=(20, 40)),
}


def split(file: Path, n_train: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, labels, and which rows are for tests: those of the file, or all but some at random."""
    frame = pd.read_csv(file)
    y, is_test = frame.pop("y").to_numpy(), frame.pop("is_test").to_numpy() == 1
    x = frame.to_numpy(float)
    if n_train is not None:
        x, is_test = x / 1000.0, np.ones(len(y), dtype=bool)
        is_test[np.random.default_rng(0).permutation(len(y))[:n_train]] = False
    return x, y, is_test


def process(x: np.ndarray, y: np.ndarray, scale: float, sd: float) -> tuple[pm.Model, pm.gp.Latent]:
    """Return a classification by a Gaussian process, and the process."""
    with pm.Model() as model:
        gp = pm.gp.Latent(cov_func=sd**2 * pm.gp.cov.ExpQuad(x.shape[1], ls=scale))
        pm.Bernoulli("y", logit_p=gp.prior("f", X=x, jitter=NUGGET), observed=y)
    return model, gp
