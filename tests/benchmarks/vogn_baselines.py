"""Bayes by Backprop and Vadam on a network of one hidden layer, in NumPy, as Khan & Nielsen (2018) ran them.

Settings are those of the authors' public code (github.com/emtiyaz/vadam): ReLU units, a Bernoulli likelihood on the
logit scale, prior N(0, 1), Adam's rates .001, .9 and .999, starting precision 1, starting means uniform within one
over the root of the fan-in, batches of 128 rows of passes in random order, 16 draws.
"""

import numpy as np

from scipy.special import expit, logsumexp

LEARNING_RATE, BETAS, EPSILON = 1e-3, (0.9, 0.999), 1e-8
#: Draws of the predictive distribution, as the authors take them.
N_PREDICTIVE = 10


class Network:
    """The log likelihood of a network with one hidden layer, and its gradient, at many draws of the weights.

    Parameters
    ----------
    n_features, n_units : int
    """

    def __init__(self, n_features, n_units=64):
        self.shapes = [(n_features, n_units), (n_units,), (n_units,), ()]
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.ends = np.cumsum(sizes)
        self.n_dim, self.fan_in = self.ends[-1], np.repeat([n_features, n_features, n_units, n_units], sizes)

    def start(self, rng):
        """Return starting means, as torch draws those of its linear layers."""
        return rng.uniform(-1.0, 1.0, self.n_dim) / np.sqrt(self.fan_in)

    def parts(self, theta):
        """Return weights and biases of the two layers at draws (n_draws, n_dim)."""
        pieces = np.split(theta, self.ends[:-1], axis=1)
        return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def logits(self, theta, x):
        """Return the logits, (n_draws, n_rows), and the values of the hidden units."""
        w1, b1, w2, b2 = self.parts(theta)
        hidden = np.maximum(x @ w1 + b1[:, None], 0.0)
        return np.einsum("snh,sh->sn", hidden, w2) + b2[:, None], hidden

    def gradient(self, theta, x, y):
        """Return the gradient of the log likelihood of the rows, (n_draws, n_dim)."""
        logits, hidden = self.logits(theta, x)
        error = y - 1.0 / (1.0 + np.exp(-logits))
        delta = error[:, :, None] * (hidden > 0.0) * self.parts(theta)[2][:, None]
        pieces = [x.T @ delta, delta.sum(axis=1), np.einsum("snh,sn->sh", hidden, error), error.sum(axis=1)]
        return np.concatenate([piece.reshape(len(theta), -1) for piece in pieces], axis=1)

    def test_loss(self, theta, x, y):
        """Return `losses` of the logits at draws."""
        return losses(self.logits(theta, x)[0], y)


def losses(logits, y):
    """Return what the draws of a predictive distribution, (n_draws, n_rows), say of rows: three numbers.

    Returns
    -------
    by_rows : float
        -1/n sum_i log2 mean_s p(y_i | theta_s): the log2 loss of the predictive distribution of a row.
    together : float
        -1/n log2 mean_s prod_i p(y_i | theta_s), which the authors' code reports: close to the loss of the best draw.
    accuracy : float
    """
    log_p = -np.logaddexp(0.0, np.where(y == 1.0, -logits, logits))
    by_rows = logsumexp(log_p, axis=0) - np.log(len(log_p))
    together = logsumexp(log_p.sum(axis=1)) - np.log(len(log_p))
    p = expit(logits).mean(axis=0)
    bits = np.log(2.0)
    return -by_rows.mean() / bits, -together / len(y) / bits, ((p > 0.5) == (y == 1.0)).mean()


def batches(n_rows, size, rng):
    """Go through the rows again and again in random orders; the last batch of a pass may be smaller."""
    while True:
        order = rng.permutation(n_rows)
        yield from (order[first : first + size] for first in range(0, n_rows, size))


class BayesByBackprop:
    """Adam on the mean and on the standard deviation, the softplus of a parameter (Blundell et al. 2015)."""

    def __init__(self, mean):
        self.mean, self.raw = mean.copy(), np.full(len(mean), np.log(np.expm1(1.0)))
        self.first, self.second, self.t = np.zeros((2, len(mean))), np.zeros((2, len(mean))), 0

    @property
    def sd(self):
        return np.log1p(np.exp(self.raw))

    def step(self, gradient, z, n_rows):
        """Take one step; ``gradient`` is that of the mean negative log likelihood at the draws of ``z``."""
        sd = self.sd
        slope_mean = gradient.mean(axis=0) + self.mean / n_rows
        slope_sd = (gradient * z).mean(axis=0) + (sd - 1.0 / sd) / n_rows
        slope = np.stack([slope_mean, slope_sd / (1.0 + np.exp(-self.raw))])
        self.t += 1
        self.first += (1.0 - BETAS[0]) * (slope - self.first)
        self.second += (1.0 - BETAS[1]) * (slope**2 - self.second)
        first, second = self.first / (1.0 - BETAS[0] ** self.t), self.second / (1.0 - BETAS[1] ** self.t)
        move = LEARNING_RATE * first / (np.sqrt(second) + EPSILON)
        self.mean, self.raw = self.mean - move[0], self.raw - move[1]


class Vadam:
    """Adam's averages of gradients and their squares as mean and precision: the squares are those of whole batches."""

    def __init__(self, mean):
        self.mean, self.first, self.second, self.t = mean.copy(), np.zeros(len(mean)), np.zeros(len(mean)), 0
        self.sd = np.ones(len(mean))

    def step(self, gradient, z, n_rows):
        """Take one step; ``gradient`` is that of the mean negative log likelihood at the draws of ``z``."""
        prior = 1.0 / n_rows
        self.t += 1
        self.first += (1.0 - BETAS[0]) * (gradient.mean(axis=0) + prior * self.mean - self.first)
        self.second += (1.0 - BETAS[1]) * ((gradient**2).mean(axis=0) - self.second)
        first, second = self.first / (1.0 - BETAS[0] ** self.t), self.second / (1.0 - BETAS[1] ** self.t)
        self.mean = self.mean - LEARNING_RATE * first / (np.sqrt(second) + prior)
        self.sd = 1.0 / np.sqrt(n_rows * self.second + 1.0)


METHODS = {"Bayes by Backprop": BayesByBackprop, "Vadam": Vadam}


def run(method, train, test, seed, *, n_iterations, evaluated, n_draws=16, batch_size=128):
    """Return `losses` of the test data at the iterations that are evaluated, (n, 3)."""
    (x, y), rng = train, np.random.default_rng(seed)
    network = Network(x.shape[1])
    state, found, rows = METHODS[method](network.start(rng)), [], batches(len(y), batch_size, rng)
    for t in range(1, n_iterations + 1):
        at = next(rows)
        z = rng.standard_normal((n_draws, network.n_dim))
        gradient = -network.gradient(state.mean + state.sd * z, x[at], y[at]) / len(at)
        state.step(gradient, z, len(y))
        if t in evaluated:
            draws = state.mean + state.sd * rng.standard_normal((N_PREDICTIVE, network.n_dim))
            found.append(network.test_loss(draws, *test))
    return np.array(found)
