"""Whether an approximation can be relied on: `NGVIApproximation.diagnose`."""

from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.diagnosis.findings import Finding

__all__ = ["Diagnosis", "Finding"]
