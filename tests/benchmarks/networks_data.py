"""What the scripts on a network for MNIST share, in NumPy alone: data, start, and measures of predictions."""

import json
import time

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Pixels, units and digits; shapes of weights and biases, in the order of the flat vector.
N_IN, N_UNITS, N_OUT = 784, 25, 10
SHAPES = {"w1": (N_IN, N_UNITS), "b1": (N_UNITS,), "w2": (N_UNITS, N_OUT), "b2": (N_OUT,)}
#: Passes after which predictions are measured, draws of a prediction, and bins of confidence.
SHOWN, N_PREDICTIVE, N_BINS = (1, 5, 10), 32, 15
#: Draws that an ELBO is averaged over.
N_ELBO = 8


def read(folder: Path, name: str) -> tuple[Array, Array]:
    """Return images from 0 to 1, (n, 784), and digits of "train" or "t10k", from the files of MNIST."""
    images = np.fromfile(folder / f"{name}-images-idx3-ubyte", np.uint8, offset=16).reshape(-1, N_IN) / 255.0
    # PyMC refuses 64-bit integers under Minibatch.
    return images, np.fromfile(folder / f"{name}-labels-idx1-ubyte", np.uint8, offset=8).astype(np.int32)


def start(seed: int) -> dict[str, Array]:
    """Return weights and biases, uniform within one over the root of the inputs, as PyTorch makes them."""
    rng = np.random.default_rng([seed, 1])
    bounds = {"w1": N_IN, "b1": N_IN, "w2": N_UNITS, "b2": N_UNITS}
    return {name: rng.uniform(-1.0, 1.0, SHAPES[name]) / np.sqrt(n) for name, n in bounds.items()}


def layers(flat: Array) -> list[Array]:
    """Return the parts of a flat vector of weights."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), SHAPES.values(), strict=True)]


def probabilities(draws: Sequence[Array], x: Array) -> Array:
    """Return the predictive distribution of each row, the mean over draws of the weights, (n, 10)."""
    total = np.zeros((len(x), N_OUT))
    for draw in draws:
        w1, b1, w2, b2 = layers(draw)
        logits = np.maximum(x @ w1 + b1, 0.0) @ w2 + b2
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        total += p / p.sum(axis=1, keepdims=True)
    return total / len(draws)


def measures(draws: Sequence[Array], x: Array, y: Array) -> dict[str, float]:
    """Return accuracy, mean log loss, and the expected calibration error over bins of confidence."""
    p = probabilities(draws, x)
    confidence, hit = p.max(axis=1), p.argmax(axis=1) == y
    bins = np.minimum((confidence * N_BINS).astype(int), N_BINS - 1)
    apart = np.bincount(bins, confidence, N_BINS) - np.bincount(bins, hit, N_BINS)
    loss = -float(np.log(p[np.arange(len(y)), y]).mean())
    return {"accuracy": float(hit.mean()), "loss": loss, "calibration": float(np.abs(apart).sum() / len(y))}


def elbo(mean: Array, sd: Array, x: Array, y: Array) -> float:
    """Return the ELBO of independent Gaussians on all rows, with priors N(0, 1), over some draws."""
    z = np.random.default_rng(0).standard_normal((N_ELBO, len(mean)))
    rows = np.arange(len(y))
    fit = np.mean([np.log(probabilities([mean + sd * draw], x)[rows, y]).sum() for draw in z])
    return float(fit - 0.5 * np.sum(mean**2 + sd**2 - 1.0) + np.log(sd).sum())


class Clock:
    """Processor seconds of a fit, without those of looking at it."""

    def __init__(self) -> None:
        self.not_counted = 0.0

    def seconds(self) -> float:
        """Return those since the process began."""
        return time.process_time() - self.not_counted

    def leave_out(self, since: float) -> None:
        """Leave out what came after ``since``, by ``time.process_time``."""
        self.not_counted += time.process_time() - since


def save(folder: Path, name: str, **values: object) -> None:
    """Write a result into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values, indent=1))
