"""What users get, against references that are independent of the package: see README.md."""

import sys

from pathlib import Path

#: Models are those of the benchmarks, which import each other by bare names.
_BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if _BENCHMARKS not in sys.path:
    sys.path.append(_BENCHMARKS)
