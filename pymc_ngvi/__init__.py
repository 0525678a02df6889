"""Natural-gradient variational inference for PyMC: ``pm.fit(method="ngvi")``."""

from pymc_ngvi.approximation import NGVIApproximation
from pymc_ngvi.bambi import uncentre_bambi_intercept
from pymc_ngvi.fit import NGVI, fit_ngvi
from pymc_ngvi.model import LogDensity, MissingDerivativeError
from pymc_ngvi.persistence.report import load
from pymc_ngvi.register import register, unregister
from pymc_ngvi.result import Elbo, FitRecord
from pymc_ngvi.status import ConvergenceWarning, StartError, Status

__version__ = "0.1.0"

__all__ = [
    "NGVI",
    "ConvergenceWarning",
    "Elbo",
    "FitRecord",
    "LogDensity",
    "MissingDerivativeError",
    "NGVIApproximation",
    "StartError",
    "Status",
    "fit_ngvi",
    "load",
    "register",
    "uncentre_bambi_intercept",
    "unregister",
]

register()
