"""Natural gradients of GPJax on a problem of ``natgrad.py``, in the environment that has GPJax.

    python natgrad_gpjax.py PROBLEM.npz OUT.npz whitened NODES STEP_SIZE STEPS SECONDS

The family is ``WhitenedVariationalGaussian``, and its inducing inputs are all points. Hyperparameters are held, by an
optimiser that does not move them.
"""

import sys
import time

from importlib.metadata import version
from pathlib import Path

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as npd
import optax
import paramax

from gpjax.integrators import GHQuadratureIntegrator
from gpjax.natural_gradients import natural_gradient_step, partition_variational
from gpjax.variational_families import WhitenedVariationalGaussian
from natgrad_problem import NUGGET, Problem, follow, one_core

jax.config.update("jax_enable_x64", True)


class Logit(gpx.likelihoods.Bernoulli):
    """Bernoulli with a logit link: GPJax' own has a probit link."""

    def link_function(self, f):
        """Return the distribution of observations."""
        return npd.Bernoulli(logits=f)


def objective(q, data):
    """Return -ELBO."""
    return -gpx.objectives.elbo(q, data)


def main(file: str, out: str, _: str, nodes: int, step_size: float, n: int, seconds: float) -> None:
    """Time ``fit_natgrads`` with one step, then follow its steps one by one."""
    one_core()
    problem = Problem.read(Path(file))
    data = gpx.Dataset(X=jnp.asarray(problem.x), y=jnp.asarray((problem.sign > 0).astype(float))[:, None])

    def start():
        kernel = gpx.kernels.RBF(lengthscale=problem.length, variance=problem.sd**2)
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel, jitter=NUGGET)
        model = prior * Logit(integrator=GHQuadratureIntegrator(num_points=nodes))
        return WhitenedVariationalGaussian(model=model, inducing_inputs=data.X)

    begin = time.process_time()
    fitted, _ = gpx.fit_natgrads(
        model=start(), objective=objective, train_data=data, optim=optax.set_to_zero(), natgrad_lr=step_size,
        num_iters=1, verbose=False,
    )  # fmt: skip
    jax.block_until_ready(fitted)
    first = time.process_time() - begin
    variational, hyper = partition_variational(start())
    take = jax.jit(lambda v: natural_gradient_step(v, hyper, data, objective, jnp.asarray(step_size)))
    jax.block_until_ready(take(variational))  # compiled

    def step():
        nonlocal variational
        variational, before = take(variational)
        mean, root = moments(variational)
        return mean, root, float(before)

    def moments(variational):
        q = paramax.unwrap(eqx.combine(variational, hyper))
        return q.variational_mean, q.variational_root_covariance

    found = follow(problem, step, n, seconds, near=1e-6)
    found["own"] = np.append(found["own"], float(objective(eqx.combine(variational, hyper), data)))
    np.savez(out, **found, first=first, version=f"gpjax {version('gpjax')}, jax {version('jax')}")


if __name__ == "__main__":
    main(
        sys.argv[1],
        sys.argv[2],
        sys.argv[3],
        int(sys.argv[4]),
        *(float(sys.argv[5]), int(sys.argv[6]), float(sys.argv[7])),
    )
