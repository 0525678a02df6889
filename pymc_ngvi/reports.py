"""All that an approximation reports, beside its PyTensor nodes: each part is a mixin of its own."""

from pymc_ngvi.components import ComponentReport
from pymc_ngvi.diagnosis.report import DiagnosisReport
from pymc_ngvi.exact_report import ExactReport
from pymc_ngvi.persistence.report import Persistent
from pymc_ngvi.plotting.report import PictureReport
from pymc_ngvi.samplers import SamplerReport
from pymc_ngvi.summary import SummaryReport


class Report(Persistent, ComponentReport, SummaryReport, SamplerReport, PictureReport, ExactReport, DiagnosisReport):
    """What `NGVIApproximation` inherits beside ``pymc.Approximation``."""
