"""Make the figures of docs/gallery: ``python docs/img/gallery.py`` from the root of the clone.

Each page's own code is run, and its figure drawn from what that leaves; figures that the page quotes are printed. With
names of pages behind it (``ordinal irt``), these alone.
"""

import re
import sys
import time

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np

from drawing import STYLE, save
from matplotlib import pyplot
from scipy.special import expit

import pymc_ngvi  # noqa: F401  (imported before seconds are counted)

HERE = Path(__file__).parent
BLUE, ORANGE, GREY = "#0b5fa5", "#d95f02", "0.55"


class Page:
    """What the code of a page leaves: its variables as attributes, and draws of the posterior."""

    def __init__(self, name):
        text = (HERE.parent / "gallery" / f"{name}.md").read_text("utf-8")
        start = time.process_time()
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
            exec(code, self.__dict__)
        say(f"{name}: {time.process_time() - start:.1f} s of the processor, {self.approx.is_exact=}")
        self.posterior = self.approx.sample(4_000, random_seed=1).posterior

    def draws(self, name):
        """Return the draws of a variable, one after the other."""
        values = self.posterior[name].to_numpy()
        return values.reshape(-1, *values.shape[2:])


def band(draws):
    """Return the mean and the limits of central 89 % intervals."""
    return draws.mean(axis=0), *np.quantile(draws, [0.055, 0.945], axis=0)


def say(text):
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def rms(error):
    """Return a root mean square."""
    return float(np.sqrt(np.mean(error**2)))


def intervals(ax, at, draws, **options):
    """Draw means and intervals, at heights."""
    mean, low, high = band(draws)
    ax.errorbar(mean, at, xerr=[mean - low, high - mean], fmt="o", color=BLUE, **options)


def smooth(ax, x, draws, truth):
    """Draw a curve with its band, and the true one; print how often the band holds it."""
    mean, low, high = band(draws)
    ax.fill_between(x, low, high, color=BLUE, alpha=0.25, linewidth=0)
    ax.plot(x, mean, color=BLUE, label="mean and 89 % band")
    ax.plot(x, truth, "--", color=ORANGE, label="truth")
    say(f"  the band holds {np.mean((low <= truth) & (truth <= high)):.0%}")


def ordinal(page, ax):
    """Draw probabilities of ratings in both arms."""
    for shift, arm, colour in ((-0.18, 0, GREY), (0.18, 1, BLUE)):
        below = expit(page.draws("cut") - page.draws("treatment")[:, None] * arm)
        zero, one = np.zeros((len(below), 1)), np.ones((len(below), 1))
        mean, low, high = band(np.diff(np.hstack([zero, below, one])))
        at = np.arange(1, 6) + shift
        ax.bar(at, mean, 0.34, color=colour, label=("control", "treatment")[arm])
        ax.errorbar(at, mean, [mean - low, high - mean], fmt="none", color="black", linewidth=1)
    ax.set(xlabel="rating", ylabel="probability")
    ax.legend(loc="upper left")


def survival(page, ax):
    """Draw survival curves beside estimates of Kaplan and Meier."""
    t = np.linspace(0, 24, 100)
    for arm, colour, label in ((0, GREY, "control"), (1, BLUE, "drug")):
        scale = np.exp(page.draws("intercept") + page.draws("slope") * arm)
        mean, low, high = band(np.exp(-((t / scale[:, None]) ** page.draws("shape")[:, None])))
        ax.fill_between(t, low, high, color=colour, alpha=0.3, linewidth=0)
        ax.plot(t, mean, color=colour, label=label)
        mine = page.drug == arm
        died = np.sort(page.time[mine & (page.time < page.end)])
        at_risk = (page.observed[mine] >= died[:, None]).sum(axis=1)
        ax.step([0, *died], [1, *np.cumprod(1 - 1 / at_risk)], where="post", color=colour, linewidth=1, linestyle="--")
    ax.set(xlabel="months", ylabel="alive", ylim=(0, 1), xlim=(0, 24))
    ax.legend(title="dashed: Kaplan-Meier")


def counts(page, ax):
    """Draw observed counts and intervals of predicted ones."""
    rng = np.random.default_rng(1)
    rate, p, alpha = (page.draws(name)[:1_000, None] for name in ("rate", "p_fishing", "alpha"))
    mean = rate * page.hours
    new = rng.binomial(1, np.broadcast_to(p, mean.shape)) * rng.negative_binomial(alpha, alpha / (alpha + mean))
    numbers = np.arange(13)
    predicted, low, high = band((new[:, :, None] == numbers).sum(axis=1))
    seen = (page.fish[:, None] == numbers).sum(axis=0)
    say(f"  outside: {numbers[(seen < low) | (seen > high)]}")
    ax.bar(numbers, seen, color="0.8", label="observed")
    ax.errorbar(numbers, predicted, [predicted - low, high - predicted], fmt="o", color=BLUE, label="predicted, 89 %")
    ax.set(xlabel="fish", ylabel="visitors", xticks=numbers)
    ax.legend()


def mrp(page, ax):
    """Draw shares of states."""
    total = page.people.sum(axis=1)
    truth = (expit(page.support) * page.people).sum(axis=1) / total
    raw = page.yes.sum(axis=1) / np.maximum(page.asked.sum(axis=1), 1)
    draws = (page.draws("p") * page.people).sum(axis=2) / total
    mean, low, high = band(draws)
    say(f"  off: raw {rms(raw - truth):.3f}, MRP {rms(mean - truth):.3f}; held {sum((low <= truth) & (truth <= high))}")
    order = np.argsort(truth)
    at = np.arange(len(order))
    ax.errorbar(at, mean[order], [(mean - low)[order], (high - mean)[order]], fmt="o", color=BLUE, label="MRP, 89 %")
    ax.plot(at, raw[order], "x", color=GREY, label="raw share of the poll")
    ax.plot(at, truth[order], "_", color=ORANGE, markersize=9, markeredgewidth=2, label="truth")
    ax.set(xlabel="states, in order of the truth", ylabel="share", xticks=[])
    ax.legend(ncols=3, loc="upper left")
    ax.set_ylim(top=ax.get_ylim()[1] + 0.1)


def splines(page, ax):
    """Draw the curve of the spline."""
    ax.plot(page.x, page.y, ".", color="0.7")
    smooth(ax, page.x, page.draws("mean"), np.sin(page.x) * np.exp(-page.x / 8))
    ax.set(xlabel="x", ylabel="y")
    ax.legend()


def irt(page, ax):
    """Draw characteristic curves."""
    theta = np.linspace(-3, 3, 60)
    say(f"  abilities: {np.corrcoef(page.draws('ability').mean(axis=0), page.true_ability)[0, 1]:.2f}")
    for i, colour in zip(range(8), pyplot.get_cmap("viridis")(np.linspace(0, 0.85, 8)), strict=True):
        slope, at = page.draws("discrimination")[:, i, None], page.draws("difficulty")[:, i, None]
        mean, low, high = band(expit(slope * (theta - at)))
        if i in (0, 3, 7):
            ax.fill_between(theta, low, high, color=colour, alpha=0.2, linewidth=0)
        ax.plot(theta, mean, color=colour)
        ax.plot(theta, expit(page.slope[i] * (theta - page.true_difficulty[i])), "--", color=colour, linewidth=1)
    ax.set(xlabel="ability", ylabel="probability of a right answer", ylim=(0, 1))


def meta_analysis(page, ax):
    """Draw a forest plot."""
    at = np.arange(13)
    ax.errorbar(page.log_ratio, at + 0.2, xerr=1.6 * page.error, fmt="s", color=GREY, markersize=3, label="reported")
    intervals(ax, at - 0.2, page.draws("theta"), markersize=3, label="partially pooled")
    mean, low, high = band(page.draws("mean"))
    ax.fill([low, mean, high, mean], [13.5, 13.1, 13.5, 13.9], color=BLUE)
    ax.axvline(0, color="0.8", linewidth=1, zorder=0)
    ax.set(yticks=[0, 4, 9, 13.5], yticklabels=["trial 1", "trial 5", "trial 10", "mean"], ylim=(14.2, -0.8))
    ax.set(xlabel="log risk ratio, 89 % intervals", xlim=(-3, 1.5))
    ax.legend()


def spatial(page, axes):
    """Draw three maps."""
    risk = page.draws("risk").mean(axis=0)
    raw = page.cases / page.expected
    say(f"  off: raw {rms(raw - page.true_risk):.2f}, estimate {rms(risk - page.true_risk):.2f}")
    for ax, values, title in zip(
        axes, (raw, risk, page.true_risk), ("observed / expected", "estimate", "truth"), strict=True
    ):
        image = ax.imshow(values.reshape(8, 8), cmap="viridis", vmin=0.3, vmax=2.4)
        ax.set(xticks=[], yticks=[], title=title)
    ax.figure.colorbar(image, ax=axes, shrink=0.8, label="relative risk")


def gaussian_process(page, ax):
    """Draw the rate."""
    ax.plot(page.x, page.count, ".", color="0.7")
    smooth(ax, page.x, page.draws("rate"), np.exp(1 + np.sin(page.x) + 0.1 * page.x))
    ax.set(xlabel="x", ylabel="count")
    ax.legend()
    low, high = band(page.draws("ls"))[1:]
    say(f"  length scale: a factor of {high / low:.1f}")


def time_series(page, ax):
    """Draw the level and the forecast."""
    ax.plot(page.day, page.sales, ".-", color="0.75", linewidth=0.7)
    smooth(ax, page.day, page.draws("level"), page.true_level)
    mean, low, high = band(page.forecast.stack(sample=("chain", "draw")).to_numpy().T)
    ahead = page.days[112:]
    ax.fill_between(ahead, low, high, color=GREY, alpha=0.3, linewidth=0, label="forecast, 89 %")
    ax.plot(ahead, mean, color="black", linewidth=1, label="forecast, mean")
    ax.set(xlabel="day", ylabel="sales")
    ax.legend(ncols=2, loc="upper right")


def ab_tests(page, ax):
    """Draw lifts of countries."""
    ratio = np.log(page.orders / (page.visitors - page.orders))
    raw = ratio[:, 1] - ratio[:, 0]
    error = np.sqrt((1 / page.orders + 1 / (page.visitors - page.orders)).sum(axis=1))
    at = np.arange(10)
    ax.errorbar(raw, at + 0.18, xerr=1.6 * error, fmt="s", color=GREY, markersize=3, label="raw")
    intervals(ax, at - 0.18, page.draws("lift"), markersize=3, label="partially pooled")
    mean, low, high = band(page.draws("mean_lift"))
    ax.axvspan(low, high, color=BLUE, alpha=0.12, linewidth=0)
    say(f"  lift {mean:.2f}, {low:.2f} to {high:.2f}; positive {np.mean(page.draws('mean_lift') > 0):.3f}")
    ax.axvline(0, color="0.8", linewidth=1, zorder=0)
    ax.set(yticks=at, yticklabels=list("ABCDEFGHIJ"), ylim=(9.7, -0.7), xlabel="lift, log odds, 89 % intervals")
    ax.set_ylabel("country")
    ax.legend(loc="upper left")


FIGURES = (
    ordinal, survival, counts, mrp, splines, irt, meta_analysis, spatial, gaussian_process, time_series, ab_tests
)  # fmt: skip


if __name__ == "__main__":
    (HERE / "gallery").mkdir(exist_ok=True)
    with pyplot.rc_context(STYLE | {"legend.title_fontsize": 8, "lines.markersize": 4}):
        for draw in FIGURES:
            if sys.argv[1:] and draw.__name__ not in sys.argv[1:]:
                continue
            page = Page(draw.__name__)
            n = 3 if draw is spatial else 1
            figure, axes = pyplot.subplots(1, n, figsize=(6.4, 2.9), layout="constrained")
            draw(page, axes)
            save(figure, HERE / "gallery" / f"{draw.__name__}.png", dpi=200)
