"""The methods of an approximation, by subject: each a mixin on `Fitted`, and none of them on another."""

from pymc_ngvi.results.methods.components import ComponentMethods
from pymc_ngvi.results.methods.corrections import CorrectionMethods
from pymc_ngvi.results.methods.diagnosis import DiagnosisMethods
from pymc_ngvi.results.methods.draws import DrawMethods
from pymc_ngvi.results.methods.exact import ExactMethods
from pymc_ngvi.results.methods.fit import FitMethods
from pymc_ngvi.results.methods.left_out import LeftOutMethods
from pymc_ngvi.results.methods.moments import MomentMethods
from pymc_ngvi.results.methods.new_rows import NewRowsMethods
from pymc_ngvi.results.methods.plots import PlotMethods
from pymc_ngvi.results.methods.predictions import PredictionMethods
from pymc_ngvi.results.methods.priors import PriorMethods
from pymc_ngvi.results.methods.saving import SavingMethods
from pymc_ngvi.results.methods.sites import SiteMethods
from pymc_ngvi.results.methods.summary import SummaryMethods


class Methods(
    DrawMethods,
    MomentMethods,
    FitMethods,
    DiagnosisMethods,
    SummaryMethods,
    CorrectionMethods,
    ExactMethods,
    ComponentMethods,
    PlotMethods,
    PredictionMethods,
    PriorMethods,
    NewRowsMethods,
    SiteMethods,
    LeftOutMethods,
    SavingMethods,
):
    """What `NGVIApproximation` inherits beside ``pymc.Approximation``."""
