"""The graph of a model given new data, and posterior draws of the elements that were in the fit."""

from pymc_ngvi.density.predictive.graph import PredictiveGraph as PredictiveGraph
from pymc_ngvi.density.predictive.graph import Treatment as Treatment
from pymc_ngvi.density.predictive.graph import data_behind as data_behind
from pymc_ngvi.density.predictive.graph import indexed_axes as indexed_axes
from pymc_ngvi.density.predictive.graph import is_continued as is_continued
from pymc_ngvi.density.predictive.graph import n_batch_axes as n_batch_axes
