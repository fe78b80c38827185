"""How wide the micro-batches of a data set become, and how much of them is padding."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.facts import DataFacts

OFFSETS_FILE = "offsets.bin"
"""Of a prepared folder: int64, one more than rows, where each row starts (`orchestrator.trial.data`)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Lengths of all training rows in tokens, ascending."""

    lengths_tokens: NDArray[np.int64]

    @property
    def longest_tokens(self) -> int:
        """What the memory probe runs."""
        return int(self.lengths_tokens[-1])

    def is_padded(self, micro_batch: int) -> bool:
        """Whether a micro-batch holds rows of unlike length, so that a mask takes part."""
        return micro_batch > 1 and bool(self.lengths_tokens[0] < self.lengths_tokens[-1])

    def width_tokens(self, micro_batch: int) -> float:
        """The expected length of the longest of `micro_batch` rows drawn at random."""
        count = len(self.lengths_tokens)
        shares = (np.arange(count + 1) / count) ** micro_batch
        return float(np.dot(self.lengths_tokens, np.diff(shares)))

    def padding_fraction(self, micro_batch: int) -> float:
        """The expected share of padding in the tokens of a micro-batch."""
        return 1.0 - float(self.lengths_tokens.mean()) / self.width_tokens(micro_batch)


def uniform_rows(tokens: int) -> Rows:
    """Rows of one length, as packing makes them."""
    return Rows(np.array([tokens], dtype=np.int64))


def prepared_rows(facts: DataFacts) -> Rows:
    """The rows that the preflight has prepared."""
    offsets = np.fromfile(Path(facts.directory) / OFFSETS_FILE, dtype=np.int64)
    return Rows(np.sort(np.diff(offsets)))
