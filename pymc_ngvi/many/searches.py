"""What is said of fits that were not searched for other modes, by those that were."""

from collections.abc import Sequence

from pymc_ngvi.many.fitting import Row


def judge_unsearched(rows: Sequence[Row]) -> str:
    """Say of each fit whose search was left out what those found that were searched.

    Where these have found other modes, it is not reliable for want of knowing: its verdict is "not judged".

    Returns
    -------
    str
        A warning; empty where there is none to give.
    """
    left_out = [row for row in rows if row.left_out and not row.error]
    searched = [row for row in rows if row.about.get("searched")]
    having = [row.index for row in searched if row.about["other_modes"]]
    for row in left_out:
        if having:
            row.about["sentence"] += f" Not searched for other modes, which {_part(having, searched)} have."
            if row.about["verdict"] == "reliable":
                row.about["verdict"] = "not judged"
        else:
            row.about["sentence"] += f" Not searched for other modes: {len(searched):,} fits were, which have none."
    if not (having and left_out):
        return ""
    return (
        f"{_part(having, searched)} that were searched for other modes have some (fit {having[0]} is the first). The "
        f"{len(left_out):,} others were not searched, and are not judged: search='each' looks in all."
    )


def _part(having: Sequence[int], searched: Sequence[Row]) -> str:
    return f"{len(having):,} of {len(searched):,} fits"
