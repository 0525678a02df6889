# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Three million flights
#
# When is a flight late, and where? Every airport has an effect as origin and one as destination, and so has every hour
# of the week. The data are in ten parts, and two processes of a Dask cluster hold five each. This process holds none.
# One of the two is killed on the way, and the answer is the same to the last bit.
#
# The flights are domestic ones in the United States from January to June 2001, by the Bureau of Transportation
# Statistics: `flights-3m.parquet` of the package `vega-datasets`, with a table of routes. They are not part of this
# repository. If the environment variable `FLIGHTS` names a folder that has them, they are read from there. Otherwise,
# as in continuous integration, 16,000 flights between 40 airports are simulated.

# %%
import logging
import os
import resource
import signal
import time

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

from distributed import Client, LocalCluster
from scipy import special

import pymc_ngvi

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

DATA = os.environ.get("FLIGHTS")
DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
LATE = 15  # minutes
airports = pd.read_csv(Path("data") / "flights_airports.csv")
if DATA is None:
    airports = airports.sample(40, random_state=1).reset_index(drop=True)


# %% [markdown]
# ## A shard
#
# A shard is a part of the data that is read and evaluated in one place: here, a row group of the file. First a function
# that reads it. Day 0 was a Monday.


# %%
# The flights.
def flights(part):
    """Return the flights of a part of the data."""
    return simulated(part) if DATA is None else recorded(Path(DATA), part)


def recorded(folder, part):
    """Return a row group of the file."""
    import pyarrow.parquet as pq

    rows = pq.ParquetFile(folder / "flights_3m.parquet").read_row_group(part).to_pandas()
    routes = pd.read_csv(folder / "flights_routes.csv")
    number = pd.Series(airports.index, airports["iata"])
    ends = {end: number[routes[end]].to_numpy()[rows["route"]] for end in ("origin", "destination")}
    distance = routes["distance"].to_numpy()[rows["route"]]
    late = (rows["delay"] > LATE).to_numpy(dtype=int)
    return pd.DataFrame({**ends, "distance": distance, "day": rows["day"], "hour": rows["minute"] // 60, "late": late})


TRUTH = {"sd": np.array([0.35, 0.35, 0.7]), "level": -1.5, "slope": 0.1}


def simulated(part, n=4_000):
    """Return flights that were never made."""
    common, own = np.random.default_rng(0), np.random.default_rng([1, part])
    effects = [sd * common.standard_normal(k) for sd, k in zip(TRUTH["sd"], [40, 40, 168], strict=True)]
    size = common.dirichlet(np.full(40, 0.5))
    origin, destination = own.choice(40, size=(2, n), p=size)
    hour, day = own.integers(5, 24, n), np.sort(own.integers(45 * part, 45 * part + 45, n))
    distance = own.integers(100, 2_500, n)
    eta = TRUTH["level"] + TRUTH["slope"] * np.log(distance / 500)
    eta = eta + effects[0][origin] + effects[1][destination] + effects[2][day % 7 * 24 + hour]
    late = (own.random(n) < special.expit(eta)).astype(int)
    parts = {"origin": origin, "destination": destination, "distance": distance, "day": day, "hour": hour, "late": late}
    return pd.DataFrame(parts)


# %% [markdown]
# And one that makes the model. It is called wherever a shard is, so it makes the same effects each time, of all
# airports and hours, whether the shard has flights of these or not. Had each shard numbered its own airports, shapes
# would differ, and the fit would say so.


# %%
# The model.
def model_of(rows):
    """Return the model of some flights."""
    coords = {"airport": airports["iata"], "weekday": DAYS, "hour": range(24), "of": ["origin", "destination", "hour"]}
    with pm.Model(coords=coords) as model:
        level = pm.Normal("level", -1.5, 1)
        slope = pm.Normal("slope", 0, 1)
        sd = pm.HalfNormal("sd", 1, dims="of")
        origin = pm.Normal("origin", 0, sd[0], dims="airport")
        destination = pm.Normal("destination", 0, sd[1], dims="airport")
        hour = pm.Normal("hour_of_week", 0, sd[2], dims=("weekday", "hour"))
        eta = level + slope * np.log(rows["distance"].to_numpy() / 500)
        eta = eta + origin[rows["origin"].to_numpy()] + destination[rows["destination"].to_numpy()]
        eta = eta + hour[rows["day"].to_numpy() % 7, rows["hour"].to_numpy()]
        pm.Bernoulli("late", logit_p=eta, observed=rows["late"].to_numpy())
    return model


def build(part):
    """Return the model of a shard."""
    return model_of(flights(part))


# %% [markdown]
# ## A sample
#
# A cluster of two processes on this machine, each with one thread. On a real one, only these three lines are others.
# `shards.map` applies a function to each shard where it is, and brings back what it returns: 2,000 flights of each.


# %%
# The sample.
def sample(part, model):
    """Return 2,000 flights."""
    return flights(part).sample(2_000, random_state=part)


# %%
options = {"dashboard_address": "localhost:0", "silence_logs": logging.CRITICAL}
cluster = LocalCluster(n_workers=2, threads_per_worker=1, **options)
client = Client(cluster)
shards = pymc_ngvi.Shards(build, range(4 if DATA is None else 10), client)
few = pd.concat([rows for _, rows in shards.map(sample)])
of_few = pm.fit(method="ngvi", model=model_of(few), random_seed=1, progressbar=False)
print(f"{len(few):,} flights")
print(of_few.record.posterior)

# %% [markdown]
# ## All flights
#
# The fit begins where that of the sample ended, which saves passes. After the second iteration, one of the two
# processes is killed. Dask starts another, which reads its shards again.


# %%
def megabytes():
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


killed = []


def kill(approx, losses, iteration):
    """Kill a process after the second iteration."""
    if iteration == 2:
        killed.append(next(iter(cluster.workers.values())).pid)
        os.kill(killed[-1], signal.SIGKILL)


start, memory = time.perf_counter(), megabytes()
options = {"posterior": "gaussian", "start": of_few.gaussian, "random_seed": 1, "progressbar": False}
approx = pm.fit(method="ngvi", shards=shards, callbacks=[kill], **options)
seconds, more, n_passes = time.perf_counter() - start, megabytes() - memory, shards.n_passes
print(f"{approx.status} after {seconds:.0f} s: {approx.n_iterations} iterations, {n_passes} passes")
print(f"ELBO {approx.elbo}, gap {approx.gap:.3f} nats, {approx.record.family} precision of {len(approx.mean_flat)}")
print(f"memory of this process: {memory:.0f} MB before the fit, {more:.0f} MB more in it")

# %% [markdown]
# Seconds are those of the machine that ran the notebook, whatever else it did; passes are the same anywhere.
#
# ## When
#
# The probability that a flight of 500 miles between two typical airports is late, by hour and weekday. Hours are those
# of the actual departure: few flights leave at three in the morning, and most of these should have left long before.

# %%
draws = approx.sample(1_000, chains=1, random_seed=2, log_p=False)["posterior"].sel(chain=0)
print(approx.summary(var_names=["level", "slope", "sd"]))

# %%
of_hours = special.expit(draws["level"] + draws["hour_of_week"])
probability = of_hours.mean("draw").to_numpy()
fig, ax = plt.subplots(figsize=(10, 3.4), layout="constrained")
shown = ax.pcolormesh(100 * probability, cmap="magma_r", vmin=0, edgecolors="white", linewidth=0.5)
for (day, hour), value in np.ndenumerate(100 * probability):
    colour = "white" if value > 0.5 * shown.get_clim()[1] else "0.2"
    ax.text(hour + 0.5, day + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
ax.set(title="probability of a delay of more than 15 minutes, in %", xlabel="hour of departure")
ax.set(xticks=np.arange(24) + 0.5, xticklabels=range(24), yticks=np.arange(7) + 0.5, yticklabels=DAYS)
ax.invert_yaxis()
ax.tick_params(length=0)
_ = fig.colorbar(shown, pad=0.01)

# %% [markdown]
# ## Where
#
# The effects of airports, as the probability that a flight which would be late with probability .2 from, or to, a
# typical airport is late. How many flights an airport has is counted where the flights are: `shards.map` applies a
# function to each shard and brings back what it returns.


# %%
def counts(part, model):
    """Return the flights of each airport, by origin and by destination."""
    rows = flights(part)
    return np.stack([np.bincount(rows[end], minlength=len(airports)) for end in ("origin", "destination")])


n_flights = sum(count for _, count in shards.map(counts))
print(f"{n_flights[0].sum():,} flights")

# %%
inside = airports["latitude"].between(24, 50) & airports["longitude"].between(-125, -66)
fig, axes = plt.subplots(1, 2, figsize=(13, 4.3), layout="constrained")
for ax, end, count in zip(axes, ["origin", "destination"], n_flights, strict=True):
    effect = 100 * special.expit(special.logit(0.2) + draws[end]).mean("draw").to_numpy()
    at = airports[inside].assign(effect=effect[inside], count=count[inside]).query("count > 0").sort_values("count")
    size = 4 + 500 * at["count"] / at["count"].max()
    drawn = ax.scatter(
        at["longitude"], at["latitude"], size, at["effect"], cmap="RdBu_r", vmin=10, vmax=30, edgecolors="0.4", lw=0.4
    )
    for _, airport in at.iloc[-16:].iterrows():
        ax.annotate(airport["iata"], (airport["longitude"], airport["latitude"]), ha="center", va="center", fontsize=7)
    ax.set(title=f"as {end}", xticks=[], yticks=[], aspect=1.28)
    for side in ax.spines.values():
        side.set_visible(False)
_ = fig.colorbar(drawn, ax=axes, label="probability of a delay, in %", shrink=0.8, extend="both")

# %% [markdown]
# ## What the model does not know
#
# Predictions, made where the flights are: for each day, the share of flights that were late, and what the model says of
# the same flights. A shard returns two numbers for each of its days.


# %%
mean = {name: values.mean("draw").to_numpy() for name, values in draws.items()}


def by_day(part, model):
    """Return the flights of each day, how many were late, and how many the model expects to be."""
    rows = flights(part)
    eta = mean["level"] + mean["slope"] * np.log(rows["distance"].to_numpy() / 500)
    eta = eta + mean["origin"][rows["origin"]] + mean["destination"][rows["destination"]]
    expected = special.expit(eta + mean["hour_of_week"][rows["day"] % 7, rows["hour"]])
    return rows.assign(expected=expected, n=1).groupby("day")[["n", "late", "expected"]].sum()


days = pd.concat([table for _, table in shards.map(by_day)]).groupby("day").sum()
dates = pd.Timestamp("2001-01-01") + pd.to_timedelta(days.index, unit="D")
observed, expected = 100 * days["late"] / days["n"], 100 * days["expected"] / days["n"]

fig, ax = plt.subplots(figsize=(10, 3), layout="constrained")
ax.plot(dates, observed, ".-", color="0.5", linewidth=0.8, label="observed")
ax.plot(dates, expected, color="C3", label="by the model")
ax.set(ylabel="late flights, in %", ylim=(0, None))
_ = ax.legend(frameon=False, ncols=2)

# %% [markdown]
# Days differ by more than hour, weekday and airports say. (The last one has the first minutes of 1 July alone.) Flights
# of a day share its weather, and the model takes them
# for independent. So its standard deviations are those of an average over these six months, and not of a forecast for
# a day. An effect of each day would be the next thing to add.

# %% [markdown]
# ## Beside NUTS
#
# Crossed effects are where a Gaussian of everything at once can go wrong: it takes standard deviations of effects for
# better known than they are. With three million flights each effect is known well, and little is left of this. The
# sample is small enough for NUTS. `data/flights_nuts.csv` has what it says (`data/flights_nuts.py` makes it).

# %%
names = ["origin", "destination", "hour"]
own = of_few.sample(4_000, chains=1, random_seed=3, log_p=False)["posterior"]["sd"].sel(chain=0)
gaussian = of_few.gaussian.sample(4_000, chains=1, random_seed=3, log_p=False)["posterior"]["sd"].sel(chain=0)
scales = pd.DataFrame(index=names)
for name, values in {"all flights": draws["sd"], "sample, nested": own, "sample, Gaussian": gaussian}.items():
    scales[name, "mean"], scales[name, "sd"] = values.mean("draw").to_numpy(), values.std("draw").to_numpy()
if DATA is not None:
    nuts = pd.read_csv(Path("data") / "flights_nuts.csv").set_index("variable").loc[names]
    scales["sample, NUTS", "mean"], scales["sample, NUTS", "sd"] = nuts["mean"], nuts["sd"]
else:
    scales["truth", "mean"], scales["truth", "sd"] = TRUTH["sd"], 0.0
scales.columns = pd.MultiIndex.from_tuples(scales.columns)
scales.round(3)

# %% [markdown]
# Nested posterior and NUTS agree on the sample; the Gaussian of the sample has a third of their standard deviations for
# the scales of airports.
#
# All flights give larger scales than the sample. That has 11 flights that leave between two and four in the morning,
# whose effects are the largest, and few of small airports. What it says of the scale of all effects rests on those that
# it sees, and on the assumption that the others come from the same normal distribution.

# %% [markdown]
# ## Checks
#
# What the text above says, as assertions. Once more with nobody killed is for the simulated flights alone; for three
# million, `tests/benchmarks/results/shards.md` compares the bits.

# %%
assert approx.converged
assert len(killed) == 1
assert of_few.is_nested
assert of_few.checks.is_reliable
assert n_passes <= 15
assert n_flights[0].sum() == days["n"].sum() == (16_000 if DATA is None else 3_000_000)
assert np.isclose(days["late"].sum(), days["expected"].sum(), rtol=0.03)
if DATA is not None:
    error = (scales["sample, nested", "mean"] - scales["sample, NUTS", "mean"]).abs() / scales["sample, NUTS", "sd"]
    assert error.max() < 0.2  # four Monte Carlo errors of NUTS, at most
else:
    again = pm.fit(method="ngvi", shards=shards, **options)
    assert np.array_equal(again.mean_flat, approx.mean_flat)
    assert (np.abs(draws["sd"].mean("draw") - TRUTH["sd"]) < 5 * own.std("draw")).all()
client.close()
cluster.close()

# %% [markdown]
# ## What to read next
#
# - `docs/shards.md`: shards on a laptop and on a cluster, what has to be the same in all, what is sent.
# - `tests/benchmarks/results/shards.md`: three million flights beside one process, with workers that are killed.
# - `08_latent_gaussian`: nested posteriors.
