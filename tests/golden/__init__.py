"""What the package gives, written down: kinds of rows, patterns, and outcomes of fits.

A change that is to move none of it is compared with the record; one that means to makes the record anew, and its
differences are read. From the folder ``tests``::

    python -m golden            compare, and print what differs
    python -m golden --make     make the record anew
    python -m golden --only users --parts structure

`cases.py` says of what, `measured.py` how, `compare.py` within what.
"""

import sys

from pathlib import Path

#: The scripts of the papers and the users' battery import each other by bare names.
_BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.append(_BENCHMARKS)
