"""What the benchmark of mixtures says of a fit."""

import mixtures
import numpy as np

from mixture_targets import target

from pymc_ngvi.families import FullState, MixtureState


def test_a_mode_is_found_by_a_component_that_is_near_and_heavy():
    modes = target("two modes").modes
    along = np.linalg.solve(modes.whiteners[1], [1.0, 0.0])  # one standard deviation of the second mode

    def found(weights, means):
        components = tuple(FullState(m, np.eye(2)) for m in means)
        return mixtures.n_found(MixtureState(np.log(weights), components), modes)

    first, second = modes.centres
    assert found([0.5, 0.5], [first, second]) == 2
    assert found([0.5, 0.5], [first, second + 0.9 * along]) == 2
    assert found([0.5, 0.5], [first, second + 1.1 * along]) == 1
    assert found([0.94, 0.06], [first, second]) == 1  # less than a tenth of .7
    assert found([0.04, 0.96], [first, second]) == 2
    assert found([0.5, 0.5], [second, second]) == 1
    assert mixtures.n_found(FullState(second, np.eye(2)), modes) == 1


def test_figures_of_a_fit_with_wrong_weights(rng):
    known = target("two modes")
    # A lower factor C of the inverse of W^T W: W^-1 = C Q, with Q orthogonal.
    factors = [np.linalg.qr(np.linalg.solve(w, np.eye(2)).T, mode="r").T for w in known.modes.whiteners]
    components = tuple(FullState(m, c * np.sign(np.diag(c))) for m, c in zip(known.modes.centres, factors, strict=True))
    q = MixtureState(np.log([0.5, 0.5]), components)
    theta = q.draws(np.column_stack([rng.standard_normal((20_000, 2)), rng.random(20_000)]))
    figures = mixtures.known_figures(q, theta, mixtures.Estimate(-0.5, 0.1), known)
    assert figures["reverse_kl"] == 0.5
    # The modes hardly overlap: the divergences are those of the weights.
    exact = 0.3 * np.log(0.3 / 0.5) + 0.7 * np.log(0.7 / 0.5)
    assert abs(figures["forward_kl"] - exact) < 4.5 * figures["forward_kl_se"] + 1e-3
    assert abs(figures["weight_error"] - 0.2) < 4.5 * 0.5 / np.sqrt(len(theta)) + 1e-3
    assert (figures["n_found"], figures["n_modes"]) == (2, 2)
