"""Whether an approximation can be relied on: `NGVIApproximation.diagnose`."""

from pymc_ngvi.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.diagnosis.findings import Finding

__all__ = ["Diagnosis", "Finding"]
