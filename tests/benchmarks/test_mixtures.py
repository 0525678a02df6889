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
