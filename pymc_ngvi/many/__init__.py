"""One model fitted to many data sets: read and compiled once, one fit after another or in processes."""

from pymc_ngvi.many.fit_many import Calibration, ManyFits, calibrate, fit_many

__all__ = ["Calibration", "ManyFits", "calibrate", "fit_many"]
