"""Equal graphs are simplified and compiled once in a process, whatever model they come from.

Most tests take a small model of their own, and many of these are alike. Rewriting their graphs is nearly half of the
time of the suite.
"""

import collections
import functools

import numpy as np

from pymc import initial_point
from pytensor import config
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable, clone_get_equiv
from pytensor.graph.traversal import ancestors, toposort

from pymc_ngvi.density import flat
from pymc_ngvi.graphs import graph

#: Results that are kept, those that were last asked for, and bytes of a constant that are compared.
_MOST, _MOST_BYTES = 200, 100_000


class Signature(tuple):
    """What tells graphs apart; operations take long to hash, so that it is done once."""

    def __init__(self, parts):
        self._hash = super().__hash__()

    def __hash__(self):
        return self._hash


def signature(inputs, outputs):
    """Return what equal graphs have in common: operations, types, names, constants, and shared variables themselves.

    None for a graph with a constant that is large or can't be compared.
    """
    numbers, rows = {}, []

    def number(var):
        if var not in numbers:
            if isinstance(var, Constant):
                rows.append((var.type, _content(var.data)))
            else:
                rows.append(var if isinstance(var, SharedVariable) else (var.type, var.name))
            numbers[var] = len(numbers)
        return numbers[var]

    try:
        for var in inputs:
            number(var)
        for node in toposort(outputs):
            rows.append((node.op, *map(number, node.inputs), *((out.type, out.name) for out in node.outputs)))
            for out in node.outputs:
                numbers[out] = len(numbers)
        ends = list(map(number, outputs))  # constants among them are rows, too
        return Signature((*rows, *ends))
    except TypeError:
        return None


def _content(data):
    if not isinstance(data, np.ndarray):
        return type(data), data
    if data.dtype.hasobject or data.nbytes > _MOST_BYTES:
        raise TypeError
    return data.dtype.str, data.shape, data.tobytes()


#: Functions from graphs to graphs: what each is given, the variables first that it treats in a way of their own.
_DERIVED = {
    "simplify": lambda outputs: ([], outputs),
    "gradient": lambda logp, theta: ([theta], [logp]),
    "hessian_product": lambda grad, theta, direction: ([theta, direction], [grad]),
    "over_draws": lambda outputs, theta: ([theta], outputs),
    "over_directions": lambda product, direction: ([direction], [product]),
    "over_draws_and_directions": lambda product, theta, direction: ([theta, direction], [product]),
}


class Once:
    """What was derived and compiled; `install` puts it in the place of the package's own functions."""

    def __init__(self):
        self.is_active = True
        self._kept = collections.OrderedDict()
        self._compile, self._compile_initial_point = flat.Functions.compile, initial_point.compile

    def install(self, patch):
        for name in _DERIVED:
            patch.setattr(graph, name, functools.partial(self.derive, name, getattr(graph, name)))
        patch.setattr(flat.Functions, "compile", lambda functions, *args: self.compile(functions, *args))
        patch.setattr(initial_point, "compile", self.compile_initial_point)

    def _once(self, key, make):
        if not self.is_active or key is None:
            return make()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        self._kept[key] = made = make()
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return made

    def derive(self, name, function, *graphs, **options):
        """Return the graphs that a function makes of others, on the inputs of these."""
        special, outputs = _DERIVED[name](*graphs)
        roots = [*special, *(var for var in _roots(outputs) if var not in special)]
        of_graph = signature(roots, outputs)
        key = of_graph and (name, of_graph, config.floatX, *sorted(options.items()))
        made_on, made = self._once(key, lambda: (roots, function(*graphs, **options)))
        return made if made_on is roots else _on(made, dict(zip(made_on, roots, strict=True)))

    def compile(self, functions, inputs, outputs):
        """Return the compiled function; where it was made earlier, the same object."""
        every = [outputs] if isinstance(outputs, Variable) else list(outputs)
        of_graph = None if functions.compile_kwargs else signature(inputs, every)
        key = of_graph and ("compile", of_graph, functions.backend, functions._is_large, functions._model.check_bounds)
        return self._once(key, lambda: self._compile(functions, inputs, outputs))

    def compile_initial_point(self, inputs, outputs, **options):
        """Return the function behind the initial point of a model."""
        of_graph = signature(inputs, outputs)
        key = of_graph and ("initial point", of_graph, config.floatX, config.cxx)
        return self._once(key, lambda: self._compile_initial_point(inputs, outputs, **options))


def _on(made, roots):
    """Return graphs, in whatever tuples and lists they are, on other inputs; what they share stays shared."""
    own = clone_get_equiv([], list(_flat(made)), copy_inputs=False, copy_orphans=False, memo=dict(roots))

    def replaced(part):
        return own.get(part, part) if isinstance(part, Variable) else type(part)(map(replaced, part))

    return replaced(made)


def _flat(made):
    return [made] if isinstance(made, Variable) else [var for part in made for var in _flat(part)]


def _roots(outputs):
    """Return the inputs of a graph that are neither constant nor shared."""
    return [v for v in ancestors(outputs) if v.owner is None and not isinstance(v, Constant | SharedVariable)]
