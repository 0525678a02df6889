"""Which free variables of a model each variable of its graph is made of, and what they are multiplied by."""

import functools

from collections import defaultdict
from collections.abc import Sequence

import pymc as pm
import pytensor.scalar as ps

from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import Join, MakeVector
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_ngvi.ops.elements import core_op

#: Place of the scale among the parameters of distributions of location and scale, by the name of their Op.
_SCALE_AT = {
    "NormalRV": 1,
    "LogNormalRV": 1,
    "LaplaceRV": 1,
    "CauchyRV": 1,
    "LogisticRV": 1,
    "GumbelRV": 1,
    "HalfNormalRV": 1,
    "HalfCauchyRV": 1,
    "SkewNormalRV": 1,
    "TruncatedNormalRV": 1,
    "MvNormalRV": 1,
    "StudentTRV": 2,
    "MvStudentTRV": 2,
}
#: Ops whose output holds elements of an input as they are.
_MOVING = (
    AdvancedSubtensor, DeepCopyOp, DimShuffle, Join, JoinDims, MakeVector, Reshape, SpecifyShape, SplitDims, Subtensor,
    ViewOp,
)  # fmt: skip
_INDEXING = (AdvancedSubtensor, Subtensor)
_COPIES = (ps.Identity, ps.Cast)


class Lineage:
    """Answers what in a model is made of what; free variables are known by name."""

    def __init__(self, model: pm.Model) -> None:
        self.model = model
        self.free = {rv.name: rv for rv in model.free_RVs}
        self._names = list(self.free)
        self._bit = {rv: 1 << i for i, rv in enumerate(model.free_RVs)}
        self._outputs = [*model.observed_RVs, *model.potentials, *model.deterministics, *model.free_RVs]
        self._nodes = list(toposort(self._outputs))
        self._products: set[Variable] = set()
        self._masks = self._all_masks({})
        self._clients: dict[Variable, list[Apply]] = defaultdict(list)
        for node in self._nodes:
            for var in set(node.inputs):
                self._clients[var].append(node)

    def _all_masks(self, fixed: dict[Variable, int]) -> dict[Variable, int]:
        """Return which free variables each variable is made of, as bits; ``fixed`` says it for some."""
        masks: dict[Variable, int] = dict(self._bit)
        for node in self._nodes:
            mask = 0 if isinstance(node.op, Shape | Shape_i) else self._of_inputs(node, masks)
            for out in node.outputs:
                masks[out] = fixed.get(out, self._bit.get(out, mask))
        return masks

    @staticmethod
    def _of_inputs(node: Apply, masks: dict[Variable, int]) -> int:
        return functools.reduce(lambda mask, var: mask | masks.get(var, 0), node.inputs, 0)

    def _named(self, mask: int) -> set[str]:
        return {name for i, name in enumerate(self._names) if mask >> i & 1}

    def parents(self, var: Variable) -> set[str]:
        """Return the free variables that a variable is computed from."""
        return self._named(self._masks.get(var, 0))

    def is_from(self, name: str, free: set[str]) -> bool:
        """Tell whether a variable of the model is computed from some of these free ones, and from no others."""
        of = self.parents(self.model[name])
        return bool(of) and of <= free

    @functools.cache  # noqa: B019  (lives as long as the search for roles)
    def ancestors(self, name: str) -> frozenset[Variable]:
        """Return all variables that one of the model is computed from, through priors, too."""
        return frozenset(ancestors([self.model[name]]))

    # --- priors ---

    def prior(self, rv: Variable) -> set[str]:
        """Return the free variables in the prior of one."""
        return self._named(self._of_inputs(rv.owner, self._masks)) if rv.owner is not None else set()

    def prior_scales(self, rv: Variable) -> set[str]:
        """Return the free variables in the scale of the prior of one; none where the prior has no such parameter."""
        if self.sums_to_zero(rv):
            return self.prior(rv)
        params, name = _parameters(rv)
        place = _SCALE_AT.get(name)
        return set() if place is None or place >= len(params) else self.parents(params[place])

    def sums_to_zero(self, rv: Variable) -> bool:
        """Tell whether a variable is a ZeroSumNormal over one axis."""
        op: Op = getattr(rv.owner, "op", None)
        return type(op).__name__ == "ZeroSumNormalRV" and getattr(op, "ndim_supp", 0) == 1

    def is_packed_cholesky(self, name: str) -> bool:
        """Tell whether a free variable is a Cholesky factor, packed to a vector."""
        rv = self.free.get(name)
        return rv is not None and "LKJCholesky" in type(rv.owner.op).__name__

    def is_missing_data(self, rv: Variable) -> bool:
        """Tell whether a free variable is the missing part of an observed one."""
        whole = rv.name.removesuffix("_unobserved")
        return whole != rv.name and whole in self.model.named_vars and f"{whole}_observed" in self.model.named_vars

    # --- what a variable is used for ---

    def multipliers(self, rv: Variable) -> set[str]:
        """Return the free variables in what multiplies a free variable before anything is added to it.

        None where it has a prior with parameters, or does not range over all real numbers.
        """
        if self.prior(rv) or not self._is_real(rv):
            return set()
        products = self._products_of(rv)
        self._products.update(products)
        return self._named(functools.reduce(lambda mask, out: mask | products[out], products, 0))

    def is_standardised(self, rv: Variable) -> bool:
        """Tell whether an array of standard normals is multiplied by parameters: effects relative to their scale."""
        params, name = _parameters(rv)
        constants = [_constant(p) for p in params]
        standard = (name == "NormalRV" and constants == [0.0, 1.0]) or (
            self.sums_to_zero(rv) and constants[:1] == [1.0]
        )
        return standard and rv.type.ndim > 0 and bool(self.multipliers(rv))

    def is_latent_trait(self, rv: Variable) -> bool:
        """Tell whether a standard normal vector is multiplied by other vectors, as abilities by discriminations."""
        params, name = _parameters(rv)
        standard = name == "NormalRV" and [_constant(p) for p in params] == [0.0, 1.0]
        if not standard or not self._is_real(rv) or rv.type.ndim != 1:
            return False
        others = self._named(functools.reduce(int.__or__, self._products_of(rv, added=True).values(), 0))
        return any(self.free[name].type.ndim > 0 for name in others)

    def is_indexed(self, rv: Variable) -> bool:
        """Tell whether levels of a variable are picked, as by observations."""
        return any(isinstance(node.op, AdvancedSubtensor) for node in self._ways(rv))

    def used_elsewhere(self, effects: set[str]) -> set[str]:
        """Return the free variables that the data, potentials or priors depend on other than through some effects."""
        own = functools.reduce(lambda mask, name: mask | self._bit[self.free[name]], effects, 0)
        fixed = {out: self._masks[out] & own for out in self._products if self._masks[out] & own}
        masks = self._all_masks(fixed)
        mask = 0
        for var in [*self.model.observed_RVs, *self.model.potentials, *self.model.free_RVs]:
            if var.owner is not None and var.name not in effects:
                # A free variable stands for itself: what its prior depends on counts, and is among the inputs.
                random = var in self._bit or var in self.model.observed_RVs
                mask |= self._of_inputs(var.owner, masks) if random else masks[var]
        return self._named(mask) - effects

    def _is_real(self, rv: Variable) -> bool:
        return self.model.rvs_to_transforms.get(rv) is None or self.sums_to_zero(rv)

    def _ways(self, rv: Variable, *, added: bool = False) -> list[Apply]:
        """Return the nodes that a variable reaches with its elements moved, or multiplied by data, or added to."""
        found, stack, seen = [], [rv], set()
        while stack:
            var = stack.pop()
            for node in self._clients[var]:
                if node in seen:
                    continue
                seen.add(node)
                found.append(node)
                if self._passes(node, var, added):
                    stack.extend(node.outputs)
        return found

    def _passes(self, node: Apply, var: Variable, added: bool) -> bool:
        scalar_op = getattr(node.op, "scalar_op", None)
        if isinstance(core_op(node.op), _MOVING):
            return not isinstance(node.op, _INDEXING) or var is node.inputs[0]
        if not isinstance(node.op, Elemwise) and type(node.op).__name__ != "XElemwise":
            return False
        if added and isinstance(scalar_op, ps.Add | ps.Sub | ps.Neg):
            return True
        others = [i for i in node.inputs if i is not var]
        data = isinstance(scalar_op, ps.Mul | ps.TrueDiv) and not any(self._masks.get(i, 0) for i in others)
        return data or isinstance(scalar_op, _COPIES)

    def _products_of(self, rv: Variable, *, added: bool = False) -> dict[Variable, int]:
        """Return the products of a variable with what is made of other free variables, and which these are."""
        products = {}
        for node in self._ways(rv, added=added):
            scalar_op = getattr(node.op, "scalar_op", None)
            multiplies = isinstance(scalar_op, ps.Mul | ps.TrueDiv) and not isinstance(node.op, CAReduce)
            if multiplies or isinstance(core_op(node.op), Dot) or type(core_op(node.op)).__name__ == "Einsum":
                others = [self._masks.get(i, 0) for i in node.inputs if not self._masks.get(i, 0) & self._bit[rv]]
                mask = functools.reduce(int.__or__, others, 0)
                if mask:
                    products[node.outputs[0]] = mask
        return products


def top_level_priors(model: pm.Model, names: Sequence[str]) -> list[str]:
    """Return those of some free variables that have a prior of their own, or all where none has.

    Others are part of what the model says given these: their prior has parameters, they are effects relative to their
    scale, or missing data.
    """
    lineage = Lineage(model)
    own = [
        name
        for name in names
        if not (
            lineage.prior(model[name]) or lineage.is_standardised(model[name]) or lineage.is_missing_data(model[name])
        )
    ]
    return own or list(names)


def _parameters(rv: Variable) -> tuple[list[Variable], str]:
    """Return the parameters of the distribution of a random variable, and the name of its Op."""
    op: Op = getattr(rv.owner, "op", None)
    name = type(getattr(op, "core_op", op)).__name__  # distributions of pymc.dims have the plain one inside
    try:
        return list(op.dist_params(rv.owner)), name
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return [], name


def _constant(var: Variable) -> float | None:
    """Return the number that a parameter is, if it is one, whatever its number of axes."""
    while var.owner is not None and isinstance(var.owner.op, DimShuffle):
        var = var.owner.inputs[0]
    return float(var.data) if isinstance(var, Constant) and var.data.size == 1 else None
