"""What is read of a log density, once: its predictors, and its parts as rows of these."""

from collections.abc import Callable, Sequence

import pytensor.tensor as pt

from pytensor.graph.basic import Variable

from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.affine import as_sum, conditions_of, without_checks
from pymc_ngvi.reading.factors import CompiledOnce, quickly
from pymc_ngvi.reading.found import Compile, Predictors, together
from pymc_ngvi.reading.terms import Terms, terms_of

type Simplify = Callable[[list[Variable]], list[Variable]]


class Reading:
    """A log density taken apart."""

    def __init__(self, parts: Sequence[Variable], theta: Variable, simplify: Simplify, compile_: Compile) -> None:
        self._of_weights = CompiledOnce(quickly)
        self.predictors = Predictors(together(parts), theta, compile_)
        with without_c():
            inner = simplify(list(self.predictors.density().owner.inputs))
            whole = together(graph.inline_inner_graphs(inner))
        checked, self.conditions = without_checks(whole), conditions_of(pt.add(pt.constant(0.0), *whole.owner.inputs))
        self.leaves_out_conditions = checked is not whole
        self._inner = as_sum(checked, self.predictors.vector)
        self._facts = Facts(self._inner, self.predictors.vector, conditions=True)
        self._take_apart()

    def _take_apart(self) -> None:
        self._version = self.predictors.version
        before = self.terms.weigh if hasattr(self, "terms") else None
        parts = self._inner.owner.inputs
        with without_c():
            self.terms: Terms = terms_of(parts, self.predictors.vector, self._facts, self._of_weights, before)

    def refresh(self) -> bool:
        """Take the data as they are now; tell whether they have changed."""
        self.predictors.refresh()
        if self.predictors.version == self._version:
            return False
        self._facts.refresh()
        self._take_apart()
        return True

    def renew(self) -> bool:
        """Take the values of data as they are now, the same elements of log p being rows as before."""
        if self.terms.rest:
            return False
        self.predictors.renew()
        self._facts.refresh()
        terms = self.terms.renewed(self.predictors.vector, self._facts)
        if terms is None:
            return False
        self._version, self.terms = self.predictors.version, terms
        return True

    def retake(self) -> None:
        """Take the data as they are now, and log p apart once more; raises as `refresh`."""
        self.predictors.retake()
        self._facts.refresh()
        self._take_apart()
