"""Whether an approximation can be relied on: `NGVIApproximation.diagnose`."""

from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis

__all__ = ["Diagnosis"]
