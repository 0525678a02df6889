"""Log p as a term of the globals and one term for each local coordinate, batched over draws and quadrature nodes.

    log p(g, b) = f_0(g) + sum_c f_c(g, b_path(c)),

where path(c) is the way from the root of c's tree to c itself (`pymc_ngvi.marginal.forest`). The elements of
``model.logp(sum=False)`` are each assigned to the deepest coordinate that they depend on. Which coordinates an element
depends on is found by moving them: all those of a level whose number has a certain binary digit at a time.
"""

from typing import NamedTuple, Protocol

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

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.blocks import CannotSplit, Trees
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.pieces import Pieces
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c

Integers = NDArray[np.intp]

#: Numbers in a temporary: about what a usual second-level cache holds.
_CACHED = 2**17
#: Points about which coordinates are moved, and their seed.
_N_POINTS, _SEED = 2, 20_260_301


class TreesByLevel(Trees, Protocol):
    """What is needed of a `pymc_ngvi.marginal.forest.Forest` beside."""

    @property
    def at_level(self) -> tuple[Integers, ...]: ...  # noqa: D102


class SplitDensity:
    """The terms of log p, compiled.

    Parameters
    ----------
    density : LogDensity
    forest : Forest
        With local coordinates.
    point : ndarray, shape (n_dim,)
        Where log p is finite; dependences are looked for about it.

    Attributes
    ----------
    n_elements : int
        Elements of log p that depend on local coordinates.
    n_evaluations : int
        Pairs of a draw and a node at which all of them were evaluated.
    compile_seconds : float

    Raises
    ------
    CannotSplit
        If an element depends on local coordinates that are not on one path.
    """

    def __init__(self, density: LogDensity, forest: TreesByLevel, point: Array) -> None:
        self.forest = forest
        self.n_evaluations = 0
        self._pieces = Pieces.of(forest.globals_, density.n_dim)
        before = density.compile_seconds
        self._of_globals, self._of_locals = self._functions(density)
        self.compile_seconds = density.compile_seconds - before
        # Found each time: other data, or other indices of groups, may bring other ones.
        self._find_owners(point)

    def _functions(self, density: LogDensity) -> tuple[Function, Function]:
        """Return the functions of the terms: those of an earlier fit with the same globals, or new ones."""
        beside = tuple(self.forest.globals_.tolist())
        made: tuple[Function, Function] = density.functions.once(
            density.functions.made.terms_beside[beside], lambda: self._compiled(density, *self._graphs(density))
        )
        return made

    def _graphs(self, density: LogDensity) -> tuple[Variable, list[Variable]]:
        """Return the sum of the terms of globals alone, and the elements of all others."""
        pieces = self._pieces
        with without_c(density.model):
            terms = [pt.as_tensor(t, allow_xtensor_conversion=True) for t in density.model.logp(sum=False)]
        with without_c():
            terms = [part for term in terms for part in _summands(term)]
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

    def _compiled(self, density: LogDensity, first: Variable, elements: list[Variable]) -> tuple[Function, Function]:
        """Return the functions: of globals (n, p), and beside them of local coordinates (n, n_nodes, n_local)."""
        pieces = self._pieces
        draws = pt.matrix("globals", dtype="float64", shape=(None, pieces.global_.type.shape[0]))
        nodes = pt.matrix("nodes", dtype="float64", shape=(None, self.forest.n_local))
        both = pt.tensor3("locals", dtype="float64", shape=(None, None, self.forest.n_local))
        # Nodes first, then draws: what depends on globals alone has no axis of nodes, and is computed once a draw.
        batched = vectorize_graph(elements, {pieces.local: nodes})
        batched = vectorize_graph(batched, {pieces.global_: draws, nodes: both})
        lead = both.shape[:2]
        batched = [e if e.ndim == 3 else pt.broadcast_to(e, (*lead, e.shape[-1])) for e in batched]
        [first] = vectorize_graph([first], {pieces.global_: draws})
        if first.ndim == 0:
            first = pt.broadcast_to(first, (draws.shape[0],))
        return density.functions.compile([draws], [first]), density.functions.compile([draws, both], batched)

    # --- which element belongs to which coordinate ---

    def _find_owners(self, point: Array) -> None:
        """Find the deepest coordinate that each element depends on, and check that the others are on its path."""
        forest = self.forest
        rng = np.random.default_rng(_SEED)
        owners: list[Integers] | None = None
        for _ in range(_N_POINTS):
            g = point[forest.globals_] + 0.1 * rng.standard_normal(len(forest.globals_))
            b = point[forest.locals_] + 0.3 * rng.standard_normal(forest.n_local)
            found = self._owners_at(g, b, rng)
            # Where an element does not change at one point (a maximum), it may at another.
            if owners is None:
                owners = found
            else:
                owners = [np.where(_deeper(forest, f, o), f, o) for f, o in zip(found, owners, strict=True)]
        assert owners is not None
        self.n_elements = int(sum(len(o) for o in owners))
        self._sums = [_Sums.of(o, forest.n_local) for o in owners]

    def _owners_at(self, g: Array, b: Array, rng: np.random.Generator) -> list[Integers]:
        forest = self.forest
        by_level: list[list[Integers]] = []  # for each level, the place that each element depends on, or -1
        for places in forest.at_level:
            n_digits = len(places).bit_length()
            number = np.arange(len(places)) + 1
            on = (number >> np.arange(n_digits)[:, None]) & 1 == 1
            moved = np.tile(b, (1 + 2 * n_digits, 1))
            step = rng.uniform(0.3, 1.0, len(places)) * rng.choice([-1.0, 1.0], len(places))
            moved[1:, places] += np.concatenate([on, ~on]) * step
            by_level.append([self._place_of(v, places, n_digits) for v in self._elements(g, moved)])
        owners = []
        for of_levels in zip(*by_level, strict=True):
            owner = of_levels[0]
            for deeper in of_levels[1:]:
                owner = np.where(deeper >= 0, deeper, owner)
            for level, places in enumerate(of_levels):
                expected = forest.path[owner, level]
                if ((places >= 0) & (places != expected)).any():
                    raise CannotSplit(_SEVERAL)
            owners.append(owner)
        return owners

    def _elements(self, g: Array, local: Array) -> list[Array]:
        """Return the elements at several local points beside one of the globals, (n_points, n_elements) each."""
        parts: list[list[Array]] = []
        size = max(1, int(16 * _CACHED // max(local.shape[1], 1)))
        for start in range(0, len(local), size):
            with np.errstate(all="ignore"):
                values = self._of_locals(
                    np.ascontiguousarray(g[None]), np.ascontiguousarray(local[None, start : start + size])
                )
            parts.append([np.asarray(v)[0] for v in values])
        return [np.concatenate(p) for p in zip(*parts, strict=True)]

    @staticmethod
    def _place_of(values: Array, places: Integers, n_digits: int) -> Integers:
        changed = values[1:] != values[:1]
        on, off = changed[:n_digits], changed[n_digits:]
        if (on & off).any():
            raise CannotSplit(_SEVERAL)
        number = (on * (1 << np.arange(n_digits))[:, None]).sum(axis=0)
        depends = (on | off).any(axis=0)
        # A digit that shows in neither direction: the value moved, but to the same number.
        if (depends & ~(on | off).all(axis=0)).any() or (number[depends] > len(places)).any():
            raise CannotSplit(_SEVERAL)
        return np.where(depends, places[np.clip(number - 1, 0, len(places) - 1)], -1)

    # --- evaluation ---

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once, at ``n_nodes`` nodes each, so that temporaries stay in cache."""
        return max(1, int(_CACHED // (n_nodes * max(self.n_elements, self.forest.n_local))))

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Evaluate the terms.

        Parameters
        ----------
        g : ndarray, shape (n, n_globals)
        local : ndarray, shape (n, n_nodes, n_local)

        Returns
        -------
        of_globals : ndarray, shape (n,)
        of_locals : ndarray, shape (n, n_nodes, n_local)
        """
        n, n_nodes, n_local = local.shape
        self.n_evaluations += n * n_nodes
        with np.errstate(all="ignore"):  # far out, densities overflow: the caller sees it
            result = np.zeros((n, n_nodes, n_local))
            of_globals = np.array(self._of_globals(np.ascontiguousarray(g))[0])
            values = self._of_locals(np.ascontiguousarray(g), np.ascontiguousarray(local))
            for value, sums in zip(values, self._sums, strict=True):
                array = np.asarray(value)
                sums.add(array, result)
                if len(sums.alone):
                    of_globals += array[:, 0, sums.alone].sum(axis=-1)
        return of_globals, result


_SEVERAL = "an element of log p depends on several blocks of local coordinates at once"


class _Sums(NamedTuple):
    """Sums of elements by coordinate.

    Parameters
    ----------
    alone : ndarray of int
        Elements that depend on no local coordinate.
    places : ndarray of int
        Coordinates that have elements, ascending.
    starts : ndarray of int or None
        Where the run of each of these begins, if its elements are neighbours; one element each if there are as many.
    matrix : csr_array or None
        Otherwise: (n_local, n_elements).
    n_elements : int
    """

    alone: Integers
    places: Integers
    starts: Integers | None
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


def _deeper(forest: TreesByLevel, new: Integers, old: Integers) -> NDArray[np.bool_]:
    level = np.append(forest.level, -1)  # of no coordinate
    deeper: NDArray[np.bool_] = level[new] > level[old]
    return deeper


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
