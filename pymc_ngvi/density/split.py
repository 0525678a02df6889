"""Log p as a term of the globals and one term for each local coordinate, batched over draws and quadrature nodes.

    log p(g, b) = f_0(g) + sum_c f_c(g, b_path(c)),

where path(c) is the way from the root of c's tree to c itself (`pymc_ngvi.marginal.forest`). Elements of the factors
of the model are each assigned to the deepest coordinate that they depend on, as their graph tells.
"""

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.scalar import Add, Identity
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum
from scipy import sparse

from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.blocks import SEVERAL, CannotSplit, Trees, owners
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.affine import Dependences

# --- stands for the flat vector where graphs are put on two others: of some coordinates, and of the rest ---


class Pieces:
    """Pieces of the flat vector, taken from globals or local coordinates."""

    def __init__(self, globals_: NDArray[np.intp], n_dim: int, global_: Variable, local: Variable) -> None:
        self.global_, self.local = global_, local
        self._is_global = np.zeros(n_dim, dtype=bool)
        self._is_global[globals_] = True
        self._rank = np.where(self._is_global, np.cumsum(self._is_global), np.cumsum(~self._is_global)) - 1

    @classmethod
    def of(cls, globals_: NDArray[np.intp], n_dim: int) -> "Pieces":
        """Return pieces of two inputs."""
        global_ = pt.vector("g", dtype="float64", shape=(len(globals_),))
        return cls(globals_, n_dim, global_, local_input(n_dim - len(globals_)))

    def __getitem__(self, where: slice) -> Variable:
        """Return a piece."""
        of_globals, rank = self._is_global[where], self._rank[where]
        if of_globals.all():
            return self.global_[int(rank[0]) : int(rank[-1]) + 1]
        if not of_globals.any():
            return self.local[int(rank[0]) : int(rank[-1]) + 1]
        at = np.empty(len(rank), dtype=np.intp)
        at[of_globals] = np.arange(int(of_globals.sum()))
        at[~of_globals] = int(of_globals.sum()) + np.arange(int((~of_globals).sum()))
        return pt.concatenate([self.global_[rank[of_globals]], self.local[rank[~of_globals]]])[at]


def local_input(n: int) -> Variable:
    """Return the symbolic vector of local coordinates."""
    return pt.vector("b", dtype="float64", shape=(n,))


Integers = NDArray[np.intp]

#: Random halves of the local coordinates that are moved, to see what changes with them, and their seed.
_N_MOVED, _SEED = 8, 20_260_301


class _Made(NamedTuple):
    """What is made once for the same globals."""

    pieces: Pieces
    #: The sum of the terms of globals alone; the elements of all others.
    of_globals: Function
    of_locals: Function
    #: These elements.
    arrays: list[Variable]
    #: All of them, one array after the other.
    elements: Variable
    #: Of ``elements``, as functions of local coordinates.
    facts: Facts


class SplitDensity:
    """The terms of log p, compiled."""

    def __init__(self, density: LogDensity, forest: Trees, point: Array) -> None:
        self.forest = forest
        self.n_evaluations = 0
        before = density.compile_seconds
        once, beside = density.functions.once, tuple(forest.globals_.tolist())
        self._made: _Made = once(density.functions.made.terms_beside[beside], lambda: self._make(density))
        self.compile_seconds = density.compile_seconds - before
        # Found each time: other data, or other indices of groups, may bring other ones.
        owner = self._owners(point)
        self.n_elements = len(owner)
        ends = np.cumsum([self._made.facts.shape(array)[0] for array in self._made.arrays])[:-1]
        self._sums = [_Sums.of(of_array, forest.n_local) for of_array in np.split(owner, ends)]
        self._check(owner, point)

    def _make(self, density: LogDensity) -> _Made:
        """Return the functions of the terms, and what tells which coordinates they depend on."""
        pieces = Pieces.of(self.forest.globals_, density.n_dim)
        first, arrays = self._graphs(density, pieces)
        with without_c():
            elements = pt.concatenate(arrays)
            facts = Facts(elements, pieces.local, [pieces.global_])
        draws = pt.matrix("globals", dtype="float64", shape=(None, pieces.global_.type.shape[0]))
        nodes = pt.matrix("nodes", dtype="float64", shape=(None, self.forest.n_local))
        both = pt.tensor3("locals", dtype="float64", shape=(None, None, self.forest.n_local))
        # Nodes first, then draws: what depends on globals alone has no axis of nodes, and is computed once a draw.
        batched = vectorize_graph(arrays, {pieces.local: nodes})
        batched = vectorize_graph(batched, {pieces.global_: draws, nodes: both})
        lead = both.shape[:2]
        batched = [e if e.ndim == 3 else pt.broadcast_to(e, (*lead, e.shape[-1])) for e in batched]
        [first] = vectorize_graph([first], {pieces.global_: draws})
        if first.ndim == 0:
            first = pt.broadcast_to(first, (draws.shape[0],))
        compile_ = density.functions.compile
        return _Made(pieces, compile_([draws], [first]), compile_([draws, both], batched), arrays, elements, facts)

    @staticmethod
    def _graphs(density: LogDensity, pieces: Pieces) -> tuple[Variable, list[Variable]]:
        """Return the sum of the terms of globals alone, and the elements of all others."""
        with without_c():
            terms = [part for factor in density.graphs.factors for part in _summands(factor.logp)]
            terms = graph.on_flat_vector(density.model, density.layout, terms, pieces)
            # Checks of parameters tie all elements together; where one would fail, log p is not finite anyway.
            terms = graph.simplify(terms, check_bounds=False)
            terms = [part for term in terms for part in _summands(term)]
            of_locals = [pieces.local in set(ancestors([t])) for t in terms]
            alone = [t.sum() for t, is_local in zip(terms, of_locals, strict=True) if not is_local]
            outputs = [pt.add(pt.constant(0.0), *alone)]
            outputs += [t.flatten() for t, is_local in zip(terms, of_locals, strict=True) if is_local]
            first, *elements = graph.inline_inner_graphs(graph.simplify(outputs))
        return first, elements

    # --- which element belongs to which coordinate ---

    def _owners(self, point: Array) -> Integers:
        """Return the place of the deepest coordinate that each element depends on, -1 for none."""
        made = self._made
        made.facts.refresh()
        dependences = Dependences(made.facts, made.pieces.local)
        try:
            depends = dependences.of(made.elements)
        except TooDenseError:
            raise CannotSplit(SEVERAL) from None
        if not dependences.opaque:
            return owners([depends.sets[depends.index]], self.forest)
        changed = self._changed(point, np.eye(self.forest.n_local, dtype=np.bool_))
        return owners([sparse.csr_array(changed.T)], self.forest)

    def _check(self, owner: Integers, point: Array) -> None:
        """See that no element changes where only coordinates move that are not on the path to its own."""
        moved = np.random.default_rng(_SEED).random((_N_MOVED, self.forest.n_local)) < 0.5
        may_change = moved[:, self.forest.path[owner]].any(axis=-1) & (owner >= 0)
        if (self._changed(point, moved) & ~may_change).any():
            raise CannotSplit(SEVERAL)

    def _changed(self, point: Array, moved: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which elements, (n_moves, n_elements), change with which local coordinates, (n_moves, n_local)."""
        forest, rng = self.forest, np.random.default_rng(_SEED)
        g = point[forest.globals_] + 0.1 * rng.standard_normal(len(forest.globals_))
        b = point[forest.locals_] + 0.3 * rng.standard_normal(forest.n_local)
        step = rng.uniform(0.3, 1.0, forest.n_local) * rng.choice([-1.0, 1.0], forest.n_local)
        first, *others = np.concatenate(self._elements(g, b + np.concatenate([0 * moved[:1], moved]) * step), axis=1)
        return np.array(others) != first

    def _elements(self, g: Array, local: Array) -> list[Array]:
        """Return the elements at several local points beside one of the globals, (n_points, n_elements) each."""
        parts: list[list[Array]] = []
        size = max(1, int(16 * CACHED // max(local.shape[1], 1)))
        for start in range(0, len(local), size):
            with np.errstate(all="ignore"):
                values = self._made.of_locals(
                    np.ascontiguousarray(g[None]), np.ascontiguousarray(local[None, start : start + size])
                )
            parts.append([np.asarray(v)[0] for v in values])
        return [np.concatenate(p) for p in zip(*parts, strict=True)]

    # --- evaluation ---

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once, at ``n_nodes`` nodes each, so that temporaries stay in cache."""
        return max(1, int(CACHED // (n_nodes * max(self.n_elements, self.forest.n_local))))

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Evaluate the terms."""
        n, n_nodes, n_local = local.shape
        self.n_evaluations += n * n_nodes
        with np.errstate(all="ignore"):  # far out, densities overflow: the caller sees it
            result = np.zeros((n, n_nodes, n_local))
            of_globals = np.array(self._made.of_globals(np.ascontiguousarray(g))[0])
            values = self._made.of_locals(np.ascontiguousarray(g), np.ascontiguousarray(local))
            for value, sums in zip(values, self._sums, strict=True):
                array = np.asarray(value)
                sums.add(array, result)
                if len(sums.alone):
                    of_globals += array[:, 0, sums.alone].sum(axis=-1)
        return of_globals, result


class _Sums(NamedTuple):
    """Sums of elements by coordinate."""

    #: Elements that depend on no local coordinate.
    alone: Integers
    #: Coordinates that have elements, ascending.
    places: Integers
    #: Where the run of each of these begins, if its elements are neighbours; one element each if there are as many.
    starts: Integers | None
    #: Otherwise: (n_local, n_elements).
    matrix: sparse.csr_array | None
    n_elements: int

    @classmethod
    def of(cls, owners: Integers, n_local: int) -> "_Sums":
        """Return the sums for the coordinate of each element, -1 for none."""
        alone = np.flatnonzero(owners < 0)
        if not len(alone) and (np.diff(owners) >= 0).all():
            places, starts = np.unique(owners, return_index=True)
            return cls(alone, places, starts, None, len(owners))
        keep = owners >= 0
        at = (owners[keep], np.flatnonzero(keep))
        matrix = sparse.csr_array((np.ones(int(keep.sum())), at), shape=(n_local, len(owners)))
        return cls(alone, np.unique(owners[keep]), None, matrix, len(owners))

    def add(self, values: Array, result: Array) -> None:
        """Add the sums of values, (n, n_nodes, n_elements), to a result, (n, n_nodes, n_local)."""
        if self.matrix is not None:
            flat = values.reshape(-1, self.n_elements)
            result += (self.matrix @ flat.T).T.reshape(result.shape)
        else:
            assert self.starts is not None
            sums = values if len(self.places) == self.n_elements else np.add.reduceat(values, self.starts, axis=-1)
            if len(self.places) == result.shape[-1]:
                result += sums
            else:
                result[..., self.places] += sums


def _summands(term: Variable) -> list[Variable]:
    """Return the parts of a sum over everything, as a Potential or a joint density may be; else the term itself."""
    node = term.owner
    if node is None or term.ndim:
        return [term]
    op = node.op
    if isinstance(op, Sum) and (op.axis is None or len(op.axis) == node.inputs[0].ndim):
        return [part for part in [node.inputs[0]] if part.ndim] or _summands(node.inputs[0])
    if isinstance(op, Elemwise) and isinstance(op.scalar_op, Add | Identity):
        return [part for given in node.inputs for part in _summands(given)]
    if isinstance(op, DimShuffle) and not node.inputs[0].ndim:
        return _summands(node.inputs[0])
    return [term]
