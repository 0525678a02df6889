"""References of ``nested.py``: moments by long NUTS runs, or by an integral over the hyperparameters."""

from pathlib import Path
from typing import NamedTuple

import arviz as az
import numpy as np
import pymc as pm

from measure import Array, coordinate_names, unconstrain
from nested_integral import integral
from nested_log_m import LogMarginals

NUTS, INTEGRAL = "NUTS", "integral"
N_CHAINS, N_TUNE, N_DRAWS, SEED, TARGET = 4, 2_000, 5_000, 7, 0.97


class Moments(NamedTuple):
    """Unconstrained names, means, standard deviations and effective sizes (of an integral, as accurate), (d,) each."""

    names: list[str]
    mean: Array
    sd: Array
    size: Array

    @classmethod
    def read(cls, file: Path) -> "Moments":
        """Read what `write` wrote."""
        with np.load(file) as found:
            return cls(found["uncon_names"].tolist(), found["uncon_mean"], found["uncon_sd"], found["uncon_ess"])

    def write(self, file: Path) -> None:
        """Write a file that `measure.Reference` reads, too."""
        np.savez(file, uncon_names=self.names, uncon_mean=self.mean, uncon_sd=self.sd, uncon_ess=self.size)


def file_of(folder: Path, name: str, kind: str) -> Path:
    """Return the file of a model's moments, by NUTS or by an integral."""
    return folder / f"{''.join(c if c.isalnum() else '_' for c in name)}{'' if kind == NUTS else '_integral'}.npz"


def by_nuts(model: pm.Model, sampled: pm.Model) -> Moments:
    """Return the moments of a model by NUTS on another with the same posterior and all of its variables."""
    import nutpie

    draws = nutpie.sample(
        nutpie.compile_pymc_model(sampled),
        draws=N_DRAWS, tune=N_TUNE, chains=N_CHAINS, cores=1, seed=SEED, target_accept=TARGET, progress_bar=False,
    )  # fmt: skip
    flat = unconstrain(draws["posterior"], model)
    by_chain = flat.reshape(N_CHAINS, -1, flat.shape[1])
    size = np.array([float(az.ess(by_chain[:, :, i])) for i in range(flat.shape[1])])
    return Moments(coordinate_names(model), flat.mean(axis=0), flat.std(axis=0), size)


def by_integral(model: pm.Model, *, is_gaussian: bool) -> Moments:
    """Return the moments of a model by an integral; ``is_gaussian``: its likelihood is, given the hyperparameters."""
    return Moments(coordinate_names(model), *integral(LogMarginals(model), is_gaussian=is_gaussian))
