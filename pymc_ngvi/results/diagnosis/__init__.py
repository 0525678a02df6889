"""Whether an approximation can be relied on: `NGVIApproximation.diagnose`."""

from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.diagnosis.finding import Finding

__all__ = ["Diagnosis", "Finding"]
