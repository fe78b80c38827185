"""The loss on held-out rows: the same for the same weights, however they were measured, batched, sharded or spread."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.contract.config import ModelSource, TrialConfig
from orchestrator.contract.facts import DataFacts, DataRequest
from orchestrator.contract.outcome import Diverged, Invalid, Measurement, Ok, OomDevice, Phase
from orchestrator.contract.units import MIB
from orchestrator.trial.data import HELD_OUT, Batches, Rows, TokenRow
from orchestrator.trial.group import RankPlace
from orchestrator.trial.model import build_model
from orchestrator.trial.prepare import hold_out, prepare
from orchestrator.trial.unusable import Unusable
from trial.rig import FULL, LLAMA, LORA, TemplateClient, trial_config, write_data, write_trial

ROOT = Path(__file__).parents[2]
TRAIN_TOKENS = 900
QUALITY = {"train_tokens": TRAIN_TOKENS}
LENGTHS = [8 + (7 * number) % 57 for number in range(40)]
EVAL_LENGTHS = [60, 9, 33, 2, 47, 15, 21]
"""An odd number of unlike lengths: micro-batches are padded and not all are full."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("rows"), LENGTHS, EVAL_LENGTHS)


def quality_trial(rows: Path, knobs: dict[str, Any], max_steps: int = 2, **changes: Any) -> TrialConfig:
    """A trial over batches of 8 rows."""
    micro_batch, world_size = int(knobs.get("micro_batch", 2)), int(changes.get("world_size", 1))
    measure = {"min_steps": 2, "max_steps": max_steps, "warmup_steps": 0, "relative_precision": 1e-9}
    measure["quality"] = changes.pop("quality", QUALITY)
    accumulation = 8 // (micro_batch * world_size)
    return trial_config(rows, knobs, measure=measure, accumulation=accumulation, **changes)


def measured(template: TemplateClient, folder: Path, config: TrialConfig) -> Measurement:
    _, outcome = template.run(write_trial(folder, config))
    assert isinstance(outcome, Ok), outcome
    return outcome.measurement


def plain_loss(rows: Path, config: TrialConfig) -> float:
    """The loss after the same training by PyTorch alone, each held-out row by itself."""
    model = build_model(config, {}, torch.device("cpu")).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.learning_rate, weight_decay=0.0)
    tokens = 0
    for step in Batches(config, RankPlace()).training_steps():
        for batch in step.batches:
            loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
            (loss / len(step.batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        tokens += step.counts.tokens
        if tokens >= TRAIN_TOKENS:
            break
    held_out = Rows(rows, HELD_OUT)
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for index in range(len(EVAL_LENGTHS)):
            ids = torch.from_numpy(held_out.row(index).astype(np.int64))[None]
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    return total / count


@pytest.mark.trains
def test_the_loss_is_that_of_a_plain_training_however_long_the_speed_was_measured(
    template: TemplateClient, rows: Path, tmp_path: Path
) -> None:
    short = measured(template, tmp_path / "short", quality_trial(rows, FULL, max_steps=2))
    long = measured(template, tmp_path / "long", quality_trial(rows, FULL, max_steps=7))
    assert long.measured_steps == 7
    assert short.eval_loss == long.eval_loss
    assert short.eval_loss == pytest.approx(plain_loss(rows, quality_trial(rows, FULL)), rel=1e-5)
    assert short.eval_tokens == sum(EVAL_LENGTHS) - len(EVAL_LENGTHS)
    assert short.trained_tokens is not None
    assert TRAIN_TOKENS <= short.trained_tokens < TRAIN_TOKENS + 8 * 64


@pytest.mark.trains
@pytest.mark.parametrize("method", [FULL, LORA], ids=["full", "lora"])
def test_stages_and_offload_lose_alike(
    template: TemplateClient, rows: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    plain = measured(template, tmp_path / "0", quality_trial(rows, method))
    for stage, more in ((1, {}), (2, {"offload_optimizer": "cpu"}), (3, {}), (3, {"offload_optimizer": "cpu"})):
        knobs = {**method, "zero_stage": stage, "gradient_checkpointing": "full", **more}
        found = measured(template, tmp_path / f"{stage}{len(more)}", quality_trial(rows, knobs))
        assert found.eval_loss == pytest.approx(plain.eval_loss, rel=1e-4), knobs
        assert found.trained_tokens == plain.trained_tokens


@pytest.mark.trains
def test_equal_weights_have_one_loss_at_every_micro_batch_and_padding(
    template: TemplateClient, rows: Path, tmp_path: Path
) -> None:
    """Nothing is learned at this rate, so the weights are equal."""
    losses = []
    for micro_batch in (1, 2, 4, 8):
        changes = {"train": {"global_batch": 8, "learning_rate": 1e-12}}
        config = quality_trial(rows, {**LORA, "micro_batch": micro_batch}, **changes)
        losses.append(measured(template, tmp_path / str(micro_batch), config).eval_loss)
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-5)] * 3
    # random weights know nothing: close to the entropy of a uniform choice
    assert losses[0] == pytest.approx(math.log(LLAMA["vocab_size"]), rel=0.02)


@pytest.mark.trains
def test_dropout_is_off_in_eval(template: TemplateClient, rows: Path, tmp_path: Path) -> None:
    losses = []
    for dropout in (0.0, 0.9):
        train = {"global_batch": 8, "learning_rate": 1e-12, "lora_dropout": dropout}
        model = {"config": {**LLAMA, "attention_dropout": dropout}}
        config = quality_trial(rows, LORA, train=train, model=model)
        losses.append(measured(template, tmp_path / str(dropout), config).eval_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.trains
def test_training_on_more_tokens_lowers_the_loss(template: TemplateClient, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", [32] * 40, [32] * 8)
    for files in Rows(data), Rows(data, HELD_OUT):
        assert len(files.lengths()) in (8, 40)
    tokens = np.fromfile(data / "tokens.bin", dtype=np.int32) % 7
    tokens.astype(np.int32).tofile(data / "tokens.bin")
    (np.fromfile(data / HELD_OUT.tokens, dtype=np.int32) % 7).astype(np.int32).tofile(data / HELD_OUT.tokens)
    losses = []
    for train_tokens in (1, 2000):
        config = quality_trial(data, FULL, quality={"train_tokens": train_tokens})
        losses.append(measured(template, tmp_path / str(train_tokens), config).eval_loss)
    assert losses[1] < losses[0] - 0.5


@pytest.mark.trains
def test_the_phase_is_told_with_its_progress(template: TemplateClient, rows: Path, tmp_path: Path) -> None:
    files = write_trial(tmp_path, quality_trial(rows, FULL))
    template.run(files)
    told = [event for event in files.read_events() if event.event == "eval"]
    assert [event.tokens for event in told] == [67, 33, 60, 20]
    assert {event.phase for event in told} == {"eval"}
    assert [event.event for event in files.read_events()].count("first_step") == 1


@pytest.mark.trains
def test_held_out_rows_that_need_most_memory_show_in_the_peak_and_at_the_limit(
    template: TemplateClient, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data", [16] * 12, [2048])
    section = {"directory": str(data), "digest": "long", "sequence_length": 2048}
    knobs = {**FULL, "attention": "eager", "micro_batch": 1}
    quality = {"train_tokens": 1}
    free = quality_trial(data, knobs, quality=quality, data=section)
    found = measured(template, tmp_path / "free", free)
    assert found.ranks[0].peak_by_phase_bytes[Phase.EVAL] == found.peak_memory_bytes
    limits = {"device_memory_bytes": 100 * MIB}
    tight = quality_trial(data, knobs, quality=quality, data=section, limits=limits)
    _, outcome = template.run(write_trial(tmp_path / "tight", tight))
    assert isinstance(outcome, OomDevice), outcome
    assert outcome.phase is Phase.EVAL


@pytest.mark.trains
def test_a_loss_that_is_not_finite_diverges_in_eval(template: TemplateClient, rows: Path, tmp_path: Path) -> None:
    train = {"global_batch": 8, "learning_rate": 1e30, "gradient_clipping": 0.0}
    config = quality_trial(rows, {**FULL, "optimizer": "sgd"}, train=train, quality={"train_tokens": 1})
    _, outcome = template.run(write_trial(tmp_path, config))
    assert isinstance(outcome, Diverged), outcome
    assert outcome.phase is Phase.EVAL


@pytest.mark.trains
def test_a_trial_that_is_raced_out_spares_itself_the_training(
    template: TemplateClient, rows: Path, tmp_path: Path
) -> None:
    config = quality_trial(rows, LORA, max_steps=6, beat_tokens_per_second=1e9)
    files = write_trial(tmp_path, config)
    _, outcome = template.run(files)
    assert isinstance(outcome, Ok), outcome
    found = outcome.measurement
    assert found.raced_out
    assert (found.eval_loss, found.eval_tokens, found.trained_tokens) == (None, None, None)
    # probe, measured steps, and the one that shows that it learns
    assert [event.event for event in files.read_events()].count("step") == 2 + 2 + 1


@pytest.mark.trains
@pytest.mark.parametrize("beat", [None, 1e9], ids=["measured", "raced out"])
def test_adapters_without_gradient_are_still_found(
    template: TemplateClient, rows: Path, tmp_path: Path, beat: float | None
) -> None:
    config = quality_trial(rows, LORA, max_steps=6, beat_tokens_per_second=beat)
    _, outcome = template.run(write_trial(tmp_path, config, fault="dead_values"))
    assert isinstance(outcome, Invalid), outcome
    assert "adapters had no gradient" in outcome.reason


@pytest.mark.trains
@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_two_ranks_lose_as_one_does(template: TemplateClient, rows: Path, tmp_path: Path, zero_stage: int) -> None:
    """Seven rows in micro-batches of 2 give one rank two and the other two, of which the last holds one row."""
    knobs = {**LORA, "zero_stage": zero_stage}
    one = measured(template, tmp_path / "one", quality_trial(rows, knobs))
    files = write_trial(tmp_path / "two", quality_trial(rows, knobs, world_size=2))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "orchestrator.trial"]
    command = [sys.executable, *launcher, str(files.directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    outcome = files.read_outcome()
    assert isinstance(outcome, Ok)
    assert outcome.measurement.eval_loss == pytest.approx(one.eval_loss, rel=1e-4)
    assert outcome.measurement.eval_tokens == one.eval_tokens
    assert outcome.measurement.trained_tokens == one.trained_tokens


@pytest.mark.parametrize(("eval_rows", "micro_batch", "world_size"), [(7, 2, 3), (1, 4, 2), (8, 1, 3), (5, 5, 1)])
def test_every_held_out_row_counts_once_and_ranks_have_as_many_batches(
    tmp_path: Path, eval_rows: int, micro_batch: int, world_size: int
) -> None:
    data = write_data(tmp_path, [20] * 10, list(range(2, 2 + eval_rows)))
    config = trial_config(data, {**FULL, "micro_batch": micro_batch}, world_size=world_size)
    ranks = [Batches(config, RankPlace(rank=rank, world_size=world_size)).held_out() for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    lengths = [
        int(length)
        for batches in ranks
        for each in batches
        if each.is_counted
        for length in each.batch.attention_mask.sum(dim=1)
    ]
    assert sorted(lengths) == list(range(2, 2 + eval_rows))


def texts(folder: Path, rows: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return path


def prepared(
    folder: Path, rows: list[str], **request: Any
) -> tuple[DataFacts, set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The facts, the training rows and the held-out rows."""
    asked = DataRequest(path=str(texts(folder, rows)), **{"sequence_length": 64, "eval_rows": 5, **request})
    facts = prepare(asked, ModelSource(config=LLAMA), 512, folder / "out")
    return facts, set(all_rows_of(Rows(folder / "out"))), set(all_rows_of(Rows(folder / "out", HELD_OUT)))


def all_rows_of(rows: Rows) -> Iterator[tuple[int, ...]]:
    return (tuple(rows.row(index).tolist()) for index in range(len(rows.lengths())))


SENTENCES = [f"Sentence {number} of the data speaks of {number * number} things." for number in range(40)]


def token_rows(*rows: list[int]) -> list[TokenRow]:
    return [np.array(row, dtype=np.int32) for row in rows]


def plain(rows: list[TokenRow]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in rows]


def test_held_out_rows_follow_from_the_content_not_from_its_order() -> None:
    rows = token_rows(*([number, number + 1, number * 7] for number in range(40)))
    training, held_out = hold_out(rows, 5, 64)
    assert (len(training), len(held_out)) == (35, 5)
    for other in (rows[::-1], rows[20:] + rows[:20], rows * 2):
        assert plain(hold_out(other, 5, 64)[1]) == plain(held_out)


def test_no_copy_of_a_held_out_row_is_trained_on() -> None:
    rows = token_rows(*([number, number + 1, number * 7] for number in range(20)))
    # rows that differ only beyond the sequence length are one and the same to a trial
    longer = [np.concatenate([row, np.array([1, 2], dtype=np.int32)]) for row in rows]
    training, held_out = hold_out(rows + longer + rows, 6, 3)
    assert (len(training), len(held_out)) == (3 * 14, 6)
    assert not {row[:3] for row in plain(training)} & {row[:3] for row in plain(held_out)}


def test_held_out_rows_are_stored_apart(tmp_path: Path) -> None:
    facts, training, held_out = prepared(tmp_path, SENTENCES)
    assert (facts.rows, facts.eval_rows, len(training), len(held_out)) == (35, 5, 35, 5)
    assert not training & held_out
    assert facts.tokens == sum(map(len, training))
    assert facts.eval_tokens == sum(map(len, held_out))


def test_held_out_rows_are_part_of_the_identity(tmp_path: Path) -> None:
    none, all_rows = without(tmp_path / "none")
    five, _, _ = prepared(tmp_path / "five", SENTENCES)
    six, _, _ = prepared(tmp_path / "six", SENTENCES, eval_rows=6)
    assert len({none.digest, five.digest, six.digest}) == 3
    assert none.eval_rows == 0
    assert len(all_rows) == 40


def without(folder: Path) -> tuple[DataFacts, set[tuple[int, ...]]]:
    asked = DataRequest(path=str(texts(folder, SENTENCES)), sequence_length=64)
    facts = prepare(asked, ModelSource(config=LLAMA), 512, folder / "out")
    assert not (folder / "out" / HELD_OUT.tokens).exists()
    return facts, set(all_rows_of(Rows(folder / "out")))


def test_the_longest_row_stays_for_the_memory_probe(tmp_path: Path) -> None:
    rows = ["short one"] * 3 + ["a much longer row of many more words than all others have " * 3, "short two"]
    facts, _, held_out = prepared(tmp_path, rows, eval_rows=2)
    assert facts.longest_row_tokens > max(map(len, held_out))


def test_packed_rows_hold_nothing_of_a_held_out_row(tmp_path: Path) -> None:
    facts, training, held_out = prepared(tmp_path, SENTENCES, packing=True)
    assert {len(row) for row in training} == {64}
    joined = [token for row in sorted(training) for token in row]
    text = " ".join(map(str, joined))
    assert all(" ".join(map(str, row)) not in text for row in held_out)
    assert facts.eval_rows == 5


@pytest.mark.parametrize("eval_rows", [2, 3, 50])
def test_too_little_data_to_hold_anything_out_is_refused(tmp_path: Path, eval_rows: int) -> None:
    with pytest.raises(
        Unusable, match=f"{eval_rows} rows are to be held out, but the data has only 2 unlike rows"
    ) as caught:
        prepared(tmp_path, ["one row", "another row", "one row"], eval_rows=eval_rows)
    assert caught.value.field == "measure.quality.eval_rows"
