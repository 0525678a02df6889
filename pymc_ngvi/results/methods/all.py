"""All that an approximation reports, beside its PyTensor nodes: each part is a mixin of its own."""

from pymc_ngvi.results.methods.components import ComponentReport
from pymc_ngvi.results.methods.diagnosis import DiagnosisReport
from pymc_ngvi.results.methods.exact import ExactReport
from pymc_ngvi.results.methods.plots import PictureReport
from pymc_ngvi.results.methods.samplers import SamplerReport
from pymc_ngvi.results.methods.saving import Persistent
from pymc_ngvi.results.methods.summary import SummaryReport


class Report(Persistent, ComponentReport, SummaryReport, SamplerReport, PictureReport, ExactReport, DiagnosisReport):
    """What `NGVIApproximation` inherits beside ``pymc.Approximation``."""
