"""Linear maps as graphs: their arrays are shared variables, so that maps of one form are compiled once."""

import functools

from collections.abc import Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor.graph.basic import Variable

from pymc_ngvi.core.linear_maps import DenseTriangle, LinearMap, Scaled, SparseTriangle, Stretched
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs.triangles import SparseTriangular


def mapped(maps: Sequence[LinearMap], vector: Variable) -> Variable:
    """Return what maps, one after the other, make of a vector, (n_dim,)."""
    for step in maps:
        vector = _mapped(step, vector)
    return vector


def held(array: AnyArray) -> Variable:
    """Return an array as a shared variable of fixed shape."""
    return pytensor.shared(np.array(array, order="C"), shape=array.shape, borrow=True)


@functools.singledispatch
def _mapped(step: LinearMap, vector: Variable) -> Variable:
    raise NotImplementedError(f"no graph of {type(step).__name__}")


@_mapped.register
def _(step: Scaled, vector: Variable) -> Variable:
    return held(step.scale) * vector


@_mapped.register
def _(step: DenseTriangle, vector: Variable) -> Variable:
    if not step.inverted:
        return pt.dot(held(step.matrix), vector)
    upper = held(np.ascontiguousarray(step.matrix.T))
    return pt.linalg.solve_triangular(upper, vector, lower=False, b_ndim=1)


@_mapped.register
def _(step: SparseTriangle, vector: Variable) -> Variable:
    matrix = [held(part) for part in (step.order, step.starts, step.rows, step.entries)]
    return SparseTriangular(inverted=step.inverted, transposed=step.inverted)(*matrix, vector)


@_mapped.register
def _(step: Stretched, vector: Variable) -> Variable:
    axes, core = held(step.axes), held(step.core)
    return vector + pt.dot(axes, pt.dot(core, pt.dot(axes.T, vector)))
