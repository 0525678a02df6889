"""Natural-gradient variational inference for PyMC: ``pm.fit(method="ngvi")``."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036 (in a checkout, the first thing to say so would be a syntax error)
    raise ImportError(
        f"pymc_ngvi needs Python 3.12 or newer; {sys.executable} is {sys.version.split()[0]}. "
        "Make an environment with a newer one: python3.12 -m venv .venv"
    )

from pymc_ngvi.core.status import ConvergenceWarning, DivergedError, Elbo, NotExactError, StartError, Status
from pymc_ngvi.core.version import __version__ as __version__
from pymc_ngvi.density import LogDensity, MissingDerivativeError
from pymc_ngvi.density.new_priors import normalised
from pymc_ngvi.density.shards import BrokenExecutorError, ShardError, Shards
from pymc_ngvi.density.streams import BatchError
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.inference import NGVI, fit_ngvi
from pymc_ngvi.many import Calibration, ManyFits, calibrate, fit_many
from pymc_ngvi.register import fit_model, register
from pymc_ngvi.results.approximation import NGVIApproximation, load

__all__ = [
    "NGVI",
    "BatchError",
    "BrokenExecutorError",
    "Calibration",
    "ConvergenceWarning",
    "DivergedError",
    "Elbo",
    "FitRecord",
    "LogDensity",
    "ManyFits",
    "MissingDerivativeError",
    "NGVIApproximation",
    "NotExactError",
    "ShardError",
    "Shards",
    "StartError",
    "Status",
    "calibrate",
    "fit_many",
    "fit_model",
    "fit_ngvi",
    "load",
    "normalised",
    "register",
]

register()
