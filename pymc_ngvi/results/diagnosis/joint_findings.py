"""What was found of the joint density of draws, in sentences."""

import numpy as np

from pymc_ngvi.results.diagnosis.cures import Context
from pymc_ngvi.results.diagnosis.distances import Distances
from pymc_ngvi.results.diagnosis.finding import Finding
from pymc_ngvi.results.diagnosis.findings import stands_out
from pymc_ngvi.results.diagnosis.joint_drift import JointDrift
from pymc_ngvi.results.diagnosis.moment_drift import MomentDrift


def of_joint(context: Context, joint: JointDrift, moments: MomentDrift) -> list[Finding]:
    """Say where log p drifts: of a minority of draws; or of all, or of most, where no coordinate tells as much."""
    cure, n = context.shape_cure(), len(joint.rises)
    if joint.has_minority:
        text = (
            f"A part of the draws is far from the posterior: as they are moved towards it, log p rises by more than "
            f"{joint.far:.0f} nats at {n:,} of {joint.n_draws:,} ({100 * n / joint.n_draws:.0f} %), by "
            f"{np.median(joint.rises):,.0f} in the median of these, and falls as far at {joint.n_falls:,}."
        )
        return [Finding(text, cure, True)]
    if stands_out(moments):
        return []
    if joint.is_much(moments.log_p):
        drift = f"E[log p] drifts by {moments.log_p} nats"
    elif joint.is_much(joint.location):
        drift = f"log p of most draws drifts by {joint.location} nats"
    else:
        return []
    text = (
        f"The joint density is off: {drift} as draws are moved, where its standard deviation is about "
        f"{np.sqrt(0.5 * joint.n_dim):.1f}, though no single coordinate stands out."
    )
    return [Finding(text, cure, True)]


def of_distances(context: Context, distances: Distances) -> list[Finding]:
    """Say where draws are not as far from their conditional Gaussian as they should be."""
    if not distances.are_off:
        return []
    text = (
        f"{distances.what[0].upper()}{distances.what[1:]} are not those of their conditional Gaussian: their squared "
        f"distance from its mean is {distances.mean:,.3g} on average and {distances.median:,.3g} in the median, where "
        f"{distances.n_local:,} and {distances.expected_median:,.3g} are right."
    )
    return [Finding(text, context.shape_cure(), True)]
