"""DataParts of the data that are left out, and what is predicted then."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class DataParts:
    """Which rows are left out together, and which are predicted without them."""

    #: 1 where a row is left out; shape (n_parts, n_rows).
    out: sparse.csr_array
    #: 1 where a row is predicted, with others of the same score together; shape (n_scores, n_rows).
    scored: sparse.csr_array
    #: That is left out for each score; shape (n_scores,).
    part: Ints

    @property
    def are_whole(self) -> bool:
        """Whether all that is left out is predicted, in one score for each part."""
        same = self.out.shape == self.scored.shape and (self.part == np.arange(len(self.part))).all()
        return bool(same) and (self.out != self.scored).nnz == 0

    def rows_out(self, part: int) -> Ints:
        """Return the rows that a part leaves out."""
        return rows_of_set(self.out, part)

    def only(self, part: int) -> "DataParts":
        """Return one of the parts, with its scores."""
        which = np.flatnonzero(self.part == part)
        return DataParts(self.out[[part]], self.scored[which], np.zeros(len(which), dtype=np.intp))

    @classmethod
    def of_labels(cls, label: Ints, n_labels: int) -> "DataParts":
        """Return one part for each label, predicted as a whole; ``label`` is that of each row."""
        n = len(label)
        out = sparse.csr_array((np.ones(n), (label, np.arange(n))), shape=(n_labels, n))
        return cls(out, out, np.arange(n_labels))

    @classmethod
    def of_folds(cls, fold: Ints, n_folds: int) -> "DataParts":
        """Return one part for each fold, each of whose rows is predicted."""
        return cls(cls.of_labels(fold, n_folds).out, sparse.eye_array(len(fold), format="csr"), fold)

    @classmethod
    def of_future(cls, rank: Ints, least: int, horizon: int) -> "DataParts":
        """Return one part for each origin: all rows of that rank or later are left out, the next ones predicted."""
        origins = np.arange(least, rank.max() + 2 - horizon)[:, None]
        out = sparse.csr_array((rank >= origins).astype(float))
        scored = sparse.csr_array(((rank >= origins) & (rank < origins + horizon)).astype(float))
        return cls(out, scored, np.arange(len(origins)))


def rows_of_set(sets: sparse.csr_array, i: int) -> Ints:
    """Return the rows of one of some sets of rows, (n_sets, n_rows)."""
    return sets.indices[sets.indptr[i] : sets.indptr[i + 1]].astype(np.intp)


def passes(blocks: list[Ints]) -> Ints:
    """Return numbers of sets such that no two with the same number have a block in common."""
    free: dict[int, int] = {}
    result = np.zeros(len(blocks), dtype=np.intp)
    for i, of_set in enumerate(blocks):
        result[i] = max((free.get(int(b), 0) for b in of_set), default=0)
        free.update(dict.fromkeys(map(int, of_set), int(result[i]) + 1))
    return result
