"""Compare with the record, or make it anew; see the package."""

import argparse
import logging
import sys
import time

from golden import files
from golden.cases import FITS, MODELS


def main():
    """Go through the parts and cases that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    parser.add_argument("--make", action="store_true", help="write what is measured in the place of the record")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--parts", nargs="+", choices=files.PARTS, default=list(files.PARTS))
    options = parser.parse_args()
    logging.getLogger("pymc").setLevel(logging.ERROR)
    records, n_wrong = {part: files.read(part) for part in options.parts}, 0
    cases = [(name, part) for part in options.parts for name in (FITS if part == "fits" else MODELS)]
    for name, part in (case for case in cases if options.only in case[0]):
        start, record = time.process_time(), records[part]
        new = files.measure(part, name)
        wrong = files.differ(part, record[name], new) if name in record else ["it is new"]
        n_wrong += bool(wrong)
        said = "".join(f"\n    {sentence}" for sentence in wrong)
        print(f"{part}, {name} ({time.process_time() - start:.1f} s){said}", flush=True)
        if options.make:
            record[name] = new
            files.write(part, record)
    print(f"{n_wrong} differ.")
    return 0 if options.make else min(n_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
