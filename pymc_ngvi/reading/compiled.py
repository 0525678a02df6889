"""Functions that are compiled once, however often the graph that they are of is made."""

from collections.abc import Callable, Sequence

import pytensor

from pytensor.compile import Function
from pytensor.graph.basic import Variable, equal_computations

from pymc_ngvi.graphs.backends import quick_mode, without_c

type CompileAll = Callable[[list[Variable], list[Variable]], Function]


class CompiledOnce:
    """Compiles functions; those of equal graphs, whose inputs have other names, are the same.

    Other data make rows anew, and mostly the same ones.
    """

    def __init__(self, compile_: CompileAll) -> None:
        self._compile = compile_
        self._made: list[tuple[list[Variable], list[Variable], Function]] = []

    def __call__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Function:
        """Return the function of a graph."""
        new = list(inputs), list(outputs)
        for *old, function in self._made:
            alike = [[v.type for v in part] for part in old] == [[v.type for v in part] for part in new]
            if alike and equal_computations(new[1], old[1], new[0], old[0]):
                return function
        self._made.append((*new, self._compile(*new)))
        return self._made[-1][-1]


def quickly(inputs: list[Variable], outputs: list[Variable]) -> Function:
    """Compile a function that is called once for each set of data."""
    with without_c():
        return pytensor.function(inputs, outputs, mode=quick_mode(), on_unused_input="ignore")
