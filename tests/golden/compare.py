"""Whether what is measured is what was recorded, and where not."""

import numpy as np

#: Standard deviations that a moment may move by, and nats of ELBO, or the part of a large one that is rounding.
MOMENT, NATS, ROUNDING = 1e-3, 1e-5, 1e-9
#: Numbers that are to stay.
NUMBER = 1e-6


def structures_differ(old, new):
    """Return how two structures differ, in sentences."""
    return [
        f"{name} was {old.get(name)}, is {new.get(name)}" for name in _names(old, new) if old.get(name) != new.get(name)
    ]


def fits_differ(old, new):
    """Return the same of the outcomes of fits, or of arrays."""
    if "choice" not in old:
        return [
            f"{name} was {old.get(name)}, is {new.get(name)}"
            for name in _names(old, new)
            if not _near(old.get(name, [np.nan]), new.get(name, [np.inf]), NUMBER * (1.0 + np.abs(old.get(name, 0.0))))
        ]
    apart = {"elbo", "elbo within", "mean", "sd", "error"}
    found = structures_differ(*({k: v for k, v in part.items() if k not in apart} for part in (old, new)))
    nats = max(NATS, ROUNDING * abs(old["elbo"]), old["elbo within"])
    if not _near(old["elbo"], new["elbo"], nats):
        found.append(f"the ELBO was {old['elbo']:.6f}, is {new['elbo']:.6f}")
    most = np.maximum(MOMENT, old["error"]) * np.asarray(old["sd"])
    for name in ("mean", "sd"):
        if not _near(old[name], new[name], most):
            with np.errstate(all="ignore"):
                off = np.max(np.abs(np.subtract(new[name], old[name])) / old["sd"])
            found.append(f"a {name} moved by {off:.2g} sd")
    return found


def _names(old, new):
    return [*old, *(name for name in new if name not in old)]


def _near(old, new, most):
    old, new = np.asarray(old, dtype=float), np.asarray(new, dtype=float)
    if old.shape != new.shape:
        return False
    with np.errstate(invalid="ignore"):
        return bool(np.all((np.abs(new - old) <= most) | (old == new) | (np.isnan(old) & np.isnan(new))))
