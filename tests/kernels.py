"""Run tests with other kernels of OpenBLAS than the processor gets: python tests/kernels.py FILES OF TESTS.

OpenBLAS picks its kernels by the processor, and each adds in an order of its own: what rounding leaves differs. Where
another BLAS is in use, or none of the other kernels runs on this processor, there is nothing to try.
"""

import json
import os
import subprocess
import sys

#: In order of preference; by instruction sets: AVX2, AVX512, AVX; and those of ARM.
KERNELS = ("Haswell", "SkylakeX", "Sandybridge", "NEOVERSEN1", "ARMV8")
#: By another name, the same for the most part.
ALIKE = {"zen": "haswell"}
VARIABLE = "OPENBLAS_CORETYPE"
#: A worker of its own runs on each core.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
#: What each OpenBLAS in use has taken, after a product and a factorisation: kernels may be there, but not run, and some
#: versions crash in large products with the kernels of another processor.
PROBE = """
import json
import numpy as np
import scipy.linalg
import threadpoolctl
matrix = np.eye(1_000) + np.ones((1_000, 1)) @ np.ones((1, 1_000))
scipy.linalg.cholesky(matrix @ np.linalg.cholesky(matrix))
loaded = threadpoolctl.threadpool_info()
print(json.dumps([lib.get("architecture") for lib in loaded if lib["internal_api"] == "openblas"]))
"""


def taken(kernel=None):
    """Return the kernels of each OpenBLAS that NumPy and SciPy load, by default those of here; [] where none runs."""
    environment = {**os.environ, **ONE_THREAD} | ({} if kernel is None else {VARIABLE: kernel})
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else []


def other_kernel(own, taken=taken):
    """Return the first kernel that all OpenBLAS in use take when told, and that is in use in none of them, or None."""
    in_use = {ALIKE.get(name, name) for name in (str(name).lower() for name in own)}
    for kernel in KERNELS:
        found = {str(name).lower() for name in taken(kernel)}
        if found == {kernel.lower()} and kernel.lower() not in in_use:
            return kernel
    return None


def main(files):
    """Run the tests, and return the exit status of pytest."""
    own = taken()
    kernel = other_kernel(own)
    if kernel is None:
        what = f"takes {', '.join(map(str, own))} whatever {VARIABLE} says" if own else "is not OpenBLAS"
        print(f"The linear algebra of NumPy and SciPy {what}: no other kernels to try here.")
        return 0
    print(f"OpenBLAS takes {', '.join(map(str, own))} here; tests with {kernel}:", flush=True)
    options = ["-m", "not slow", "--numprocesses=logical", "--dist=loadfile", "--max-worker-restart=0"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    return subprocess.run(command, env={**os.environ, **ONE_THREAD, VARIABLE: kernel}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
