"""Small PyMC models for the tests of the model layer: each makes a fresh model, with data from a fixed seed.

Constants are not representable in float32: PyTensor holds those that are (2.0) in single precision, and PyMC's own
log densities then lose half of the digits that the tests compare.
"""

import functools
import warnings

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.pytensorf import compile as pymc_compile
from pytensor.compile.inner_function import HasInnerFunction
from pytensor.graph.op import HasInnerGraph
from pytensor.tensor.elemwise import CAReduce, Elemwise

from pymc_ngvi.graphs.backends import python_loops

N_OBS = 7


def _design(n_columns=2):
    return np.random.default_rng(20).normal(size=(N_OBS, n_columns))


def bernoulli_logit():
    x, y = _design(), np.array([0, 1, 1, 0, 1, 0, 1])
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.6, 3.1)
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        pm.Bernoulli("y", logit_p=intercept + x @ slope, observed=y)
    return model


def poisson_log_link():
    x, y = _design(), np.array([0, 3, 1, 0, 12, 2, 5])
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 1.1, 2.1)
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        pm.Poisson("y", mu=pt.exp(intercept + x @ slope), observed=y)
    return model


def negative_binomial():
    x, y = _design(), np.array([0, 3, 1, 0, 40, 2, 5])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        alpha = pm.Gamma("alpha", 2.1, 0.6)
        pm.NegativeBinomial("y", mu=pt.exp(x @ slope), alpha=alpha, observed=y)
    return model


def beta_precision():
    x, y = _design(), np.array([0.02, 0.3, 0.51, 0.6, 0.9, 0.99, 0.4])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        precision = pm.HalfNormal("precision", 5.1)
        mean = pm.math.sigmoid(x @ slope)
        pm.Beta("y", alpha=mean * precision, beta=(1.0 - mean) * precision, observed=y)
    return model


def beta_prior():
    with pm.Model() as model:
        p = pm.Beta("p", 2.1, 3.6)
        pm.Binomial("y", n=9, p=p, observed=4)
    return model


def gamma_log_link():
    x, y = _design(), np.array([0.01, 0.7, 1.3, 2.2, 9.1, 0.4, 5.6])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        shape = pm.Gamma("shape", 2.1, 1.1)
        pm.Gamma("y", alpha=shape, beta=shape / pt.exp(x @ slope), observed=y)
    return model


def student_t():
    x, y = _design(), np.array([0.1, -0.7, 1.3, 2.2, -40.1, 0.4, 5.6])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        sigma = pm.HalfNormal("sigma", 2.1)
        nu = pm.Gamma("nu", 2.1, 0.1)
        pm.StudentT("y", nu=nu, mu=x @ slope, sigma=sigma, observed=y)
    return model


def ordered_logistic():
    x, y = _design(1)[:, 0], np.array([0, 3, 1, 2, 2, 1, 0])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1)
        cut = pm.Normal(
            "cut", 0.1, 3.1, shape=3, transform=pm.distributions.transforms.ordered, initval=np.array([-1.1, 0.1, 1.2])
        )
        pm.OrderedLogistic("y", eta=x * slope, cutpoints=cut, observed=y, compute_p=False)
    return model


def categorical_softmax():
    x, y = _design(), np.array([0, 2, 1, 2, 2, 1, 0])
    with pm.Model() as model:
        weights = pm.Normal("weights", 0.1, 2.1, shape=(2, 3))
        pm.Categorical("y", logit_p=x @ weights, observed=y)
    return model


#: Likelihoods whose log density over- or underflows when it is written down naively.
STABILITY = {
    "bernoulli": bernoulli_logit,
    "poisson": poisson_log_link,
    "negative_binomial": negative_binomial,
    "beta": beta_precision,
    "beta_prior": beta_prior,
    "gamma": gamma_log_link,
    "student_t": student_t,
    "ordered": ordered_logistic,
    "categorical": categorical_softmax,
}


def beta_precision_stable():
    """`beta_precision` with 1 - sigmoid(x) as sigmoid(-x)."""
    x, y = _design(), np.array([0.02, 0.3, 0.51, 0.6, 0.9, 0.99, 0.4])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        precision = pm.HalfNormal("precision", 5.1)
        a, b = precision * pm.math.sigmoid(x @ slope), precision * pm.math.sigmoid(-(x @ slope))
        pm.Beta("y", alpha=a, beta=b, observed=y)
    return model


def gamma_log_link_stable():
    """`gamma_log_link` in terms of logarithms."""
    x, y = _design(), np.array([0.01, 0.7, 1.3, 2.2, 9.1, 0.4, 5.6])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        shape = pm.Gamma("shape", 2.1, 1.1)
        log_rate = pt.log(shape) - x @ slope
        terms = shape * log_rate - pt.exp(log_rate + np.log(y)) - pt.gammaln(shape) + (shape - 1.0) * np.log(y)
        pm.Potential("y", terms)
    return model


def ordered_logistic_stable():
    """`ordered_logistic` without differences of cumulative probabilities."""
    x, y = _design(1)[:, 0], np.array([0, 3, 1, 2, 2, 1, 0])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1)
        cut = pm.Normal(
            "cut", 0.1, 3.1, shape=3, transform=pm.distributions.transforms.ordered, initval=np.array([-1.1, 0.1, 1.2])
        )
        distance = pt.exp(model.rvs_to_values[cut])  # of a cut from the one before
        terms = []
        for x_i, k in zip(x, y, strict=True):
            # sigmoid(high) - sigmoid(low) = sigmoid(high) sigmoid(-low) (1 - exp(low - high))
            above = -pt.softplus(x_i * slope - cut[k]) if k < 3 else 0.0
            below = -pt.softplus(cut[k - 1] - x_i * slope) if k > 0 else 0.0
            between = pt.log(-pt.expm1(-distance[k])) if 0 < k < 3 else 0.0
            terms.append(above + below + between)
        pm.Potential("y", sum(terms))
    return model


#: Likelihoods of STABILITY that lose digits as PyMC writes them, written so that they don't; same value variables.
STABLE_FORMS = {
    "beta": beta_precision_stable,
    "gamma": gamma_log_link_stable,
    "ordered": ordered_logistic_stable,
}


def imputed():
    y = np.ma.masked_invalid([1.1, np.nan, 2.3, np.nan, 0.3])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.1, 2.3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Data in y contains missing values")
            pm.Normal("y", mu, 1.3, observed=y)
    return model


def zero_sum_normal():
    with pm.Model() as model:
        z = pm.ZeroSumNormal("z", 1.3, shape=4)
        pm.Normal("y", z, 1.1, observed=[0.1, 0.2, 0.4, -1.3])
    return model


def gaussian_random_walk():
    with pm.Model() as model:
        sigma = pm.HalfNormal("sigma", 1.1)
        z = pm.GaussianRandomWalk("z", 0.1, sigma, init_dist=pm.Normal.dist(0.1, 2.2), shape=5)
        pm.Normal("y", z, 1.1, observed=[0.1, 0.2, 0.3, 0.4, 0.9])
    return model


def scan_ar1(n_steps=6):
    """Latent AR(1) process by a scan over its innovations."""
    with pm.Model() as model:
        rho = pm.Uniform("rho", -1.1, 1.1)
        sigma = pm.HalfNormal("sigma", 1.3)
        noise = pm.Normal("noise", 0.1, 1.2, shape=n_steps)
        z = pytensor.scan(
            lambda e, before, rho, sigma: rho * before + sigma * e,
            sequences=[noise],
            outputs_info=[pt.as_tensor(0.1)],
            non_sequences=[rho, sigma],
            return_updates=False,
        )
        pm.Normal("y", z, 1.1, observed=np.sin(np.arange(n_steps)))
    return model


def lkj_cholesky():
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=3, eta=2.1, sd_dist=pm.Exponential.dist(1.1))
        pm.MvNormal("y", np.zeros(3), chol=chol, observed=np.random.default_rng(21).normal(size=(4, 3)))
    return model


def mixture():
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        weights = pm.Dirichlet("weights", np.array([1.1, 1.2]))
        mu = pm.Normal("mu", 0.1, 2.1, shape=2, transform=ordered, initval=[-1.1, 1.2])
        pm.NormalMixture("y", weights, mu, sigma=np.array([1.1, 0.7]), observed=[0.1, 0.4, -0.2, 2.6])
    return model


def potential():
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("p", -pt.sum((x - np.array([1.6, 0.2])) ** 4) + x[0] * x[1])
    return model


def gaussian_process():
    x = np.linspace(0.0, 1.0, 5)[:, None]
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1.1)
        process = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, scale))
        process.marginal_likelihood("y", x, np.array([0.1, 0.3, 0.2, 0.7, 0.1]), sigma=0.3)
    return model


def zero_inflated():
    with pm.Model() as model:
        mu = pm.HalfNormal("mu", 1.1)
        psi = pm.Beta("psi", 1.1, 1.2)
        pm.ZeroInflatedPoisson("y", psi, mu, observed=[0, 0, 3, 1])
    return model


def zero_size():
    """Variables with no entries before, between and after others."""
    with pm.Model() as model:
        pm.Normal("none", 0.1, 1.1, shape=0)
        a = pm.Normal("a", 0.1, 1.1)
        pm.Normal("no_rows", 0.1, 1.1, shape=(2, 0))
        b = pm.HalfNormal("b", 1.3, shape=(2, 1))
        pm.HalfNormal("nil", 1.3, shape=(0, 3))
        pm.Normal("y", a * b[:, 0], 1.2, observed=[0.3, -0.4])
    return model


def transformed():
    """One variable of each common transform, named against the alphabet, with shapes that transforms change."""
    with pm.Model(coords={"row": ["a", "b"], "column": [10, 20, 30]}) as model:
        pm.Normal("z", 0.3, 1.1, dims=("row", "column"))
        pm.HalfNormal("scale", 1.3, dims="row")
        pm.Dirichlet("part", np.array([1.1, 2.2, 3.3]), dims="column")
        pm.Uniform("edge", -1.1, 2.3)
        pm.Beta("beta", 1.6, 2.4, shape=(1, 2))
        pm.Normal("any", model["edge"], model["scale"], observed=[0.3, -0.6])
    return model


#: One model for each feature of PyMC that changes how the log density is put together.
FEATURES = {
    "imputed": imputed,
    "zero_sum": zero_sum_normal,
    "random_walk": gaussian_random_walk,
    "scan": scan_ar1,
    "lkj": lkj_cholesky,
    "mixture": mixture,
    "potential": potential,
    "gp": gaussian_process,
    "zero_inflated": zero_inflated,
    "zero_size": zero_size,
    "transformed": transformed,
}


def random_points(density, n_points, seed, scale=0.3):
    """Draw points near the initial point."""
    return density.initial_point() + scale * np.random.default_rng(seed).normal(size=(n_points, density.n_dim))


def compiled(density, *names):
    """Return the compiled PyTensor functions behind ``logp``, ``logp_grad`` or ``products``."""
    makers = {"products": lambda: density.second.compiled(), "squares": lambda: density.by_observation.squares()}
    functions = density.functions
    made = [
        functions.once(name, makers.get(name) or functools.partial(density.compiled, name))
        for name in names or ("logp_grad", "products")
    ]
    return [getattr(function, "function", function) for function in made]


def all_nodes(nodes):
    """Yield the nodes of a compiled graph and of the graphs inside it: Scan, Blockwise, log-sum-exp, Composite."""
    for node in nodes:
        yield node
        op = getattr(node.op, "core_op", node.op)
        if isinstance(op, HasInnerFunction):  # what runs, not what was to be compiled
            yield from all_nodes(op.fn.maker.fgraph.apply_nodes)
        elif isinstance(op, HasInnerGraph):
            yield from all_nodes(op.fgraph.apply_nodes)


class Reference:
    """Log density, gradient and a Hessian-vector product of PyMC's own graph, under the default rewrites.

    Differentiated before any rewriting and evaluated point by point: none of the package's graph code is used.
    """

    def __init__(self, model, layout, mode):
        self.layout = layout
        direction = pt.vector("direction")
        with model:
            logp, grad = model.logp(), model.dlogp()
            product = pt.grad(
                (grad * direction).sum(), model.value_vars, consider_constant=[direction], disconnected_inputs="ignore"
            )
            outputs = [logp, grad, pt.concatenate([part.ravel() for part in product])]
            self._function = pymc_compile([*model.value_vars, direction], outputs, mode=mode)

    def __call__(self, theta, direction):
        with warnings.catch_warnings():
            # NumPy complains of overflow where the machine code of the default mode does not.
            warnings.simplefilter("ignore", RuntimeWarning)
            return self._function(*self.layout.unflatten(theta).values(), direction)


def ufunc_of(node):
    """Return the function that `Elemwise.perform` calls for a node, by the same rules."""
    if node.op.nfunc and len(node.inputs) == node.op.nfunc_spec[1]:
        return node.op.nfunc
    return node.op.ufunc or getattr(node.tag, "ufunc", None)


def works_on_objects(function):
    """Tell whether a function came from `np.frompyfunc`, which calls Python once for each element."""
    return isinstance(function, np.ufunc) and all(set(types) <= set("O->") for types in function.types)


def element_by_element(function):
    """Return the nodes of a compiled function that run element by element, by their actual NumPy functions."""
    nodes = list(all_nodes(function.maker.fgraph.apply_nodes))
    slow = [n for n in nodes if isinstance(n.op, Elemwise) and works_on_objects(ufunc_of(n))]
    return slow + [n for n in nodes if isinstance(n.op, CAReduce) and works_on_objects(n.op.ufunc)]


def has_ufunc_for_all(function):
    nodes = all_nodes(function.maker.fgraph.apply_nodes)
    return all(ufunc_of(n) is not None for n in nodes if isinstance(n.op, Elemwise))


def is_compiled(function):
    """Tell whether PyTensor compiled it; rules on jets call NumPy functions alone."""
    return hasattr(function, "maker")


def check_loops(density):
    density.logp_grad(density.initial_point()[None])
    density.hessian(density.initial_point()[None])
    for function in filter(is_compiled, compiled(density)):
        assert has_ufunc_for_all(function)  # else the next line sees nothing
        assert element_by_element(function) == []
        assert python_loops(function.maker.fgraph.apply_nodes) == []
