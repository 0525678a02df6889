"""Guards of `marginal/` and `nested/`: how each is switched off, and a model that fails without it.

A guard is what protects from an answer that is wrong, or refused where it need not be. A model has a reference that is
independent of the package: a closed form, or a sum over a grid. What is found is in guards.md.
"""

import functools

from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from scipy import stats
from scipy.special import expit, gammaln, log_expit, logsumexp

import pymc_ngvi

from pymc_ngvi.marginal import exact, integral, proposals, quadrature, sampler, trees
from pymc_ngvi.marginal.proposals import Margins
from pymc_ngvi.nested import inside, posterior

EXACT, APPROXIMATE, REFUSED = "exact", "approximate", "refused"
#: What a mean may be off, in standard deviations, and a standard deviation, relative; and the log of the evidence,
#: beside five of its own errors. Draws for functions of these.
MOST_OFF, MOST_OFF_IN_EVIDENCE, N_DRAWS = 0.1, 0.03, 20_000


class Known(NamedTuple):
    """A model, moments of its first unconstrained coordinates, the logarithm of its evidence, and a function of draws.

    `also` is of draws of variables: by how much something is off, in what it may.
    """

    model: pm.Model
    mean: Any
    sd: Any
    evidence: float = np.nan
    also: Any = None


class Result(NamedTuple):
    """What a fit says of itself, and by how much it is off, in what it may."""

    claim: str
    off: float = np.nan


def result_of(known, kind, seed):
    """Fit, and compare."""
    try:
        approx = pymc_ngvi.fit_ngvi(model=known.model, posterior=kind, random_seed=seed, progressbar=False)
    except pymc_ngvi.NotExactError:
        return Result(REFUSED)
    if not approx.checks.is_reliable:
        return Result(REFUSED)
    n = len(known.mean)
    off = [*np.abs(approx.mean_flat[:n] - known.mean) / known.sd, *np.abs(approx.sd_flat[:n] / known.sd - 1.0)]
    result = float(np.max(off)) / MOST_OFF
    if np.isfinite(known.evidence):
        found = approx.log_marginal_likelihood
        result = max(result, abs(found.value - known.evidence) / (MOST_OFF_IN_EVIDENCE + 5.0 * found.se))
    if known.also is not None:
        result = max(result, known.also(approx.sample(N_DRAWS, random_seed=seed)["posterior"]))
    return Result(EXACT if approx.record.verdict.word == EXACT else APPROXIMATE, result)  # not with too few draws


def on_grid(model, log_density, *axes, has_evidence=True):
    """Return moments by a sum over a grid of the first coordinates."""
    grid = np.meshgrid(*axes, indexing="ij")
    values = log_density(*grid)
    points, total = np.stack(grid).reshape(len(axes), -1), logsumexp(values)
    weights = np.exp(values - total).ravel()
    mean = points @ weights
    sd = np.sqrt((points - mean[:, None]) ** 2 @ weights)
    volume = np.prod([axis[1] - axis[0] for axis in axes])
    return Known(model, mean, sd, float(total + np.log(volume)) if has_evidence else np.nan)


# --- densities of few coordinates -------------------------------------------------------------------------------------


def of_density(log_density, mean, sd, initval=0.0):
    """Return a model whose log density is a function of one vector."""
    with pm.Model() as model:
        x = pm.Flat("x", shape=len(mean), initval=np.full(len(mean), initval))
        pm.Potential("log_density", log_density(x))
    return Known(model, np.array(mean), np.array(sd))


def shelf(weight=0.01, middle=-10.0, width=3.0, bend=0.05):
    """A bulk, and one percent on a thin bent shelf far from it."""

    def log_density(x):
        apart = ((x[0] - middle) / width) ** 2 + ((x[1] - bend * x[0] ** 2) / 0.3) ** 2
        on_shelf = np.log(weight / (0.3 * width)) - 0.5 * apart
        return pt.logaddexp(np.log1p(-weight) - 0.5 * (x**2).sum(), on_shelf)

    square = middle**2 + width**2
    fourth = middle**4 + 6.0 * middle**2 * width**2 + 3.0 * width**4
    mean = weight * np.array([middle, bend * square])
    squares = 1.0 - weight + weight * np.array([square, bend**2 * fourth + 0.09])
    return of_density(log_density, mean, np.sqrt(squares - mean**2))


def spike(p=5, weight=0.15, scale=0.1):
    """A narrow peak in a wide one."""

    def log_density(x):
        square = (x**2).sum()
        narrow = np.log1p(-weight) - p * np.log(scale) - 0.5 * square / scale**2
        return pt.logaddexp(narrow, np.log(weight) - 0.5 * square)

    return of_density(log_density, np.zeros(p), np.full(p, np.sqrt(weight + (1.0 - weight) * scale**2)))


def narrow(p=6, weight=0.4, scale=0.1, shift=1.0):
    """A narrow peak beside the middle of a wide one, where a fit ends."""

    def log_density(x):
        peak = np.log(weight) - p * np.log(scale) - 0.5 * ((x - shift / np.sqrt(p)) ** 2).sum() / scale**2
        return pt.logaddexp(peak, np.log1p(-weight) - 0.5 * (x**2).sum())

    mean = weight * shift / np.sqrt(p)
    square = weight * (scale**2 + shift**2 / p) + 1.0 - weight
    return of_density(log_density, np.full(p, mean), np.full(p, np.sqrt(square - mean**2)), initval=-1.0)


def bananas(p=3, bend=1.2, scale=0.15):
    """Coordinates that follow the square of the first one closely: a thin bent ridge, as no single Student t is."""
    follow, sd = np.r_[0.0, np.full(p - 1, bend)], np.r_[1.0, np.full(p - 1, np.sqrt(2.0 * bend**2 + scale**2))]
    return of_density(lambda x: -0.5 * (x[0] ** 2 + (((x[1:] - bend * x[0] ** 2) / scale) ** 2).sum()), follow, sd)


def heavy(df=1.2):
    """Two coordinates without a standard deviation."""
    return of_density(lambda x: -0.5 * (df + 1.0) * pt.log1p(x**2 / df).sum(), np.zeros(2), np.full(2, np.inf))


# --- groups -----------------------------------------------------------------------------------------------------------


def groups(y, log_p, likelihood, *axes, tau=2.0, is_centred=False):
    """Return a model of one effect for each count, about a mean; `log_p` is of a count, from its effect."""
    with pm.Model() as model:
        mu, size = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("tau", tau)
        effect = (
            pm.Normal("a", mu, size, shape=len(y)) if is_centred else mu + size * pm.Normal("z", 0.0, 1.0, shape=len(y))
        )
        likelihood(effect, y)
    z = np.linspace(-8.0, 8.0, 801)
    log_weight = stats.norm.logpdf(z) + np.log(z[1] - z[0])
    values, counts = np.unique(y, return_counts=True)

    def log_density(mean, log_size):
        prior = stats.norm.logpdf(mean, 0.0, 3.0) + stats.halfnorm.logpdf(np.exp(log_size), scale=tau) + log_size
        effects = mean[..., None] + np.exp(log_size)[..., None] * z
        return prior + sum(
            n * logsumexp(log_p(value, effects) + log_weight, axis=-1) for value, n in zip(values, counts, strict=True)
        )

    return on_grid(model, log_density, *axes)


def rare_counts(*, is_centred=False):
    """Counts of which most are 0: effects may be 0, too, and the logarithm of their scale has a thin tail."""
    rng = np.random.default_rng(12)
    y = rng.poisson(0.3 * np.exp(1.5 * rng.normal(size=40)))
    log_p = lambda value, a: value * a - np.exp(np.minimum(a, 50.0)) - gammaln(value + 1.0)  # noqa: E731
    likelihood = lambda effect, y: pm.Poisson("y", pt.exp(effect), observed=y)  # noqa: E731
    return groups(y, log_p, likelihood, np.linspace(-6.0, 1.5, 61), np.linspace(-9.0, 1.7, 86), is_centred=is_centred)


def binary(n=7):
    """Few binary outcomes each, with large effects: conditional densities are skewed, and some half flat."""
    y = np.random.default_rng(3)
    y = y.binomial(n, expit(-2.0 + 4.0 * y.normal(size=60)))
    log_p = lambda k, a: stats.binom.logpmf(k, n, 0.5) + n * np.log(2.0) + k * log_expit(a) + (n - k) * log_expit(-a)  # noqa: E731
    likelihood = lambda effect, y: pm.Binomial("y", n, logit_p=effect, observed=y)  # noqa: E731
    return groups(y, log_p, likelihood, np.linspace(-5.5, 1.5, 50), np.linspace(0.5, 2.4, 50), tau=5.0, is_centred=True)


def growth(n=12, times=4):
    """Growth curves, each with its own slope: trees of two effects, log m in closed form."""
    rng = np.random.default_rng(21)
    design = np.stack([np.ones(times), np.arange(times)], axis=1)
    y = (rng.normal(size=(n, 2)) * [0.3, 0.6]) @ design.T + rng.normal(size=(n, times))
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0, shape=2)
        a, b = pm.Normal("a", 0.0, sd[0], shape=n), pm.Normal("b", 0.0, sd[1], shape=n)
        pm.Normal("y", a[:, None] + b[:, None] * design[:, 1], 1.0, observed=y)

    def log_density(*log_sd):
        sd = np.exp(np.stack(log_sd, axis=-1))
        cov = (design * sd[..., None, :] ** 2) @ design.T + np.eye(times)
        square = np.einsum("ki,...ij,kj->...", y, np.linalg.inv(cov), y)
        log_p = -0.5 * (square + n * np.linalg.slogdet(cov)[1] + y.size * np.log(2.0 * np.pi))
        return log_p + (stats.halfnorm.logpdf(sd) + np.log(sd)).sum(axis=-1)

    axis = np.linspace(-9.0, 1.5, 91)
    return on_grid(model, log_density, axis, axis)


def folded(sd=0.1, n=10):
    """Effects whose signs are not seen: each has two modes, far apart."""
    y = np.abs(np.random.default_rng(16).normal(0.5, 2.0, n))
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("tau", 2.0)
        a = pm.Normal("a", mu, tau, shape=n)
        pm.Potential("y", pt.logaddexp(-0.5 * ((y - a) / sd) ** 2, -0.5 * ((y + a) / sd) ** 2).sum())

    def log_density(mean, log_size):
        prior = stats.norm.logpdf(mean, 0.0, 2.0) + stats.halfnorm.logpdf(np.exp(log_size), scale=2.0) + log_size
        wide = np.hypot(sd, np.exp(log_size))
        sides = [stats.norm.logpdf(sign * y, mean[..., None], wide[..., None]) for sign in (1.0, -1.0)]
        return prior + np.logaddexp(*sides).sum(axis=-1)

    return on_grid(model, log_density, np.linspace(-8.0, 8.0, 161), np.linspace(-4.0, 2.6, 133), has_evidence=False)


# --- latent Gaussian models -------------------------------------------------------------------------------------------


def level(n=20):
    """A random walk seen with noise, which may be nearly 0."""
    rng = np.random.default_rng(1)
    y = np.cumsum(0.5 * rng.normal(size=n)) + rng.normal(size=n)
    with pm.Model() as model:
        step, noise = pm.HalfNormal("step", 1.0), pm.HalfNormal("noise", 2.0)
        x = pm.GaussianRandomWalk("x", sigma=step, init_dist=pm.Normal.dist(0.0, 3.0), shape=n)
        pm.Normal("y", x, noise, observed=y)
    walk = np.minimum.outer(np.arange(n), np.arange(n)).astype(float)

    def log_density(log_step, log_noise):
        step, noise = np.exp(log_step)[..., None, None], np.exp(log_noise)[..., None, None]
        root = np.linalg.cholesky(9.0 + step**2 * walk + noise**2 * np.eye(n))
        z = np.linalg.solve(root, np.broadcast_to(y[:, None], (*root.shape[:-1], 1)))[..., 0]
        log_p = -0.5 * (z**2).sum(axis=-1) - np.log(np.diagonal(root, axis1=-2, axis2=-1)).sum(axis=-1)
        prior = stats.halfnorm.logpdf(step) + stats.halfnorm.logpdf(noise, scale=2.0)
        return log_p - 0.5 * n * np.log(2.0 * np.pi) + prior[..., 0, 0] + log_step + log_noise

    return on_grid(model, log_density, np.linspace(-9.0, 1.2, 60), np.linspace(-9.0, 0.8, 112))


def scales(true, n, seed=7):
    """Independent scales of effects seen with noise."""
    rng, p, true = np.random.default_rng(seed), len(true), np.array(true)[:, None]
    y = rng.normal(0.0, true, (p, n)) + rng.normal(0.0, 0.5, (p, n))
    with pm.Model() as model:
        s, z = pm.HalfNormal("s", 1.0, shape=p), pm.Normal("z", 0.0, 1.0, shape=(p, n))
        pm.Normal("y", s[:, None] * z, 0.5, observed=y)
    grid = np.linspace(-12.0, 3.0, 4_001)

    def of_one(y):
        log_p = stats.norm.logpdf(y[:, None], 0.0, np.hypot(np.exp(grid), 0.5)).sum(axis=0)
        return on_grid(model, lambda t: log_p + stats.halfnorm.logpdf(np.exp(t)) + t, grid)

    each = [of_one(row) for row in y]
    return Known(
        model,
        np.concatenate([one.mean for one in each]),
        np.concatenate([one.sd for one in each]),
        sum(one.evidence for one in each),
    )


def rare_levels(sd, n=3):
    """One count of 0 for each level: its density is nearly that of the prior, on one side."""
    with pm.Model() as model:
        alpha, x = pm.Gamma("alpha", 4.0, 2.0), pm.Normal("level", 0.0, sd, shape=n)
        pm.NegativeBinomial("y", mu=pt.exp(x), alpha=alpha, observed=np.zeros(n, dtype=int))
    t, grid = np.linspace(-6.0, 4.0, 501)[:, None], np.linspace(-8.0 * sd, 8.0 * sd, 4_001)
    log_p = stats.norm.logpdf(grid, 0.0, sd) + np.exp(t) * (t - np.logaddexp(t, grid)) + np.log(grid[1] - grid[0])
    of_level = logsumexp(log_p, axis=1)
    log_m = stats.gamma.logpdf(np.exp(t[:, 0]), 4.0, scale=0.5) + t[:, 0] + n * of_level
    known = on_grid(model, lambda at: log_m, t[:, 0])
    density = np.exp(log_m - logsumexp(log_m)) @ np.exp(log_p - of_level[:, None])
    mean, fourth = density @ grid, density @ (grid / sd) ** 4

    def also(posterior):
        found = ((posterior["level"].to_numpy() / sd) ** 4).mean(axis=(0, 1))
        return np.abs(found / fourth - 1.0).max() / 0.08

    sds = np.full(n, np.sqrt(density @ (grid - mean) ** 2))
    return Known(model, np.r_[known.mean, np.full(n, mean)], np.r_[known.sd, sds], known.evidence, also)


def slopes(n=2, x=(0.0, 1.0), n_prior=200_000):
    """Correlated intercepts and slopes of two groups: log m has a closed form, and draws of the prior are weighted."""
    rng = np.random.default_rng(4)
    design = np.stack([np.ones(len(x)), x], axis=1)
    y = (rng.normal(size=(n, 2)) * [0.5, 0.3]) @ design.T + rng.normal(size=(n, len(x)))
    with pm.Model() as model:
        root, _, _ = pm.LKJCholeskyCov("root", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=2))
        b = pm.MvNormal("b", mu=np.zeros(2), chol=root, shape=(n, 2))
        pm.Normal("y", b[:, :1] + b[:, 1:] * np.array(x), 1.0, observed=y)
    sd, r = rng.exponential(size=(n_prior, 2)), 2.0 * rng.beta(2.0, 2.0, n_prior) - 1.0
    lower = np.zeros((n_prior, 2, 2))
    lower[:, 0, 0], lower[:, 1, 0], lower[:, 1, 1] = sd[:, 0], sd[:, 1] * r, sd[:, 1] * np.sqrt(1.0 - r**2)
    cov = np.eye(len(x)) + design @ lower @ np.swapaxes(lower, 1, 2) @ design.T
    square = np.einsum("ki,nij,kj->n", y, np.linalg.inv(cov), y)
    log_p = -0.5 * (square + n * np.linalg.slogdet(cov)[1] + y.size * np.log(2.0 * np.pi))
    points = np.stack([np.log(lower[:, 0, 0]), lower[:, 1, 0], np.log(lower[:, 1, 1])], axis=1)
    weights = np.exp(log_p - logsumexp(log_p))
    mean = weights @ points
    evidence = float(logsumexp(log_p) - np.log(n_prior))
    return Known(model, mean, np.sqrt(weights @ (points - mean) ** 2), evidence)


MODELS = {
    "shelf": shelf,
    "spike": spike,
    "narrow": narrow,
    "bananas": bananas,
    "heavy": heavy,
    "rare counts": rare_counts,
    "rare counts, centred": functools.partial(rare_counts, is_centred=True),
    "binary": binary,
    "growth": growth,
    "folded": folded,
    "level": level,
    "long level": functools.partial(level, 25),
    "three scales": functools.partial(scales, (0.05, 0.3, 1.0), 4, 10),
    "eight scales": functools.partial(scales, np.linspace(0.1, 2.0, 8), 5),
    "eight small scales": functools.partial(scales, np.linspace(0.02, 0.6, 8), 2),
    "slopes": slopes,
    "rare levels": functools.partial(rare_levels, 6.0),
    "rarest levels": functools.partial(rare_levels, 10.0),
}


# --- the guards -------------------------------------------------------------------------------------------------------


class Guard(NamedTuple):
    """A guard, and a model that fails without it.

    `off` is what is replaced: of a module or a class, an attribute, by what. `claim` is what a fit says of itself with
    the guard; without it, it says less, or is wrong. Without a model, `tries` says on what fits it made no difference.
    """

    against: str
    off: tuple
    model: str | None = None
    kind: str = EXACT
    seed: int = 1
    claim: str = EXACT
    tries: str = ""


def nothing(*args, **options):
    """Do nothing."""


def of_gaussian(mean, cov):
    """Return margins of a Gaussian."""
    sd, nothing = np.sqrt(np.diag(cov)), np.zeros(len(mean))
    return Margins(mean, sd, nothing, nothing + 1.0, nothing, np.linalg.cholesky(cov / np.outer(sd, sd)))


def of_moments(g, weights, like):
    """Return margins that are Gaussian."""
    mean, cov = plain_moments(g, weights)
    return of_gaussian(mean, cov)


def plain_moments(y, w):
    """Return weighted moments."""
    apart = y - w @ y
    return w @ y, (w[:, None] * apart).T @ apart + 1e-10 * np.eye(y.shape[1])


def never(mean, variance):
    """Tell of no coordinate that nodes are far off."""
    return np.zeros(mean.shape, dtype=bool)


_NO_DEFENCE = inside.Defence(np.empty(0, dtype=np.intp), np.empty(0), np.empty(0))

#: Fits that are right with a guard and as right without it, by the kind of model. Fewer than ten settle nothing.
OF_FEW = "shelf, spike, two modes, gammas (2), Student t, mixture weight, shoulder"
OF_GROUPS = "binary (2), small effects, rare counts (2), schools (2), large counts, unequal counts, two outcomes each"
PLAIN_10 = f"none after 10 fits: {OF_FEW}, spike (2)"
SHRINKAGE = f"none after 13 fits: {OF_FEW}, spike (2), bananas (2): 0.12 for 0.09 on one, 14 skewed coordinates"
TREES_10 = f"none after 10 fits: {OF_GROUPS}"
NESTED_6 = "not settled, 6 fits: three scales or level (3), slopes or a long level (3)"
NESTED_9 = "not settled, 9 fits: level (3), a long level (3), eight small scales (3)"
RARE = "not settled, 1 fit: rare levels"

GUARDS = {
    # --- marginal: globals ---
    "scales apart": Guard(
        "A narrow peak in a broad one, which draws of a Gaussian fit do not hit, or a broad one about it.",
        ((exact, "_looked", lambda density, q: ([], None)),),
        "narrow",
    ),
    # --- marginal: quadrature ---
    "confirmed": Guard(
        "Nodes about wrong centres.",
        ((integral, "blocks_off_centre", lambda forest, shape, rule, of_blocks: np.zeros(of_blocks.shape, bool)),),
        "growth",
    ),
    "parabolas": Guard(
        "Nodes on one flank of a conditional density.",
        ((quadrature, "far_off", never),),
        tries="not settled, 3 fits: rare counts (2), binary",
    ),
    "nodes": Guard(
        "As many nodes as it takes.",
        ((integral.TreeIntegral, "choose_rule", nothing),),
        "binary",
    ),
    "verdict: rule": Guard(
        "More nodes would change log m; what more candidates change of draws of effects may show it as well.",
        ((trees, "SLIGHT", np.inf), (trees, "MOST_SHORT", np.inf)),
        tries="folded, 6 seeds",
    ),
    # --- nested ---
    "margins": Guard(
        "Logarithms of scales that may be 0, with skewed margins of straight tails.",
        (
            (Margins, "of_profiles", staticmethod(lambda mode, cov, values: of_gaussian(mode, cov))),
            (Margins, "fitted", staticmethod(of_moments)),
        ),
        "eight small scales",
        "nested",
        seed=2,
    ),
    "rounds": Guard(
        "What the first round has found teaches the next ones.",
        ((sampler, "_MOST_ROUNDS", 1),),
        "level",
        "nested",
    ),
    "defence": Guard(
        "Latent variables whose density falls more slowly than its Gaussian.",
        ((inside.Defence, "of", lambda *args: _NO_DEFENCE),),
        "rarest levels",
        "nested",
        seed=2,
    ),
    "weights of pairs": Guard(
        "Latent variables that are not Gaussian given the hyperparameters.",
        tuple((of, "MOST_VARIANCE", -1.0) for of in (inside, sampler, posterior)),
        "rare levels",
        "nested",
        seed=2,
    ),
    # --- without a model ---
    "verdict: sd": Guard(
        "A standard deviation that is hardly known, or that there is none of.",
        ((trees, "MOST_ERROR", np.inf),),
        tries="not settled, 1 fit: a t of 1.2 degrees of freedom is refused by other conditions, too",
    ),
    "components": Guard(
        "A posterior that is bent: several components follow it, one does not.",
        ((proposals, "_DRAWS_PER_COORDINATE", np.inf),),
        tries="not settled, 5 fits: shelf, spike, bananas, two regressions",
    ),
    "shrinkage": Guard(
        "Covariances of few draws in many dimensions.",
        ((proposals, "_shrunk_moments", plain_moments),),
        tries=SHRINKAGE,
    ),
    "tempered weights": Guard(
        "Proposals that are fitted to a few draws of all the weight.",
        ((sampler, "tempered", lambda w, least: w),),
        tries=f"{PLAIN_10}; the walk with counts of tests/public/test_fuzzed.py: refused with one seed of five",
    ),
    "tails of hyperparameters": Guard(
        "Proposals that are fitted to draws by their mass have few of them in thin tails.",
        ((sampler, "_thin_squares", lambda g, weights: np.zeros(len(g))), (sampler, "SLIGHT", np.inf)),
        tries=NESTED_6,
    ),
    "search for the mode": Guard(
        "Hyperparameters that are not where a fit begins.",
        ((sampler, "_MOST", 0), (sampler, "_MOST_OF_EACH", 0)),
        tries=NESTED_6,
    ),
    "wide rounds": Guard(
        "What is farther out than proposals: a part of the hyperparameters is drawn there.",
        ((sampler, "_OF_WIDE", 1e-9),),
        tries=f"{NESTED_9}; 0.07 for 0.05 on a long level",
    ),
    "ratios": Guard(
        "Entries of Cholesky factors, which have the diagonal of their row as their scale: a funnel.",
        ((posterior, "ratios", lambda *args: []),),
        tries="not settled, 3 fits: slopes, which take two to three times as many values without it",
    ),
    "more draws": Guard(
        "Estimates of log m by few draws.",
        ((sampler.Sampler, "_n_draws_for", lambda self, variance: self._n_draws),),
        tries="not settled, 3 fits: rarest levels",
    ),
    "verdict: error of log m": Guard(
        "An ELBO whose lack of log m is not known well.",
        ((posterior, "MOST_ERROR", np.inf),),
        tries="not settled, 3 fits: rarest levels, exact since pairs are weighted together up to a variance of 1.5",
    ),
    "what ELBOs lack": Guard(
        "Fits whose ELBO is below log m.",
        ((inside, "missing", lambda ratio: (0.0, 0.0)),),
        tries=RARE,
    ),
    "parts of steps": Guard(
        "Conditional fits that a full step overshoots.",
        ((inside, "_SIZES", (1.0,)),),
        tries=RARE,
    ),
    "fits begun again": Guard(
        "Hyperparameters without a fit in a batch.",
        ((inside, "_TURNS", 0),),
        tries=RARE,
    ),
}
