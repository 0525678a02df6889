"""Equal graphs are simplified and compiled once in a process, whatever model they come from.

Most tests take a small model of their own, and many of these are alike. Rewriting their graphs is nearly half of the
time of the suite.
"""

import collections
import functools
import threading

import numpy as np
import pytensor

from pytensor import config
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable, clone_get_equiv
from pytensor.graph.rewriting import basic
from pytensor.graph.rewriting.db import EquilibriumDB, RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort

from pymc_ngvi.graphs import graph

#: Options of functions that equal graphs share.
_SHARED = {"name", "on_unused_input", "trust_input"}
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
    "over_draws_and_directions": lambda product, theta, direction: ([theta, direction], [product]),
}


class Once:
    """What was derived and compiled; `install` puts it in the place of the package's own functions."""

    def __init__(self):
        self.is_active = True
        self._kept = collections.OrderedDict()
        self._compile = pytensor.function

    def install(self, patch):
        for name in _DERIVED:
            patch.setattr(graph, name, functools.partial(self.derive, name, getattr(graph, name)))
        patch.setattr(pytensor, "function", self.compile)

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

    def compile(self, inputs, outputs=None, mode=None, **options):
        """Return the compiled function; where this thread made it earlier, the same object."""
        every, key = [outputs] if isinstance(outputs, Variable) else outputs, None
        if (
            isinstance(inputs, list)
            and isinstance(every, list)
            and all(isinstance(v, Variable) for v in inputs + every)
        ):
            given = {name: value for name, value in options.items() if value or name not in ("updates", "givens")}
            of_graph = signature(inputs, every) if given.keys() <= _SHARED else None
            how = (every is outputs, _content_of(mode), *sorted(given.items()), config.floatX, config.cxx)
            key = of_graph and ("compile", of_graph, threading.get_ident(), *how)
        return self._once(key, lambda: (mode, self._compile(inputs, outputs, mode, **options)))[1]


def _content_of(mode):
    """Return what is the same for modes that do the same, as long as they are kept: parts are told by identity."""
    if not isinstance(mode, Mode) or not isinstance(mode.provided_optimizer, RewriteDatabaseQuery):
        return mode
    query = mode.provided_optimizer
    more = [(id(rewriter), position) for rewriter, position in query.extra_rewrites]
    return (id(mode.linker), *_tags(query), query.position_cutoff, *query.subquery.items(), *more)


def _tags(query):
    return tuple(query.include), tuple(query.require), tuple(query.exclude)


def rewriters_once(patch):
    """Keep what PyTensor makes of a query, which it would do for each graph, and which types come before others."""
    query, order = EquilibriumDB.query, functools.cache(basic._compose_mro)
    made = {}

    def kept(db, asked, **more):
        if more or not isinstance(asked, RewriteDatabaseQuery) or asked.subquery:
            return query(db, asked, **more)
        key = (db, len(db._names), config.optdb__max_use_ratio, *_tags(asked))
        if key not in made:
            made[key] = rewriter = query(db, asked)
            tracker = rewriter.node_tracker
            tracker.get_trackers = functools.lru_cache(_MOST)(tracker._get_trackers)  # operations can be large
        return made[key]

    patch.setattr(EquilibriumDB, "query", kept)
    patch.setattr(basic, "_compose_mro", lambda kind, types: order(kind, frozenset(types)))


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
