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

from networks_data import N_IN, N_OUT, N_PREDICTIVE, N_UNITS, SHOWN, Array, Clock, elbo, measures, read, save, start

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


def optimiser(method: str, model: torch.nn.Sequential, n_rows: int, given: dict[str, float]) -> Any:
    """Return what takes the steps."""
    if method == "Adam":
        return torch.optim.Adam(model.parameters(), weight_decay=1.0 / n_rows, **given)
    return ivon.IVON(model.parameters(), ess=n_rows, weight_decay=1.0 / n_rows, **given)


def draws_of(method: str, model: torch.nn.Sequential, taken: Any) -> list[Array]:
    """Return the weights whose predictions are averaged."""
    if method == "Adam":
        return [flat(model)]
    found = []
    for _ in range(N_PREDICTIVE):
        with taken.sampled_params():
            found.append(flat(model))
    return found


def spread(taken: Any, n_rows: int) -> Array:
    """Return the standard deviations of ivon-opt in the order of the other script."""
    group = taken.param_groups[0]
    sd = (1.0 / (n_rows * (group["hess"] + group["weight_decay"])).sqrt()).numpy().astype(float)
    parts = np.split(sd, np.cumsum([N_IN * N_UNITS, N_UNITS, N_UNITS * N_OUT]))
    return np.concatenate(
        [parts[0].reshape(N_UNITS, N_IN).T.ravel(), parts[1], parts[2].reshape(N_OUT, -1).T.ravel(), parts[3]]
    )


def main() -> None:
    """Run one method, and save what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--method", choices=list(_RATES), required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    for name in ("lr", "hess-init", "beta2"):
        parser.add_argument(f"--{name}", type=float)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    clock, began = Clock(), time.process_time()
    x, y = read(chosen.data, "train")
    x_test, y_test = read(chosen.data, "t10k")
    clock.leave_out(began)
    rows, digits = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.long)
    model = network(chosen.seed)
    set_by_hand = {name: value for name in ("hess_init", "beta2", "lr") if (value := getattr(chosen, name)) is not None}
    taken = optimiser(chosen.method, model, len(y), {"lr": _RATES[chosen.method]} | set_by_hand)
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
    a_pass = (clock.seconds() - (first or 0.0)) / max(SHOWN)
    of_q = {}
    if chosen.method != "Adam":
        sd = spread(taken, len(y))
        of_q = {"elbo": elbo(flat(model), sd, x, y), "sd": float(np.median(sd))}
    save(
        chosen.runs, "-".join(map(str, (chosen.method, chosen.batch, chosen.seed, *set_by_hand.values()))),
        method=chosen.method, batch=chosen.batch, set_by_hand=set_by_hand,
        first=first, a_pass=a_pass, found=found,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **of_q, environment=f"torch {version('torch')}, ivon-opt {version('ivon-opt')}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
