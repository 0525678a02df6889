"""Graphs with the operations that models are made of: log densities of PyMC's distributions, and what stands beside."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pytensor import scalar as ps
from pytensor.gradient import grad_undefined
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.graphs.rewrites import rewritten

#: Parameters of distributions, each a number that a vector of unknowns is written for; an int stands for itself.
UNIVARIATE = {
    "AsymmetricLaplace": {"b": 1.0, "kappa": 0.5, "mu": 0.0}, "Beta": {"alpha": 1.0, "beta": 2.0},
    "Cauchy": {"alpha": 0.0, "beta": 1.0}, "ChiSquared": {"nu": 2.0},
    "ExGaussian": {"mu": 0.0, "sigma": 1.0, "nu": 1.0},
    "Exponential": {"lam": 1.0}, "Flat": {}, "Gamma": {"alpha": 2.0, "beta": 1.0}, "Gumbel": {"mu": 0.0, "beta": 1.0},
    "HalfCauchy": {"beta": 1.0}, "HalfFlat": {}, "HalfNormal": {"sigma": 1.0},
    "HalfStudentT": {"nu": 3.0, "sigma": 1.0}, "InverseGamma": {"alpha": 2.0, "beta": 1.0},
    "Kumaraswamy": {"a": 1.0, "b": 2.0}, "Laplace": {"mu": 0.0, "b": 1.0}, "Logistic": {"mu": 0.0, "s": 1.0},
    "LogitNormal": {"mu": 0.0, "sigma": 1.0}, "LogNormal": {"mu": 0.0, "sigma": 1.0},
    "Moyal": {"mu": 0.0, "sigma": 1.0}, "Normal": {"mu": 0.0, "sigma": 1.0}, "Pareto": {"alpha": 1.0, "m": 0.1},
    "Rice": {"nu": 1.0, "sigma": 1.0}, "SkewNormal": {"mu": 0.0, "sigma": 1.0, "alpha": 1.0},
    "SkewStudentT": {"a": 1.0, "b": 2.0, "mu": 0.0, "sigma": 1.0}, "StudentT": {"nu": 3.0, "mu": 0.0, "sigma": 1.0},
    "Triangular": {"lower": 0.0, "upper": 1.0, "c": 0.5},
    "TruncatedNormal": {"mu": 0.0, "sigma": 1.0, "lower": -1.0, "upper": 2.0},
    "Uniform": {"lower": 0.0, "upper": 1.0}, "VonMises": {"mu": 0.0, "kappa": 1.0}, "Wald": {"mu": 1.0, "lam": 1.0},
    "Weibull": {"alpha": 1.0, "beta": 2.0},
    "Bernoulli": {"p": 0.5}, "BetaBinomial": {"n": 5, "alpha": 1.0, "beta": 2.0}, "Binomial": {"n": 5, "p": 0.5},
    "DiscreteUniform": {"lower": 0, "upper": 5}, "DiscreteWeibull": {"q": 0.5, "beta": 0.5}, "Geometric": {"p": 0.5},
    "HyperGeometric": {"N": 10, "k": 5, "n": 3}, "NegativeBinomial": {"mu": 1.0, "alpha": 2.0}, "Poisson": {"mu": 1.0},
    "ZeroInflatedPoisson": {"psi": 0.5, "mu": 1.0},
}  # fmt: skip
#: Distributions that have their own ways to be written down, or no log density.
OTHERS = {
    "Categorical", "Interpolated", "OrderedLogistic", "OrderedProbit", "PolyaGamma", "ZeroInflatedBinomial",
    "ZeroInflatedNegativeBinomial", "HurdleGamma", "HurdleLogNormal", "HurdleNegativeBinomial", "HurdlePoisson",
}  # fmt: skip


def _distribution(name):
    """Return log p of a distribution whose parameters are vectors of unknowns, and these."""
    given = {k: pt.vector(k, shape=(3,)) if isinstance(v, float) else v for k, v in UNIVARIATE[name].items()}
    dist = getattr(pm, name).dist(**given, shape=3)
    value = pt.vector("value", shape=(3,), dtype=dist.type.dtype)
    unknown = [var for var in (*given.values(), value) if not isinstance(var, int) and var.type.dtype == "float64"]
    return pm.logp(dist, value).sum(), unknown


def _model(build):
    """Return log p of a model, and its values."""
    with pm.Model() as model:
        build()
    return model.logp(), model.continuous_value_vars


def _graph(build, shape=(3, 3)):
    """Return what is made of unknowns, added up, and these."""
    unknown = pt.tensor("x", dtype="float64", shape=shape)
    return pt.as_tensor(build(unknown)).sum(), [unknown]


def _covariance():
    pm.LKJCholeskyCov("chol", n=3, eta=1.0, sd_dist=pm.Exponential.dist(1.0))


def _process():
    scale = pm.HalfNormal("scale")
    latent = pm.gp.Latent(cov_func=scale**2 * pm.gp.cov.ExpQuad(1, ls=pm.HalfNormal("length")))
    latent.prior("f", X=np.arange(4.0)[:, None])


def _steps(x):
    return pytensor.scan(
        lambda row, state: pt.tanh(row + state), sequences=[x], outputs_info=[pt.zeros(3)], return_updates=False
    )


INDEX, MATRIX = np.array([0, 2, 1, 0]), np.arange(9.0).reshape(3, 3)
GRAPHS = {
    "multivariate normal": lambda: _model(lambda: pm.MvNormal("x", pm.Normal("m", shape=3), cov=np.eye(3) + 0.1)),
    "unknown covariance": lambda: _model(_covariance),
    "correlations": lambda: _model(lambda: pm.LKJCorr("r", n=3, eta=1.0)),
    "multivariate t": lambda: _model(lambda: pm.MvStudentT("x", nu=3.0, mu=pm.Normal("m", shape=3), scale=np.eye(3))),
    "dirichlet": lambda: _model(lambda: pm.Dirichlet("p", np.ones(3))),
    "multinomial": lambda: _model(
        lambda: pm.Multinomial("y", 6, p=pm.Dirichlet("p", np.ones(3)), observed=np.array([1, 2, 3]))
    ),
    "categorical": lambda: _model(
        lambda: pm.Categorical("y", logit_p=pm.Normal("x", shape=(4, 3)), observed=INDEX)
    ),
    "ordered logistic": lambda: _model(
        lambda: pm.OrderedLogistic("y", pm.Normal("x", shape=4), np.array([-1.0, 1.0]), observed=INDEX)
    ),
    "ordered probit": lambda: _model(
        lambda: pm.OrderedProbit("y", pm.Normal("x", shape=4), np.array([-1.0, 1.0]), observed=INDEX)
    ),
    "interpolated": lambda: _model(lambda: pm.Interpolated("x", np.arange(4.0), np.array([1.0, 2.0, 2.0, 1.0]))),
    "hurdle": lambda: _model(
        lambda: pm.HurdleNegativeBinomial("y", pm.Beta("psi", 1, 1), 2.0, 1.0, observed=INDEX)
    ),
    "mixture": lambda: _model(
        lambda: pm.NormalMixture("y", pm.Dirichlet("w", np.ones(2)), mu=pm.Normal("m", shape=2), observed=MATRIX[0])
    ),
    "censored": lambda: _model(
        lambda: pm.Censored("y", pm.Normal.dist(pm.Normal("m"), 1.0), -1.0, 2.0, observed=MATRIX[0])
    ),
    "truncated": lambda: _model(
        lambda: pm.Truncated("y", pm.Gamma.dist(pm.HalfNormal("a"), 1.0), upper=9.0, observed=1.0 + MATRIX[0])
    ),
    "random walk": lambda: _model(
        lambda: pm.GaussianRandomWalk("x", sigma=pm.HalfNormal("s"), init_dist=pm.Normal.dist(), steps=4)
    ),
    "autoregression": lambda: _model(
        lambda: pm.AR("x", pm.Normal("rho", shape=2), sigma=1.0, init_dist=pm.Normal.dist(shape=2), steps=4)
    ),
    "conditional autoregression": lambda: _model(
        lambda: pm.CAR("x", np.zeros(3), np.ones((3, 3)) - np.eye(3), pm.Beta("a", 1, 1), 1.0)
    ),
    "intrinsic autoregression": lambda: _model(lambda: pm.ICAR("x", np.ones((3, 3)) - np.eye(3))),
    "zero-sum normal": lambda: _model(lambda: pm.ZeroSumNormal("x", shape=3)),
    "stick breaking": lambda: _model(lambda: pm.StickBreakingWeights("w", 1.0, 3)),
    "wishart": lambda: _graph(lambda x: pm.logp(pm.Wishart.dist(4, np.eye(3)), x)),
    "matrix normal": lambda: _model(
        lambda: pm.MatrixNormal("x", mu=np.zeros((2, 2)), rowcov=np.eye(2), colcov=np.eye(2))
    ),
    "kronecker normal": lambda: _model(lambda: pm.KroneckerNormal("x", np.zeros(4), covs=[np.eye(2), np.eye(2)])),
    "gaussian process": lambda: _model(_process),
    "scan": lambda: _graph(_steps),
    "dot": lambda: _graph(lambda x: x @ x),
    "known matrix": lambda: _graph(lambda x: pt.dot(MATRIX, x)),
    "batch of products": lambda: _graph(lambda x: pt.matmul(x, x), (2, 3, 3)),
    "einsum": lambda: _graph(lambda x: pt.einsum("ij,kj->ik", x, x)),
    "softmax": lambda: _graph(lambda x: pt.special.softmax(x, axis=1) + pt.special.log_softmax(x, axis=0)),
    "log of a sum of exponentials": lambda: _graph(lambda x: pt.logsumexp(x, axis=0)),
    "cumulative": lambda: _graph(lambda x: pt.cumsum(x, axis=0) * pt.cumprod(x, axis=1)),
    "solve": lambda: _graph(lambda x: pt.linalg.solve(x, x)),
    "solve triangular": lambda: _graph(lambda x: pt.linalg.solve_triangular(x, x[0], lower=True)),
    "cholesky": lambda: _graph(lambda x: pt.linalg.cholesky(x @ x.T)),
    "determinant": lambda: _graph(lambda x: pt.linalg.det(x) + pt.linalg.slogdet(x)[1]),
    "inverse": lambda: _graph(pt.linalg.inv),
    "eigenvalues": lambda: _graph(lambda x: pt.linalg.eigh(x + x.T)[0]),
    "exponential of a matrix": lambda: _graph(pt.linalg.expm),
    "indexed": lambda: _graph(lambda x: x[INDEX] + x[1:2].T[0, 0] + x[INDEX, INDEX][:, None]),
    "set and added to": lambda: _graph(lambda x: pt.set_subtensor(x[0], 1.0) + pt.inc_subtensor(x[INDEX], 1.0)),
    "joined": lambda: _graph(lambda x: pt.concatenate([x, x.reshape((9,))[:3][None]]) + pt.repeat(x[0], 4)[:3]),
    "stacked": lambda: _graph(lambda x: pt.stack([x[0, 0], x[1, 1]])),
    "diagonal": lambda: _graph(lambda x: pt.diagonal(x) + pt.diag(x[0])),
    "split": lambda: _graph(lambda x: pt.split(x, [1, 2], n_splits=2)[1]),
    "largest": lambda: _graph(lambda x: pt.max(x, axis=0) + pt.min(x) + pt.argmax(x, axis=0)),
    "sorted": lambda: _graph(lambda x: pt.sort(x, axis=0)),
    "product": lambda: _graph(lambda x: pt.prod(x, axis=0)),
    "chosen": lambda: _graph(lambda x: pt.switch(x > 0, x, pt.clip(x, -1.0, 1.0))),
    "minibatch size": lambda: _graph(lambda x: x * x.shape[0]),
    "convolution": lambda: _graph(lambda x: pt.signal.convolve1d(x[0], x[1])),
}  # fmt: skip
GRAPHS |= {name: (lambda name=name: _distribution(name)) for name in UNIVARIATE}


class _Op(Op):
    itypes = (pt.dscalar,)
    otypes = (pt.dscalar,)

    def make_node(self, x):
        return Apply(self, [pt.as_tensor(x)], [pt.dscalar()])


class PlainSquare(_Op):
    """x^2, without a gradient."""

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = np.asarray(inputs[0] ** 2)


class PlainIdentity(_Op):
    """x, without a gradient."""

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = np.asarray(inputs[0])


class OnceDifferentiableSquare(PlainSquare):
    """x^2, whose gradient has none."""

    def pullback(self, inputs, outputs, cotangents):
        return [2.0 * cotangents[0] * PlainIdentity()(inputs[0])]


class UndefinedGradient(PlainSquare):
    """x^2, with a gradient that says it is undefined."""

    def pullback(self, inputs, outputs, cotangents):
        return [grad_undefined(self, 0, inputs[0])]


class Wobble(ps.UnaryScalarOp):
    """A scalar Op for which NumPy has no function."""

    nfunc_spec = None

    def impl(self, x):
        return np.sin(x)

    def pullback(self, inputs, outputs, output_gradients):
        return [output_gradients[0] * ps.cos(inputs[0])]


wobble = Elemwise(Wobble(ps.upgrade_to_float, name="wobble"))


@node_rewriter([Elemwise])
def _as_branches(fgraph, node):
    scalar_op = node.op.scalar_op
    if isinstance(scalar_op, ps.ScalarMaximum | ps.ScalarMinimum):
        x, y = node.inputs
        is_first = pt.ge(x, y) if isinstance(scalar_op, ps.ScalarMaximum) else pt.le(x, y)
        return [pt.switch(is_first, x, y)]
    if isinstance(scalar_op, ps.Clip):
        x, low, high = node.inputs
        return [pt.switch(pt.lt(x, low), low, pt.switch(pt.gt(x, high), high, x))]
    return None


def with_branches(outputs):
    """Write maxima, minima and clipped values as branches, whose second derivatives PyTensor has right."""
    return rewritten(outputs, dfs_rewriter(_as_branches))
