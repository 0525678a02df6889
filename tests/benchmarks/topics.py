"""The correlated topic model, by PG-SVI and by its rivals, as in section 7.2 of Khan et al. (2016).

Topics of the Associated Press corpus are learnt from one half of its documents; words of the other half are
predicted. The score is that of the paper's equation 20: minus the mean log probability of a word in the second half
of a document, given the first. Methods share start and outer loop, and differ in q alone. Then, with topics fixed,
all are compared with importance sampling on a few dozen documents, and the package with the optimum of each document.
Runs that are in the result files already are not run again; a run that was stopped goes on from its last score. Set
``OPENBLAS_NUM_THREADS=1``. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with ``ap_corpus.csv.gz`` (columns doc, word and count); ``--states`` is one for topics between
runs.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146
.. [2] C. Wang and D. M. Blei (2013). Variational inference in nonconjugate models. Journal of Machine Learning Research
   14. https://doi.org/10.48550/arXiv.1209.4360
.. [3] D. M. Blei and J. D. Lafferty (2007). A correlated topic model of Science. The Annals of Applied Statistics 1(1).
   https://doi.org/10.1214/07-AOAS114

Examples
--------
::

    python topics.py --data DATA --states STATES
"""

import argparse
import datetime
import functools
import time

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from environment import describe_environment
from measure import Array
from pages import write_between_marks
from records import FIGURES, RESULTS, Records
from topics_corpus import FILE, Corpus, Topics, n_documents, normal_draws, read, start
from topics_documents import FIELDS as DOCUMENT_FIELDS
from topics_documents import compare
from topics_methods import (
    BATCH,
    DRAWS,
    FEW_DRAWS,
    Batch,
    Q,
    Sites,
    delta,
    fit_each,
    gaussian,
    laplace,
    learnt,
    mean_field,
    prepared,
    prior,
    score,
)
from topics_pages import draw, tables

FIELDS = ("seed", "method", "pass", "score", "by_laplace", "by_gaussian", "sd", "seconds", "date", "environment")
#: Topics; passes after which runs are scored; passes before the M step takes mu and Sigma as well.
N_TOPICS, SCORED, HELD = 10, (1, 2, 3, 5, 7, 10, 20, 40), 5
#: Largest standard deviation in Sigma at which a run has diverged.
DIVERGED = 1e2


class Method(NamedTuple):
    """How q is fitted: to training documents, unless by stored sites, and to the first half of a test document."""

    train: Callable[[Batch, Q], Q] | None
    test: Callable[[Batch, Q], Q]
    base: Array
    diagonal: bool = False
    held: int = HELD


def methods() -> dict[str, Method]:
    """Return the methods: q of the rivals in expectations of words is a point."""
    point, few = np.zeros((1, N_TOPICS)), normal_draws(FEW_DRAWS, N_TOPICS, seed=2)
    whole = functools.partial(gaussian, base=normal_draws(DRAWS, N_TOPICS, seed=1))
    own = functools.partial(whole, diagonal=True)
    return {
        "Laplace": Method(laplace, laplace, point),
        "delta": Method(delta, delta, point),
        "mean field": Method(mean_field, mean_field, point),
        "PG-SVI": Method(None, whole, few),
        "PG-SVI-MF": Method(None, own, few, diagonal=True),
        "PG-SVI, Sigma from pass 1": Method(None, whole, few, held=0),
        "full Gaussian": Method(whole, whole, few),
    }


class Run:
    """One method from one start: topics, q of the training documents, and how far it has come."""

    def __init__(self, corpus: Corpus, name: str, seed: int, states: Path) -> None:
        self.corpus, self.method, self.n = corpus, methods()[name], n_documents(corpus.train)
        self.file = states / f"{name.replace(' ', '_').replace(',', '')}_{seed}.npz"
        self.topics = start(corpus, N_TOPICS, seed)
        self.number, self.seconds, self.seed = 0, 0.0, seed
        shape = (self.n, N_TOPICS)
        self.sites = Sites(np.zeros(shape), np.zeros((*shape, N_TOPICS)), self.method.diagonal)
        self.q = prior(self.topics, self.n)
        if self.file.exists():
            self._load()

    def _load(self) -> None:
        with np.load(self.file) as kept:
            self.topics = Topics(kept["beta"], kept["mean"], kept["cov"])
            self.q = Q(kept["q_mean"], kept["q_cov"])
            self.sites.first, self.sites.second = kept["first"], kept["second"]
            self.number, self.seconds = int(kept["number"]), float(kept["seconds"])

    def save(self) -> None:
        """Keep all that the next pass needs."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        named = {"q_mean": self.q.mean, "q_cov": self.q.cov, "first": self.sites.first, "second": self.sites.second}
        np.savez(self.file, number=self.number, seconds=self.seconds, **self.topics._asdict(), **named)

    def step(self) -> None:
        """Make one pass through the training documents, and an M step."""
        begun = time.process_time()
        self.number += 1
        if self.method.train is not None:
            self.q = fit_each(self.method.train, self.corpus.train, self.topics, self.q)
        else:
            rng = np.random.default_rng([self.seed, self.number])
            n_steps, steps = -(-self.n // BATCH), np.empty(self.n, dtype=int)
            steps[rng.permutation(self.n)] = np.arange(self.n) // BATCH
            for some in self.corpus.train:
                batch = prepared(some, self.topics)
                self.sites.visit(batch, self.topics, steps[some.which], n_steps, self.n, rng)
            self.q = self.sites.q(self.topics, np.arange(self.n), np.ones(self.n))
        topics = learnt(self.corpus.train, self.topics, self.q, self.method.base)
        held = self.number <= self.method.held
        self.topics = self.topics._replace(beta=topics.beta) if held else topics
        self.seconds += time.process_time() - begun

    def scores(self) -> dict[str, object]:
        """Return the score of the topics so far, and those with q of other methods in the place of its own."""
        start_at = prior(self.topics, n_documents(self.corpus.given))
        laplace_q = fit_each(laplace, self.corpus.given, self.topics, start_at)
        found: dict[str, object] = {"by_laplace": score(self.corpus.held_out, self.topics, laplace_q)}
        rival = self.method.test in (laplace, delta, mean_field)
        q = fit_each(self.method.test, self.corpus.given, self.topics, start_at if rival else laplace_q)
        found["score"] = score(self.corpus.held_out, self.topics, q)
        if self.number == SCORED[-1]:
            q = fit_each(methods()["full Gaussian"].test, self.corpus.given, self.topics, laplace_q)
            found["by_gaussian"] = score(self.corpus.held_out, self.topics, q)
        return found

    @property
    def sd(self) -> float:
        """Return the largest standard deviation in Sigma."""
        return float(np.sqrt(np.diag(self.topics.cov)).max())


def learn(corpus: Corpus, name: str, seed: int, states: Path, records: Records) -> None:
    """Run one method from one start, and keep its scores; a run that diverges ends."""
    rows = [row for row in records.read() if (row["seed"], row["method"]) == (str(seed), name)]
    if rows and (int(rows[-1]["pass"]) == SCORED[-1] or rows[-1]["score"] == "inf"):
        return
    shared = {"seed": seed, "method": name, "date": datetime.date.today().isoformat()}
    shared["environment"] = describe_environment()
    run, done = Run(corpus, name, seed, states), {int(row["pass"]) for row in rows}
    while run.number < SCORED[-1]:
        run.step()
        diverged = not run.sd < DIVERGED
        if diverged or (run.number in SCORED and run.number not in done):
            found = {"score": np.inf} if diverged else run.scores()
            row = {"pass": run.number, "sd": run.sd, "seconds": round(run.seconds, 2)} | found
            records.append(shared | row)
            run.save()
            print(name, seed, row, flush=True)
        if diverged:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, draw the figure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--states", type=Path, required=True, help="folder for topics between runs")
    parser.add_argument("--seeds", type=int, default=3, help="starts of the topics")
    parser.add_argument("--methods", nargs="*", choices=list(methods()), default=list(methods()))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of csv and tables")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    if not (options.data / FILE).exists():
        raise SystemExit(f"There is no {FILE} in {options.data}: nothing to do.")
    corpus, records = read(options.data), Records(options.out / "topics.csv", FIELDS)
    for name in options.methods:
        for seed in range(1, 1 + options.seeds):
            learn(corpus, name, seed, options.states, records)
    documents = Records(options.out / "topics_documents.csv", DOCUMENT_FIELDS)
    topics = Run(corpus, "Laplace", 1, options.states).topics
    compare(corpus, topics, documents)
    write_between_marks(options.out / "topics.md", tables(records.read(), documents.read()), Path(__file__).name)
    draw(records.read(), options.figures / "topics.png")


if __name__ == "__main__":
    main()
