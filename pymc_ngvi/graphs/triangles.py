"""Products with, and solutions of, sparse triangular matrices, in time and memory of their entries: one Op.

Numba compiles it. PyTensor's other modes call the same functions; JAX does so on the host, once `serve_jax` was called.
"""

import functools

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from pymc_ngvi.core.types import Array

type _Ints = NDArray[np.int64]
type _Kernel = Callable[[_Ints, _Ints, _Ints, Array, Array], Array]


def _times(order: _Ints, starts: _Ints, rows: _Ints, entries: Array, vector: Array) -> Array:
    result = np.zeros_like(vector)
    for j in range(len(order)):
        value = vector[order[j]]
        for k in range(starts[j], starts[j + 1]):
            result[rows[k]] += entries[k] * value
    return result


def _times_transposed(order: _Ints, starts: _Ints, rows: _Ints, entries: Array, vector: Array) -> Array:
    result = np.empty_like(vector)
    for j in range(len(order)):
        total = 0.0
        for k in range(starts[j], starts[j + 1]):
            total += entries[k] * vector[rows[k]]
        result[order[j]] = total
    return result


def _solve(order: _Ints, starts: _Ints, rows: _Ints, entries: Array, vector: Array) -> Array:
    result = vector.copy()
    for j in range(len(order)):
        first = starts[j]
        value = result[order[j]] / entries[first]
        result[order[j]] = value
        for k in range(first + 1, starts[j + 1]):
            result[rows[k]] -= entries[k] * value
    return result


def _solve_transposed(order: _Ints, starts: _Ints, rows: _Ints, entries: Array, vector: Array) -> Array:
    result = vector.copy()
    for j in range(len(order) - 1, -1, -1):
        first = starts[j]
        total = result[order[j]]
        for k in range(first + 1, starts[j + 1]):
            total -= entries[k] * result[rows[k]]
        result[order[j]] = total / entries[first]
    return result


#: By whether the matrix is inverted, and transposed.
_KERNELS: dict[tuple[bool, bool], Any] = {
    (False, False): _times,
    (False, True): _times_transposed,
    (True, False): _solve,
    (True, True): _solve_transposed,
}


@functools.cache
def _compiled(inverted: bool, transposed: bool) -> _Kernel:
    import numba  # .5 s to import

    return cast(_Kernel, numba.njit(_KERNELS[inverted, transposed]))


class SparseTriangular(Op):
    """A sparse triangular matrix, or its inverse, transpose or inverse transpose, times a vector.

    Inputs are order, starts, rows and entries of a `SparseTriangle`, and the vector, the only one with a derivative.

    Parameters
    ----------
    inverted, transposed : bool
    """

    __props__ = ("inverted", "transposed")

    def __init__(self, *, inverted: bool, transposed: bool) -> None:
        self.inverted, self.transposed = inverted, transposed

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore from a pickle: in another process, Numba is to know of it, too."""
        self.__dict__.update(state)
        _dispatch()

    def make_node(self, *inputs: Variable) -> Apply:
        """Return the node."""
        _dispatch()
        *integers, entries, vector = (pt.as_tensor(i) for i in inputs)
        numbers = [entries.astype("float64"), vector.astype("float64")]
        shape = numbers[1].type.shape
        return Apply(self, [*integers, *numbers], [pt.vector(dtype="float64", shape=shape)])

    def infer_shape(self, node: Apply, shapes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the shape of the vector."""
        return [shapes[-1]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """Return that the matrix counts as constant."""
        return [[False]] * 4 + [[True]]

    def pullback(self, inputs: list[Variable], outputs: list[Variable], slopes: list[Variable]) -> list[Variable]:
        """Return the transpose times the derivative."""
        turned = type(self)(inverted=self.inverted, transposed=not self.transposed)
        return [disconnected_type() for _ in range(4)] + [turned(*inputs[:4], slopes[0])]

    def on_arrays(self, *arrays: Any) -> Array:
        """Return the product."""
        return _compiled(self.inverted, self.transposed)(*arrays)

    def perform(self, node: Apply, inputs: list[Any], storage: list[list[Array | None]]) -> None:
        """Evaluate."""
        storage[0][0] = self.on_arrays(*inputs)


@functools.cache
def _dispatch() -> None:
    """Tell PyTensor how Numba compiles the Op, and JAX calls it."""
    from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_default_op_cache_key

    @register_funcify_default_op_cache_key(SparseTriangular)  # type: ignore[untyped-decorator]
    def _in_numba(op: SparseTriangular, node: Apply, **_: object) -> object:
        return numba_njit(_KERNELS[op.inverted, op.transposed])


@functools.cache
def serve_jax() -> None:
    """Tell PyTensor how JAX evaluates the Op, with its derivative; raise ImportError where there is no JAX."""
    from pytensor.link.jax.dispatch import jax_funcify

    jax_funcify.register(SparseTriangular, _in_jax)


def _in_jax(op: SparseTriangular, **_: object) -> Callable[..., Any]:
    import jax

    turned = SparseTriangular(inverted=op.inverted, transposed=not op.transposed)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def evaluated(*inputs: Any) -> Any:
        return _on_host(op, inputs)

    def forward(*inputs: Any) -> Any:
        return _on_host(op, inputs), inputs[:4]

    def backward(matrix: Any, slope: Any) -> Any:
        return None, None, None, None, _on_host(turned, (*matrix, slope))

    evaluated.defvjp(forward, backward)
    return cast(Callable[..., Any], evaluated)


def _on_host(op: SparseTriangular, inputs: tuple[Any, ...]) -> Any:
    """Return the product as a value of JAX.

    Numbers go to the host and back as their bits: a callback may run in a thread in which JAX is not set to float64.
    """
    import jax

    def on_bits(*arrays: Any) -> NDArray[np.int32]:
        integers = [np.asarray(part, dtype=np.int64) for part in arrays[:3]]
        numbers = [np.ascontiguousarray(part).view(np.float64)[:, 0] for part in arrays[3:]]
        return op.on_arrays(*integers, *numbers)[:, None].view(np.int32)

    *integers, entries, vector = inputs
    bits = [jax.lax.bitcast_convert_type(part, np.int32) for part in (entries, vector)]
    shape = jax.ShapeDtypeStruct(bits[1].shape, np.int32)
    found = jax.pure_callback(on_bits, shape, *integers, *bits, vmap_method="sequential")
    return jax.lax.bitcast_convert_type(found, np.float64)
