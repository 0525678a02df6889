# %% [markdown]
# # A posterior that is updated each day
#
# A chain of shops wants to know each morning what each shop sells on a usual day, and how much they differ. The model
# has been fitted to eight weeks of data. Each night brings a row for each shop; now and then, a shop opens. A fit of
# all rows each night would do, but needs all rows, and all of its seconds. `approx.update` takes the new rows alone.

# %%
import tempfile
import time
import warnings

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import pymc_ngvi

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The data
#
# Sales of 60 shops on 56 days, and of the 21 days after these. On day 63 another shop opens. Each row is a shop on a
# day.

# %%
N_SHOPS, N_DAYS, N_LATER, OPENS = 60, 56, 21, 63
rng = np.random.default_rng(4)
level = rng.normal(3.0, 0.4, size=N_SHOPS + 1)
level[N_SHOPS] = 3.6
weekday = np.array([0.0, -0.05, 0.0, 0.1, 0.3, 0.55, -0.6])


def sold_on(day):
    """Return the rows of a day."""
    shop = np.arange(N_SHOPS + (day >= OPENS))
    mean = np.exp(level[shop] + weekday[day % 7])
    return pd.DataFrame({"day": day, "shop": shop, "sold": rng.negative_binomial(8, 8 / (8 + mean))})


rows = pd.concat([sold_on(day) for day in range(N_DAYS + N_LATER)], ignore_index=True)
history = rows[rows.day < N_DAYS]
print(f"{len(history):,} rows in the history, {len(rows) - len(history):,} later")

# %% [markdown]
# ## The fit


# %%
def sales_model(data):
    """Return the model of some rows."""
    with pm.Model(coords={"shop": range(int(data.shop.max()) + 1), "weekday": list("MTWTFSS")}) as model:
        shop = pm.Data("shop_of", data.shop.to_numpy())
        day = pm.Data("weekday_of", data.day.to_numpy() % 7)
        mu, sd = pm.Normal("mu", 3, 1), pm.HalfNormal("sd", 1)
        usual = pm.Normal("usual", mu, sd, dims="shop")
        effect = pm.Normal("effect", 0, 0.5, shape=6)
        spread = pm.Gamma("spread", 2, 0.2)
        log_mean = usual[shop] + pm.math.concatenate([[0.0], effect])[day]
        pm.NegativeBinomial("sold", mu=pm.math.exp(log_mean), alpha=spread, observed=data.sold.to_numpy())
    return model


start = time.perf_counter()
approx = pm.fit(method="ngvi", model=sales_model(history), random_seed=1, progressbar=False)
seconds_of_fit = time.perf_counter() - start
print(approx.record.posterior)
print(approx.summary())

# %% [markdown]
# The posterior is saved. The file holds no rows: what a night needs of the eight weeks is in the draws of the global
# parameters, and in what is known of each shop given these.

# %%
folder = tempfile.TemporaryDirectory()
file = Path(folder.name) / "sales.nc"
approx.save(file)
print(f"{file.stat().st_size / 2**20:.1f} MiB")

# %% [markdown]
# ## A night
#
# In another process, the model is built with the rows since the fit alone. It has to have all shops that were in the
# fit; that it has other rows is what the warning says, which is left out here.


# %%
def as_new_data(data):
    """Return rows as `update` takes them; labels that the fit does not know are new shops."""
    labels = range(max(N_SHOPS, int(data.shop.max()) + 1))
    return {
        "shop_of": data.shop.to_numpy(), "weekday_of": data.day.to_numpy() % 7, "shop": labels,
        "sold": data.sold.to_numpy(),
    }  # fmt: skip


first_night = rows[rows.day == N_DAYS]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    loaded = pymc_ngvi.load(file, sales_model(first_night))
newer = loaded.update(as_new_data(first_night))
print(newer.summary())

# %% [markdown]
# The same update of the fit that is in memory gives the same bits:

# %%
print(newer.checks.khat == approx.update(as_new_data(first_night)).checks.khat)

# %% [markdown]
# ## Three weeks
#
# Each night, all rows since the fit are given: an update is one of the fit, not of the update before. So errors do not
# add up, and the verdict says when there are too many new rows for the draws of the fit.

# %%
nights = []
shown = {shop: [] for shop in (7, N_SHOPS)}
for day in range(N_DAYS, N_DAYS + N_LATER):
    since = rows[(rows.day >= N_DAYS) & (rows.day <= day)]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where a fit is due, the table says so
        newer = approx.update(as_new_data(since), random_seed=1)
    seconds = time.perf_counter() - start
    nights.append(
        {
            "day": day, "new rows": len(since), "seconds": round(seconds, 2), "k-hat": round(newer.checks.khat, 2),
            "worth": round(newer.checks.effective_size), "reliable": newer.checks.is_reliable,
            "log density": newer.log_predictive_density.value if newer.checks.weights_help else np.nan,
        }
    )  # fmt: skip
    usual = newer.sample(2_000, var_names="usual").posterior["usual"]
    for shop, found in shown.items():
        if shop in usual["shop"]:
            found.append((day, *np.exp(usual.sel(shop=shop).quantile([0.03, 0.5, 0.97]).values)))
nights = pd.DataFrame(nights)
nights[::4]

# %% [markdown]
# The draws of the fit are worth less each night, as the nine global parameters are known ever better, and weights
# differ more. From the night on which `reliable` is False, a fit of all rows is due; the file is then written anew.
#
# ## What is seen of the shops

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4))
for ax, (shop, found) in zip(axes, shown.items(), strict=True):
    day, lower, median, upper = np.array(found).T
    ax.fill_between(day, lower, upper, color="C0", alpha=0.25, lw=0)
    ax.plot(day, median, color="C0")
    ax.axhline(np.exp(level[shop]), color="C1")
    ax.set(title=f"shop {shop}", xlabel="day", ylabel="sold on a usual Monday", ylim=(0, None), xticks=range(56, 78, 7))
figure.tight_layout()

# %% [markdown]
# Medians and 94 % intervals; the orange line is the truth. Shop 7 is known from eight weeks, and moves little. Shop 60
# opens on day 63: on the first evening its level is known from the other shops and from one row, and each night adds
# another.
#
# ## Beside fits of all rows

# %%
last = nights[nights.reliable].iloc[-1]
upto = rows[rows.day <= last.day]
start = time.perf_counter()
again = pm.fit(method="ngvi", model=sales_model(upto), random_seed=2, progressbar=False)
seconds_again = time.perf_counter() - start
newer = approx.update(as_new_data(upto[upto.day >= N_DAYS]), random_seed=1)
names = ["mu", "sd", "effect", "spread", "usual"]
ours, theirs = (of.sample(4_000, var_names=names, random_seed=3).posterior for of in (newer, again))


def difference(name):
    """Return the largest difference of means of a variable, in posterior standard deviations."""
    gap = ours[name].mean(("chain", "draw")) - theirs[name].mean(("chain", "draw"))
    return float((abs(gap) / theirs[name].std(("chain", "draw"))).max())


apart = {name: round(difference(name), 3) for name in names}
print(f"day {last.day}: {len(upto) - len(history):,} new rows, update {last.seconds} s, fit {seconds_again:.1f} s")
print("largest difference of means, in posterior standard deviations:", apart)

# %% [markdown]
# ## A day that does not go with the model
#
# The log density of a day's rows given all before, from one night's update to the next, says how well the day went with
# what was known. Here is one more day, on which a delivery failed in shop 7.

# %%
failed = sold_on(N_DAYS)
failed.loc[failed.shop == 7, "sold"] = 0
usual_day = approx.update(as_new_data(first_night)).log_predictive_density
odd_day = approx.update(as_new_data(failed)).log_predictive_density
print(f"log density of a usual day {usual_day.value:.1f}, of the day with the failure {odd_day.value:.1f}")
single = {
    shop: approx.update(as_new_data(failed[failed.shop == shop])).log_predictive_density.value for shop in range(10)
}
print({shop: round(value, 1) for shop, value in single.items()})

# %%
assert approx.is_exact
assert nights.reliable[:7].all()
assert nights.seconds.median() < 0.5 * seconds_of_fit
assert max(apart.values()) < 0.2
assert min(single, key=single.get) == 7

# %% [markdown]
# ## What to read next
#
# - `12_simulation_study`: many fits of one model.
# - `04_thousands_of_groups`: one fit of many groups, and how it is judged.
