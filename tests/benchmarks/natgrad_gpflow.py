"""Natural gradients of GPflow on a problem of ``natgrad.py``, in the environment that has GPflow.

    python natgrad_gpflow.py PROBLEM.npz OUT.npz LIKELIHOOD NODES STEP_SIZE STEPS SECONDS

The model is ``VGP``; hyperparameters are held. "shipped" is GPflow's Bernoulli with ``invlink=tf.sigmoid``, "stable"
the same likelihood from its logits.
"""

import sys
import time

from importlib.metadata import version
from pathlib import Path

import gpflow
import numpy as np
import tensorflow as tf

from gpflow.quadrature import NDiagGHQuadrature
from natgrad_problem import NUGGET, Problem, follow, one_core

gpflow.config.set_default_jitter(NUGGET)


class Logit(gpflow.likelihoods.Bernoulli):
    """Bernoulli, whose log density is computed from the logits."""

    def _scalar_log_prob(self, X, F, Y):
        return -tf.math.softplus(tf.where(tf.equal(Y, 1), -F, F))


def main(file: str, out: str, likelihood: str, nodes: int, step_size: float, n: int, seconds: float) -> None:
    """Follow steps of ``NaturalGradient``."""
    one_core()
    problem = Problem.read(Path(file))
    begin = time.process_time()
    data = (problem.x, (problem.sign > 0).astype(float)[:, None])
    kind = {"shipped": gpflow.likelihoods.Bernoulli, "stable": Logit}[likelihood]
    kernel = gpflow.kernels.SquaredExponential(variance=problem.sd**2, lengthscales=problem.length)
    model = gpflow.models.VGP(data, kernel, kind(invlink=tf.sigmoid, quadrature=NDiagGHQuadrature(1, nodes)))
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    optimiser = gpflow.optimizers.NaturalGradient(gamma=step_size)

    def take():
        optimiser.minimize(model.training_loss, [(model.q_mu, model.q_sqrt)])

    compiled = tf.function(take)
    building = time.process_time() - begin

    def step():
        # The loss is an evaluation that the steps do not need: left out, and so nan, but for the last.
        compiled()
        return model.q_mu.numpy(), model.q_sqrt.numpy()[0], np.nan

    try:
        found = follow(problem, step, n, seconds, near=1e-6)
        failure = ""
    except tf.errors.InvalidArgumentError as error:
        lines = str(error.message).splitlines()
        failure = next((line for line in lines if "Cholesky" in line), lines[0])
        found = {"loss": np.array([np.nan]), "own": np.array([]), "seconds": np.array([np.nan])}
    found["own"] = np.append(found["own"], float(model.training_loss()))
    versions = f"gpflow {version('gpflow')}, tensorflow {version('tensorflow')}"
    np.savez(out, **found, failure=failure, first=building + found["seconds"][0], version=versions)


if __name__ == "__main__":
    main(
        sys.argv[1],
        sys.argv[2],
        sys.argv[3],
        int(sys.argv[4]),
        *(float(sys.argv[5]), int(sys.argv[6]), float(sys.argv[7])),
    )
