"""What messages share: suggestions for names, values cut short, and whose line of code a warning points at."""

import os
import re

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

import pymc.variational

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
#: Warnings point at the first caller outside these folders.
OURS = tuple(os.path.join(folder, "") for folder in (_PACKAGE, os.path.dirname(pymc.variational.__file__)))


def suggestion(name: object, valid: Iterable[str], also_called: Mapping[str, str] | None = None) -> str:
    """Return a sentence that lists the valid names, the one that was meant first if that can be told."""
    valid = list(valid)
    known = {_plain(v): v for v in valid}
    known |= {word: v for v, others in (also_called or {}).items() for word in others.split()}
    near = [known[_plain(name)]] if _plain(name) in known else get_close_matches(str(name), valid, n=1)
    return f"{f'did you mean {near[0]!r}? ' if near else ''}Valid: {', '.join(repr(v) for v in valid)}."


#: Things of one kind that a sentence names, at most.
N_NAMED = 3


def shortened(value: object, length: int = 80) -> str:
    """Return what a value prints as, cut off where that is long."""
    text = repr(value)
    return text if len(text) < length else text[: length - 3] + "..."


def percent(part: float, form: str = ".0f") -> str:
    """Return a part of 1 as a number of per cent."""
    return f"{100 * part:{form}} %"


def listed(names: Sequence[object], form: str = "{!r}", most: int = 5) -> str:
    """Return names for a sentence, the first few of many."""
    shown = ", ".join(form.format(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def checked_names(
    names: str | Iterable[str] | None,
    valid: Iterable[str],
    why: str = "which the model has not",
    option: str = "var_names",
) -> list[str]:
    """Return the names that an option has, each once, or all; raise ValueError for one that is not valid, for none."""
    valid = list(valid)
    names = [names] if isinstance(names, str) else list(dict.fromkeys(valid if names is None else names))
    if unknown := [name for name in names if name not in valid]:
        raise ValueError(f"{option} has {unknown[0]!r}, {why}: {suggestion(unknown[0], valid)}")
    if not names:
        raise ValueError(f"{option} is empty: name at least one variable, or leave it out.")
    return names


def _plain(name: object) -> str:
    return re.sub(r"[\W_]", "", str(name)).lower()
