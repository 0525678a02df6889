"""Any `VariationalState` as one of PyMC's variational groups: PyTensor nodes that follow its parameters."""

import contextlib
import functools
import warnings

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.variational.opvi import Group, node_property
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.variable import TensorVariable
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.core.sizes import check_cov_size
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.density import Layout

_node_property: Callable[[Callable[[Any], Any]], Any] = node_property


@functools.cache
def _support_numba() -> None:
    """Make Numba run our Ops by calling back to Python, without the warning that PyTensor gives for unknown Ops."""
    with contextlib.suppress(ImportError):
        # 0.6 s to import: only once a graph is asked for.
        from pytensor.link.numba.dispatch import basic

        def funcify(op: Op, node: Apply, **_: object) -> object:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Numba will use object mode", UserWarning)
                return basic.generate_fallback_impl(op, node)

        basic.numba_funcify.register(_StateOp, funcify)


class _Current:
    """The q of some arrays: a new one only where they are others than those of the last one."""

    def __init__(self, q: VariationalState) -> None:
        self.take(q)

    def take(self, q: VariationalState) -> None:
        """Take another q."""
        # Contiguous and writeable, as compiled functions are specialised to them.
        self.q, self.arrays = q, {name: np.require(a, requirements=["C", "W"]) for name, a in q.params().items()}

    def of(self, arrays: Mapping[str, Array]) -> VariationalState:
        """Return the q of these arrays."""
        if not all(arrays[name] is a or np.array_equal(arrays[name], a) for name, a in self.arrays.items()):
            self.q, self.arrays = self.q.from_params(dict(arrays)), dict(arrays)
        return self.q


class _StateOp(Op):
    """Of the arrays that define a state: draws, given base draws, or its method ``mean``, ``sd`` or ``cov``."""

    __props__ = ("current", "names", "n_dim", "what")

    def __init__(self, current: _Current, names: tuple[str, ...], n_dim: int, what: str) -> None:
        self.current, self.names, self.n_dim, self.what = current, names, n_dim, what

    def make_node(self, *inputs: TensorVariable) -> Apply:
        _support_numba()
        shape = {"draws": (None, self.n_dim), "cov": (self.n_dim, self.n_dim)}.get(self.what, (self.n_dim,))
        return Apply(self, [pt.as_tensor(i) for i in inputs], [pt.TensorType("float64", shape=shape)()])

    def perform(self, node: Apply, inputs: Sequence[Array], output_storage: list[list[Array | None]]) -> None:
        n_points = len(inputs) - len(self.names)
        state = self.current.of(dict(zip(self.names, inputs[n_points:], strict=True)))
        is_draws = self.what == "draws"
        result = _draws(state, np.asarray(inputs[0], dtype=np.float64)) if is_draws else getattr(state, self.what)()
        # A copy: moments may be the state's own arrays, and PyTensor may work in place on what it is given.
        output_storage[0][0] = np.array(result, dtype=np.float64, order="C")


def _draws(state: VariationalState, base: Array) -> Array:
    """Return draws of q. A row with a NaN stands for the mean: what "deterministic" draws are."""
    at_mean = np.isnan(base).any(axis=1)
    if not at_mean.any():
        return state.draws(base)
    result = np.empty((len(base), state.n_dim))
    result[at_mean], result[~at_mean] = state.mean(), state.draws(base[~at_mean])
    return result


class NGVIGroup(Group):
    """All free variables of a model as one PyMC variational group with any `VariationalState` as q.

    The order of the variables is the layout's. The group is for `NGVIApproximation`; it is not registered with PyMC.
    """

    short_name = "ngvi"
    # NaN marks a "deterministic" base draw: zeros would not give the mean of a mixture.
    initial_dist_map = np.nan

    def __init__(
        self,
        layout: Layout,
        q: VariationalState,
        *,
        model: pm.Model,
        random_seed: int | None = None,
    ) -> None:
        if q.n_dim != layout.n_dim:
            raise ValueError(f"q has {q.n_dim} dimensions, but the free variables of the model have {layout.n_dim}.")
        self.layout = layout
        self.state_class = type(q)
        self.n_uniform = q.n_uniform
        self._current = _Current(q)
        free = {rv.name: rv for rv in model.free_RVs}
        super().__init__([free[v.name] for v in layout.variables], model=model, random_seed=random_seed)

    def __init_group__(self, group: list[TensorVariable]) -> None:
        """Make the symbolic inputs; shapes and order come from the layout, so that no initial point is compiled."""
        self.input = self._input_type("NGVIGroup_symbolic_input")
        for rv, v in zip(group, self.layout.variables, strict=True):
            value = self.model.rvs_to_values[rv]
            if value.name != v.value_name:
                raise ValueError(
                    f"The layout calls the value of {rv.name!r} {v.value_name!r}, the model {value.name!r}."
                )
            dtype = value.type.dtype
            part = self.input[v.where].reshape(v.shape).astype(dtype)
            if isinstance(value.type, XTensorType):
                part = as_xtensor(part, dims=value.type.dims)
            part.name = f"{value.name}_vi_replacement"
            self.replacements[value] = part
            self.ordering[value.name] = (value.name, v.where, v.shape, dtype)
        self.symbolic_initial = pt.matrix("NGVIGroup_symbolic_initial_tensor", shape=(None, self.ddim + self.n_uniform))
        self.shared_params = {
            name: pytensor.shared(array, name, borrow=True) for name, array in self._current.arrays.items()
        }
        self._finalize_init()

    def holds(self, q: VariationalState) -> bool:
        """Tell whether ``q`` is of the class that nodes were made of, with the same parameters."""
        return type(q) is self.state_class and q.params().keys() == self.shared_params.keys()

    def set_state(self, q: VariationalState) -> None:
        """Put the parameters of ``q`` in place of the current ones; compiled functions see them."""
        self._current.take(q)
        for name, array in self._current.arrays.items():
            self.shared_params[name].set_value(array, borrow=True)

    def current_state(self) -> VariationalState:
        """Return q, made anew where the user has set other values in `params`."""
        return self._current.of({name: p.get_value(borrow=True) for name, p in self.shared_params.items()})

    def _new_initial(
        self, size: TensorVariable, deterministic: bool, more_replacements: dict[Variable, Variable] | None = None
    ) -> TensorVariable:
        """Return base draws: PyMC's normals and, after them, the uniforms of q."""
        normals = super()._new_initial(size, deterministic, more_replacements)
        if not self.n_uniform:
            return normals
        shape = pt.stack([normals.shape[0], pt.constant(self.n_uniform, dtype="int64")])
        _, uniforms = pt.random.uniform(size=shape, rng=pt.random.shared_rng(seed=None), return_next_rng=True)
        return pt.concatenate([normals, uniforms.astype(normals.dtype)], axis=1)

    def _apply(self, what: str, *points: TensorVariable) -> TensorVariable:
        op = _StateOp(self._current, tuple(self.shared_params), self.ddim, what)
        return op(*points, *self.shared_params.values())

    @_node_property
    def symbolic_random(self) -> TensorVariable:
        """Symbolic draws of q, (n_draws, n_dim), as a function of ``symbolic_initial``."""
        return self._apply("draws", self.symbolic_initial).astype(self.symbolic_initial.dtype)

    @_node_property
    def mean(self) -> TensorVariable:
        """Mean, (n_dim,), unconstrained."""
        return self._apply("mean")

    @_node_property
    def std(self) -> TensorVariable:
        """Marginal standard deviations, (n_dim,), unconstrained."""
        return self._apply("sd")

    @_node_property
    def cov(self) -> TensorVariable:
        """Covariance, (n_dim, n_dim), unconstrained."""
        check_cov_size(self.ddim)
        return self._apply("cov")
