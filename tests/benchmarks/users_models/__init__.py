"""A battery of models of the kinds that users of PyMC and Bambi write, with simulated data; see `users.py`."""

from users_models import counts, groups, regressions, series, structured

#: Name -> (kind, function that makes the model).
MODELS = {
    f"{kind}: {name.replace('_', ' ')}": (kind, build)
    for kind, module in (
        ("regression", regressions),
        ("groups", groups),
        ("counts and survival", counts),
        ("series and fields", series),
        ("structured", structured),
    )
    for name, build in module.MODELS.items()
}

#: Models with the posterior, and the coordinates, of another one that NUTS samples in their place.
TWINS = {
    "structured: minibatch": lambda: structured.minibatch(None),
    "structured: dims regression": structured.plain_regression,
    "structured: dims groups": structured.plain_groups,
}
#: Models whose log p is known for a part of the data only.
PARTIAL = ("structured: minibatch",)
#: Improper posteriors: there is no reference, and the right answer is to say so.
IMPROPER = ("regression: separated flat", "structured: flat alone")
#: Posteriors with several modes: as many chains start from the prior.
SEVERAL_MODES = ("structured: label switching", "structured: factor analysis")
#: Variables whose elements can be exchanged: all have the same posterior.
EXCHANGEABLE = {"structured: label switching": "mu"}
#: Variables whose signs change together: both signs have the same density.
OF_EITHER_SIGN = {"structured: factor analysis": ("factor", "load")}


def _centred(posterior):
    """Return draws of centred effects from those of non-centred ones."""
    return posterior.assign(theta=posterior["mu"] + posterior["tau"] * posterior["z"]).drop_vars("z")


#: Models that NUTS hardly samples: a model that it does sample, and what makes draws of the one of those of the other.
SAMPLED_AS = {
    "groups: eight schools centred": (groups.eight_schools_noncentred, _centred),
    "groups: meta analysis": (groups.meta_analysis_noncentred, _centred),
}
