"""One model fitted to many data sets: read and compiled once, one fit after another or in processes."""

from pymc_ngvi.many.calibrating import calibrate
from pymc_ngvi.many.calibration import Calibration
from pymc_ngvi.many.fit_many import fit_many
from pymc_ngvi.many.result import ManyFits

__all__ = ["Calibration", "ManyFits", "calibrate", "fit_many"]
