"""Pictures of a fit, of its importance weights, and of q beside reference draws."""

from pymc_ngvi.results.plotting.comparison import plot_comparison
from pymc_ngvi.results.plotting.fit import plot_fit
from pymc_ngvi.results.plotting.weights import plot_khat

__all__ = ["plot_comparison", "plot_fit", "plot_khat"]
