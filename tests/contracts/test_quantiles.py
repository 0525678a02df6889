import numpy as np
import pytest

from scipy import stats

from pymc_ngvi.rows.many import quantiles

NORMALS = np.array([-4.5, -3.0, -1.0, 0.0, 0.3, 2.0, 4.5])
DISTRIBUTIONS = [stats.norm(2.0, 3.0), stats.gamma(4.0), stats.gumbel_r(-1.0, 0.5)]


def on_grid(of, n, reach=1e-9):
    ends = of.ppf([reach, 1.0 - reach])
    points = np.linspace(*ends, n)
    inner = np.where(points[1:] < of.median(), np.diff(of.cdf(points)), -np.diff(of.sf(points)))
    return points, of.pdf(points), np.concatenate([[of.cdf(points[0])], inner, [of.sf(points[-1])]])


@pytest.mark.parametrize("factor", [1.0, 1e-30])
def test_they_are_those_of_distributions_in_both_tails(factor):
    """With a density and areas that are so many times too small: of both, only their shape counts."""
    points, density, areas = (
        np.stack(part, axis=1) for part in zip(*(on_grid(of, 400) for of in DISTRIBUTIONS), strict=True)
    )
    found = quantiles(NORMALS, points, factor * density, factor * areas)
    # Above the median by the survival function: its digits would be lost in 1 - cdf.
    right = [np.where(NORMALS < 0.0, of.ppf(stats.norm.cdf(NORMALS)), of.isf(stats.norm.sf(NORMALS)))
             for of in DISTRIBUTIONS]  # fmt: skip
    np.testing.assert_allclose(found, np.stack(right, axis=1), atol=2e-5)


def test_few_points_do_for_a_smooth_density():
    """Cubics are off by the fourth power of the distance of points; straight lines would be off by .03."""
    points, density, areas = on_grid(stats.gamma(4.0), 60)
    inside = NORMALS[np.abs(NORMALS) <= 3.0]
    np.testing.assert_allclose(
        quantiles(inside, points, density, areas), stats.gamma(4.0).ppf(stats.norm.cdf(inside)), atol=2e-3
    )


def test_beyond_the_points_they_stay():
    points, density, areas = on_grid(stats.norm(2.0, 3.0), 200, reach=stats.norm.cdf(-2.0))
    beyond = np.array([-5.0, 5.0])
    np.testing.assert_allclose(quantiles(beyond, points, density, areas), points[[0, -1]], rtol=1e-12)


def test_points_may_be_the_same_for_all():
    points, density, areas = on_grid(stats.gamma(4.0), 100)
    found = quantiles(
        NORMALS, points[:, None], np.stack([density, 2.0 * density], 1), np.stack([areas, 2.0 * areas], 1)
    )
    np.testing.assert_allclose(found[:, 0], found[:, 1], rtol=1e-12)
    np.testing.assert_allclose(found[:, 0], quantiles(NORMALS, points, density, areas), rtol=1e-12)
