from itertools import islice
from pathlib import Path

from orchestrator.trial.data import Batches, Step
from orchestrator.trial.group import RankPlace
from trial.rig import FULL, trial_config, write_data


def batches(rows: Path, micro_batch: int, world_size: int = 1, rank: int = 0, accumulation: int = 1) -> Batches:
    config = trial_config(rows, {**FULL, "micro_batch": micro_batch}, world_size=world_size, accumulation=accumulation)
    return Batches(config, RankPlace(rank=rank, world_size=world_size))


def first_tokens(steps: list[Step]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for step in steps for batch in step.batches for row in batch.input_ids]


def test_padding_is_masked_unlabelled_and_counted(tmp_path: Path) -> None:
    rows = write_data(tmp_path, [10, 4])
    step = next(batches(rows, 2).training_steps())
    (batch,) = step.batches
    assert batch.input_ids.shape == (2, 10)
    assert int(batch.attention_mask.sum()) == 14
    assert int((batch.labels == -100).sum()) == 6
    assert bool(((batch.labels == -100) == (batch.attention_mask == 0)).all())
    shorter = int(batch.attention_mask.sum(dim=1).argmin())
    assert batch.attention_mask[shorter].tolist() == [1] * 4 + [0] * 6
    counts = step.counts
    assert (counts.tokens, counts.padding_tokens, counts.sequences) == (14, 6, 2)
    assert counts.sum_squared_lengths == 100 + 16


def test_a_batch_is_padded_to_its_own_longest_row_not_to_the_data_s(tmp_path: Path) -> None:
    rows = write_data(tmp_path, [10] * 19 + [100])
    steps = list(islice(batches(rows, 2).training_steps(), 10))
    total = sum((step.counts for step in steps), start=steps[0].counts.__class__())
    assert total.tokens == 19 * 10 + 100
    assert total.padding_tokens == 90
    assert sorted(batch.input_ids.shape[1] for step in steps for batch in step.batches) == [10] * 9 + [100]


def test_ranks_take_disjoint_rows_and_agree_on_the_counts(tmp_path: Path) -> None:
    rows = write_data(tmp_path, list(range(8, 48)))
    per_rank = [
        list(islice(batches(rows, 2, world_size=2, rank=rank, accumulation=2).training_steps(), 5)) for rank in (0, 1)
    ]
    left, right = (first_tokens(steps) for steps in per_rank)
    assert len(left) == len(right) == 20
    assert len({row[:8] for row in left + right}) == 40
    assert [step.counts for step in per_rank[0]] == [step.counts for step in per_rank[1]]
    assert per_rank[0][0].counts.sequences == 8


def test_the_order_follows_from_the_seed_and_goes_round(tmp_path: Path) -> None:
    rows = write_data(tmp_path, [5, 6, 7])
    first = first_tokens(list(islice(batches(rows, 2).training_steps(), 6)))
    again = first_tokens(list(islice(batches(rows, 2).training_steps(), 6)))
    assert first == again
    assert len({row[:5] for row in first}) == 3


def test_the_probe_holds_the_longest_row_and_some_padding(tmp_path: Path) -> None:
    rows = write_data(tmp_path, [64, 64, 64, 30, 8])
    step = batches(rows, 2, world_size=2, rank=1, accumulation=2).probe_step()
    assert [tuple(batch.attention_mask.sum(dim=1).tolist()) for batch in step.batches] == [(64, 30)] * 2
    assert step.counts.tokens == 4 * 94


def test_a_probe_larger_than_the_data_takes_rows_again(tmp_path: Path) -> None:
    step = batches(write_data(tmp_path, [9]), 4).probe_step()
    assert step.batches[0].input_ids.shape == (4, 9)
