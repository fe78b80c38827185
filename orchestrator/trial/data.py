"""Prepared rows on disk, and the batches that a trial makes of them.

A prepared folder holds `tokens.bin` (int32 token ids, row after row), `offsets.bin` (int64, one more than rows: where
each row starts) and `data.json` (`DataFacts`); rows that are held out from training stand in `eval_tokens.bin` and
`eval_offsets.bin`. Labels are the tokens themselves; padding has label -100 and mask 0,
on the right. Rows are as long as they are, at most `sequence_length` (packed ones exactly so); a micro-batch is padded
to its longest row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.facts import DataFacts
from orchestrator.contract.handoff import read_model
from orchestrator.trial.group import RankPlace

DESCRIPTION_FILE = "data.json"
IGNORED_LABEL = -100


class RowFiles(NamedTuple):
    """Names of the two files that hold rows."""

    tokens: str
    offsets: str


TRAINING = RowFiles("tokens.bin", "offsets.bin")
HELD_OUT = RowFiles("eval_tokens.bin", "eval_offsets.bin")
TokenRow = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """One micro-batch: int64 tensors of shape (rows, longest row)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Counts:
    """Tokens of one optimizer step over all ranks."""

    tokens: int = 0
    padding_tokens: int = 0
    sequences: int = 0
    sum_squared_lengths: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.tokens + other.tokens,
            self.padding_tokens + other.padding_tokens,
            self.sequences + other.sequences,
            self.sum_squared_lengths + other.sum_squared_lengths,
        )


@dataclass(frozen=True)
class Step:
    """One optimizer step: this rank's micro-batches, and the counts over all ranks."""

    batches: tuple[Batch, ...]
    counts: Counts


@dataclass(frozen=True)
class EvalBatch:
    """One micro-batch of held-out rows; one that is not counted only keeps the other ranks company."""

    batch: Batch
    is_counted: bool


class Rows:
    """The prepared rows of a folder, read on demand. Raises StateError when the folder is damaged or missing."""

    def __init__(self, directory: Path, files: RowFiles = TRAINING) -> None:
        self.facts = read_model(directory / DESCRIPTION_FILE, DataFacts)
        self._tokens: TokenRow = np.memmap(directory / files.tokens, dtype=np.int32, mode="r")
        self._offsets = np.fromfile(directory / files.offsets, dtype=np.int64)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every row."""
        return np.diff(self._offsets)

    def row(self, index: int) -> TokenRow:
        """The token ids of one row."""
        return self._tokens[self._offsets[index] : self._offsets[index + 1]]


class Batches:
    """The micro-batches of one rank. Every rank computes the same plan, so counts need no communication."""

    def __init__(self, config: TrialConfig, place: RankPlace) -> None:
        self._config = config
        self._rows = Rows(Path(config.data.directory))
        self._lengths = self._rows.lengths()
        self._pad_token_id = self._rows.facts.pad_token_id
        self._micro_batch = config.knobs.micro_batch
        self._accumulation = config.gradient_accumulation
        self._place = place
        self._seed = config.train.seed

    @property
    def longest_row_tokens(self) -> int:
        """The greatest number of tokens in one row."""
        return int(self._lengths.max())

    def probe_step(self) -> Step:
        """The costliest step that this data allows: every micro-batch of every rank is the longest one.

        Where rows differ in length, one shorter row is among them: attention with a padding mask can need more
        memory than without.
        """
        order = np.argsort(-self._lengths, kind="stable")
        indices = [int(order[position % len(order)]) for position in range(self._micro_batch)]
        shorter = np.flatnonzero(self._lengths[order] < self._lengths[order[0]])
        is_uniform = len({int(self._lengths[index]) for index in indices}) == 1
        if self._micro_batch > 1 and is_uniform and len(shorter):
            indices[-1] = int(order[shorter[0]])
        return self._step([[indices] * self._accumulation] * self._place.world_size)

    def training_steps(self) -> Iterator[Step]:
        """Steps over all rows in seeded order, without end; ranks take disjoint rows of each step."""
        world_size = self._place.world_size
        indices = self._shuffled()
        while True:
            taken = [next(indices) for _ in range(self._micro_batch * self._accumulation * world_size)]
            micro_batches = [
                taken[start : start + self._micro_batch] for start in range(0, len(taken), self._micro_batch)
            ]
            yield self._step([micro_batches[rank::world_size] for rank in range(world_size)])

    def held_out(self) -> list[EvalBatch]:
        """This rank's micro-batches of held-out rows. Every rank has as many, as sharded weights are gathered by all
        ranks together: one that runs short computes its share again, uncounted."""
        rows = Rows(Path(self._config.data.directory), HELD_OUT)
        count, world_size = len(rows.lengths()), self._place.world_size
        starts = range(0, count, self._micro_batch)
        rounds = -(-len(starts) // world_size)
        batches = []
        for number in range(self._place.rank, rounds * world_size, world_size):
            start = starts[number % len(starts)]
            batch = self._batch(rows, range(start, min(start + self._micro_batch, count)))
            batches.append(EvalBatch(batch, is_counted=number < len(starts)))
        return batches

    def _shuffled(self) -> Iterator[int]:
        generator = np.random.default_rng(self._seed)
        while True:
            yield from (int(index) for index in generator.permutation(len(self._lengths)))

    def _step(self, by_rank: list[list[list[int]]]) -> Step:
        counts = Counts()
        for micro_batches in by_rank:
            for indices in micro_batches:
                counts += self._counts(indices)
        return Step(tuple(self._batch(self._rows, indices) for indices in by_rank[self._place.rank]), counts)

    def _counts(self, indices: list[int]) -> Counts:
        lengths = self._lengths[indices]
        tokens = int(lengths.sum())
        return Counts(
            tokens=tokens,
            padding_tokens=int(lengths.max()) * len(indices) - tokens,
            sequences=len(indices),
            sum_squared_lengths=int((lengths**2).sum()),
        )

    def _batch(self, rows: Rows, indices: Sequence[int]) -> Batch:
        ids = [torch.from_numpy(rows.row(index).astype(np.int64)) for index in indices]
        shape = (len(ids), max(len(row) for row in ids))
        input_ids = torch.full(shape, self._pad_token_id, dtype=torch.int64)
        labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for position, row in enumerate(ids):
            input_ids[position, : len(row)] = row
            labels[position, : len(row)] = row
            attention_mask[position, : len(row)] = 1
        return Batch(input_ids, attention_mask, labels)
