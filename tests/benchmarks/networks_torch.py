"""The network of `networks.py` by ivon-opt, the authors' IVON for PyTorch, and by Adam; needs torch and ivon-opt.

Batches are those of passes through the rows in random orders. The prior N(0, 1) is a weight decay of 1 / 60,000 beside
the mean loss over rows.

Examples
--------
::

    python networks_torch.py --data DIR --runs DIR --method ivon-opt --batch 128
"""

import argparse
import resource
import time

from importlib.metadata import version
from pathlib import Path
from typing import Any

import ivon
import numpy as np
import torch

from networks_data import N_IN, N_OUT, N_PREDICTIVE, N_UNITS, SHOWN, Array, Clock, measures, read, save, start

#: Rates: that of the README of ivon-opt, falling as a cosine to 0, and that of Adam by default.
_RATES = {"ivon-opt": 0.1, "Adam": 1e-3}


def network(seed: int) -> torch.nn.Sequential:
    """Return the network at its start."""
    model = torch.nn.Sequential(torch.nn.Linear(N_IN, N_UNITS), torch.nn.ReLU(), torch.nn.Linear(N_UNITS, N_OUT))
    first = start(seed)
    with torch.no_grad():
        for layer, weights, biases in ((model[0], "w1", "b1"), (model[2], "w2", "b2")):
            layer.weight.copy_(torch.tensor(first[weights].T))
            layer.bias.copy_(torch.tensor(first[biases]))
    return model


def flat(model: torch.nn.Sequential) -> Array:
    """Return weights and biases in the order of the other script."""
    parts = (model[0].weight.T, model[0].bias, model[2].weight.T, model[2].bias)
    return np.concatenate([part.detach().numpy().ravel() for part in parts]).astype(float)


def optimiser(method: str, model: torch.nn.Sequential, n_rows: int) -> Any:
    """Return what takes the steps."""
    if method == "Adam":
        return torch.optim.Adam(model.parameters(), lr=_RATES[method], weight_decay=1.0 / n_rows)
    return ivon.IVON(model.parameters(), lr=_RATES[method], ess=n_rows, weight_decay=1.0 / n_rows)


def draws_of(method: str, model: torch.nn.Sequential, taken: Any) -> list[Array]:
    """Return the weights whose predictions are averaged."""
    if method == "Adam":
        return [flat(model)]
    found = []
    for _ in range(N_PREDICTIVE):
        with taken.sampled_params():
            found.append(flat(model))
    return found


def main() -> None:
    """Run one method, and save what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--method", choices=list(_RATES), required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    clock, began = Clock(), time.process_time()
    x, y = read(chosen.data, "train")
    x_test, y_test = read(chosen.data, "t10k")
    clock.leave_out(began)
    rows, digits = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.long)
    model = network(chosen.seed)
    taken = optimiser(chosen.method, model, len(y))
    n_iterations = max(SHOWN) * -(-len(y) // chosen.batch)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(taken, n_iterations) if chosen.method != "Adam" else None
    loss, first, found = torch.nn.functional.cross_entropy, None, {}
    for which in range(1, max(SHOWN) + 1):
        order = torch.tensor(np.random.default_rng([chosen.seed, which]).permutation(len(y)))
        for at in order.split(chosen.batch):
            if chosen.method == "Adam":
                taken.zero_grad()
                loss(model(rows[at]), digits[at]).backward()
            else:
                with taken.sampled_params(train=True):
                    taken.zero_grad()
                    loss(model(rows[at]), digits[at]).backward()
            taken.step()
            if falling is not None:
                falling.step()
            first = first or clock.seconds()
        if which in SHOWN:
            since = time.process_time()
            found[which] = measures(draws_of(chosen.method, model, taken), x_test, y_test)
            clock.leave_out(since)
    save(
        chosen.runs, f"{chosen.method}-{chosen.batch}-{chosen.seed}", method=chosen.method, batch=chosen.batch,
        first=first, a_pass=(clock.seconds() - (first or 0.0)) / max(SHOWN), found=found,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        environment=f"torch {version('torch')}, ivon-opt {version('ivon-opt')}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
