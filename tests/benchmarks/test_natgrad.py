"""The exact expectations by which natural gradients are judged."""

import numpy as np
import pytest

from khan_gp_methods import expected
from natgrad_problem import Problem, softplus


@pytest.mark.parametrize("sd", [0.01, 0.4, 0.6, 3.0, 400.0])
def test_expectations_are_those_of_a_mixture_of_normal_distribution_functions(sd):
    mean = np.array([-500.0, -3.0, 0.0, 0.2, 7.0, 500.0])
    known = -expected(np.ones(6), -mean, np.full(6, sd**2))[0]
    np.testing.assert_allclose(softplus(mean, np.full(6, sd)), known, rtol=1e-6, atol=1e-6 * max(1.0, sd))


def test_loss_at_the_prior_and_of_either_triangular_root():
    rng = np.random.default_rng(1)
    problem = Problem(rng.normal(size=(8, 2)), np.repeat([1.0, -1.0], 4), 0.7, 2.0)
    at_prior = softplus(np.zeros(8), np.full(8, np.sqrt(4.0 + 1e-4))).sum()
    assert problem.loss(np.zeros(8), np.eye(8)) == pytest.approx(at_prior)
    root = np.tril(rng.normal(size=(8, 8))) + 3.0 * np.eye(8)
    upper = np.linalg.inv(np.linalg.cholesky(np.linalg.inv(root @ root.T))).T
    mean = rng.normal(size=8)
    assert problem.loss(mean, upper) == pytest.approx(problem.loss(mean, root))
