"""Three million flights as a stream: a logistic regression on batches of a Parquet file that is never all in memory.

Examples
--------
::

    python flights_stream.py --data DATA
    python flights_stream.py --data DATA --source once
    python flights_stream.py --data DATA --compare full.npz
"""

import argparse
import time

from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pymc as pm

import pymc_ngvi

#: Airports with an effect of their own, minutes from which on a flight is late.
N_AIRPORTS, LATE = 40, 15


class Flights:
    """The flights of a file, in batches of rows of equal length that lie in one row group each.

    Parameters
    ----------
    data : Path
        A folder with the file.
    n_rows : int
        Of a batch.
    """

    def __init__(self, data: Path, n_rows: int) -> None:
        self._file = pq.ParquetFile(data / "flights_3m.parquet")
        self._routes = pd.read_csv(data / "flights_routes.csv").set_index("route")
        self._airports = sorted(self._routes["origin"].unique())[:N_AIRPORTS]
        self._n_rows = n_rows
        groups = range(self._file.num_row_groups)
        self._places = [
            (group, start)
            for group in groups
            for start in range(0, self._file.metadata.row_group(group).num_rows, n_rows)
        ]

    @property
    def n_flights(self) -> int:
        """Flights in the file."""
        return self._file.metadata.num_rows

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        """Return a batch."""
        group, start = self._places[number]
        parts = self._file.iter_batches(self._n_rows, row_groups=[group])
        for _ in range(start // self._n_rows):
            next(parts)
        frame = next(parts).to_pandas().join(self._routes, on="route")
        return {"X": self._design(frame), "late": (frame["delay"] > LATE).to_numpy(dtype=int)}

    def _design(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the predictors: time of day, distance, date, day of the week, the first airports of the file."""
        angle = frame["minute"].to_numpy() / 1440 * 2 * np.pi
        day = frame["day"].to_numpy()
        columns = [
            np.ones(len(frame)),
            *(f(k * angle) for k in (1, 2) for f in (np.sin, np.cos)),
            np.log(frame["distance"].to_numpy(dtype=float) / 500),
            day / 100.0,
            *(day % 7 == k for k in range(1, 7)),
            *(frame["origin"].to_numpy() == name for name in self._airports),
        ]
        return np.column_stack(columns).astype(float)


class InOrder:
    """Batches that can be read several times, in their own order alone."""

    def __init__(self, flights: Flights) -> None:
        self._flights = flights

    def __iter__(self):
        """Begin a pass."""
        return (self._flights[number] for number in range(len(self._flights)))


#: By name, what gives the batches.
SOURCES = {"random": lambda flights: flights, "ordered": InOrder, "once": lambda flights: iter(InOrder(flights))}


def logistic(first: dict[str, np.ndarray], total_size: int) -> pm.Model:
    """Return the model, with a batch in the place of the data."""
    with pm.Model() as model:
        X, late = pm.Data("X", first["X"]), pm.Data("late", first["late"])
        beta = pm.Normal("beta", 0.0, 1.0, shape=first["X"].shape[1])
        pm.Bernoulli("late_", logit_p=pm.math.dot(X, beta), observed=late, total_size=total_size)
    return model


def main() -> None:
    """Fit, and say what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", choices=list(SOURCES), default="random")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", type=Path, help="mean and cov of a fit of all the data at once")
    arguments = parser.parse_args()
    before, clock, seconds = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
    flights = Flights(arguments.data, arguments.rows)
    model = logistic(flights[0], flights.n_flights)
    approx = pm.fit(
        method="ngvi",
        model=model,
        batches=SOURCES[arguments.source](flights),
        progressbar=False,
        random_seed=arguments.seed,
    )
    wall, cpu, after = time.perf_counter() - clock, time.process_time() - seconds, getrusage(RUSAGE_SELF).ru_maxrss
    print(f"{pymc_ngvi.__version__}, {arguments.source}, {arguments.rows:,} rows a batch, seed {arguments.seed}")
    print(approx.record.closing_line())
    print(approx.record.stream)
    print(f"{wall:.1f} s, {cpu:.1f} s of processor time, {(after - before) / 1e3:.0f} MB above the import")
    if arguments.compare:
        full = np.load(arguments.compare)
        sd = np.sqrt(np.diagonal(full["cov"]))
        off, wide = np.abs(approx.mean_flat - full["mean"]) / sd, approx.sd_flat / sd - 1.0
        print(
            f"means within {off.max():.2g} posterior sds of the full fit, sds within {100 * np.abs(wide).max():.2g} %"
        )


if __name__ == "__main__":
    main()
