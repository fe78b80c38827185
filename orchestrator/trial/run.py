"""The story of a trial, from its configuration to its outcome."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import JsonValue

from orchestrator.contract.config import QualitySettings, TrialConfig
from orchestrator.contract.outcome import Measurement, Ok, Outcome, OverLimit, Phase, RankMemory
from orchestrator.trial.checks import FirstUpdate, InvalidTrial, LossDiverged, check_same_run
from orchestrator.trial.data import Batches, Counts, Step
from orchestrator.trial.device import Device, worst
from orchestrator.trial.engine import Engine, build_engine, deepspeed_config, select_accelerator
from orchestrator.trial.events import EventLog
from orchestrator.trial.group import Group, RankPlace
from orchestrator.trial.meter import StepTime, is_beaten, is_measured, rate
from orchestrator.trial.model import LoadedModel, build_model
from orchestrator.trial.preload import PROCESS_ENVIRONMENT
from orchestrator.trial.quality import Quality, evaluate

PROBE_STEPS = 2
"""The optimizer's states appear in the first step; only a step after that shows the peak beside them."""


class Trial:
    """One rank's part of a trial whose memory limit is in force."""

    def __init__(self, config: TrialConfig, place: RankPlace, device: Device, events: EventLog) -> None:
        self.config = config
        self.place = place
        self.device = device
        self.events = events
        self.group: Group
        self.loaded: LoadedModel
        self.engine: Engine
        self.peak_by_phase_bytes: dict[Phase, int] = {}
        self.held_bytes: list[int] = []
        self.first_loss = math.nan
        self.last_loss = math.nan

    def run(self) -> Outcome:
        """Build, probe, warm up, measure, take the loss where asked for, judge. Errors pass through to the guard."""
        settings = self.config.measure
        select_accelerator(self.device)
        self.group = Group(self.place, self.device.backend, settings.trial_timeout_s)
        batches = Batches(self.config, self.place)
        self._build()
        check_same_run(self.config, self.engine, self.place.world_size, self.group)
        if settings.quality is not None:
            self.engine.hold_weights()
        self._probe(batches)
        steps = batches.training_steps()
        for _ in range(settings.warmup_steps):
            self._train(next(steps))
        counts, times = self._measure(steps)
        quality = None
        if settings.quality is not None:
            quality = self._quality(batches, settings.quality, self._is_raced_out(times))
        outcome = self._judge(batches, counts, times, quality)
        self.group.close()
        return outcome

    def _build(self) -> None:
        resolved = deepspeed_config(self.config, pin_memory=self.device.kind == "cuda")
        with self._phase(Phase.LOAD):
            self.loaded = build_model(self.config, resolved, self.device.torch_device())
        if self.loaded.trainable_parameters == 0:
            raise InvalidTrial("the model has no trainable parameter")
        with self._phase(Phase.INIT):
            self.engine = build_engine(self.loaded.model, self.config, resolved, self.device)

    def _probe(self, batches: Batches) -> None:
        if self.config.measure.quality is None:
            self._first_update(batches.probe_step(), probe=True)
        else:
            self._train(batches.probe_step(), probe=True)
        # what comes from here on finds everything in place: the allocator has no reason to retry but want of memory
        self.device.watch_retries()
        for _ in range(PROBE_STEPS - 1):
            self._train(batches.probe_step(), probe=True)

    def _first_update(self, step: Step, probe: bool = False) -> None:
        """The first step that may change weights, and whether it did."""
        first_update = FirstUpdate(self.engine, self.config.knobs.method)
        self._train(step, probe)
        first_update.check(self.group)

    def _quality(self, batches: Batches, settings: QualitySettings, is_raced_out: bool) -> Quality | None:
        """Train from the first weights on, which all steps so far have left as they were, then take the loss.

        So neither the probe nor how long the speed was measured makes one candidate unlike another. A trial that is
        raced out only shows in one step that it learns: it can't win, whatever its loss.
        """
        torch.manual_seed(self.config.train.seed)
        self.engine.begin_anew()
        steps = batches.training_steps()
        step = next(steps)
        self._first_update(step)
        if self.group.decide(is_raced_out):
            return None
        trained_tokens = step.counts.tokens
        while trained_tokens < settings.train_tokens:
            step = next(steps)
            self._train(step)
            trained_tokens += step.counts.tokens
        with self._phase(Phase.EVAL):
            found = evaluate(self.engine, batches.held_out(), self.group, self.device, self.events)
        return Quality(found.loss, found.tokens, trained_tokens)

    def _measure(self, steps: Iterator[Step]) -> tuple[Counts, list[StepTime]]:
        counts, times = Counts(), list[StepTime]()
        settings, beat = self.config.measure, self.config.beat_tokens_per_second
        while not self.group.decide(is_measured(times, settings) or is_beaten(times, settings, beat)):
            step = next(steps)
            step_s = self._train(step)
            counts += step.counts
            times.append(StepTime(step.counts.tokens, step_s))
            self.held_bytes.append(self.device.held_bytes())
        return counts, times

    def _is_raced_out(self, times: list[StepTime]) -> bool:
        settings = self.config.measure
        is_behind = is_beaten(times, settings, self.config.beat_tokens_per_second)
        return is_behind and not is_measured(times, settings)

    def _train(self, step: Step, probe: bool = False) -> float:
        """Run one optimizer step over the whole global batch. Returns its duration in seconds."""
        engine, device = self.engine.engine, self.device.torch_device()
        self.events.begin_step(probe)
        losses = []
        self.device.synchronize()
        start_s = time.perf_counter()
        for batch in step.batches:
            self.events.batch_tokens = batch.input_ids.numel()
            with self._phase(Phase.FORWARD, watch=probe):
                loss = engine(
                    input_ids=batch.input_ids.to(device),
                    attention_mask=batch.attention_mask.to(device),
                    labels=batch.labels.to(device),
                ).loss
            if not loss.requires_grad:
                raise InvalidTrial(
                    "no gradient reaches what is to be trained: the loss depends on no trained parameter"
                )
            losses.append(loss.detach())
            with self._phase(Phase.BACKWARD, watch=probe):
                engine.backward(loss)
            del loss
            with self._phase(Phase.OPTIMIZER_STEP, watch=probe):
                engine.step()
        self.device.synchronize()
        step_s = time.perf_counter() - start_s
        self._note_loss(sum(float(loss) for loss in losses) / len(losses))
        self.events.end_step(step.counts.tokens, step_s)
        return step_s

    def _note_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise LossDiverged(f"the loss of step {self.events.step + 1} is {loss}")
        if math.isnan(self.first_loss):
            self.first_loss = loss
        self.last_loss = loss

    @contextmanager
    def _phase(self, phase: Phase, watch: bool = True) -> Iterator[None]:
        """Name the phase in the events; where `watch`, note how far it raised the peak."""
        self.events.enter(phase)
        before_bytes = self.device.used_bytes() if watch else 0
        yield
        if watch:
            after_bytes = self.device.used_bytes()
            if after_bytes > before_bytes:
                self.peak_by_phase_bytes[phase] = after_bytes

    def _judge(self, batches: Batches, counts: Counts, times: list[StepTime], quality: Quality | None) -> Outcome:
        mine = self.device.memory(self.place.rank, self.peak_by_phase_bytes)
        mine = mine.model_copy(update={"held_bytes": tuple(self.held_bytes)})
        measurement = self._measurement(batches, counts, times, self.group.gather(mine))
        if quality is not None:
            measurement = measurement.model_copy(update=quality._asdict())
        health = worst(self.group.gather(self.device.health()))
        if self._is_over(measurement):
            return OverLimit(measurement=measurement, health=health)
        return Ok(measurement=measurement, health=health)

    def _is_over(self, measurement: Measurement) -> bool:
        limits, device_bytes = self.config.limits, self.device.limit_bytes
        if device_bytes is not None and measurement.peak_memory_bytes > device_bytes - limits.headroom_bytes:
            return True
        ranks = measurement.ranks[: self.place.ranks_on_node]
        host_bytes = sum(rank.peak_resident_bytes for rank in ranks)
        return limits.host_memory_bytes is not None and host_bytes > limits.host_memory_bytes

    def _measurement(
        self, batches: Batches, counts: Counts, times: list[StepTime], memory: list[RankMemory]
    ) -> Measurement:
        speed = rate(times)
        return Measurement(
            tokens_per_second=speed.mean,
            tokens_per_second_low=speed.low,
            tokens_per_second_high=speed.high,
            tokens=counts.tokens,
            padding_tokens=counts.padding_tokens,
            padding_fraction=counts.padding_tokens / (counts.tokens + counts.padding_tokens),
            sequences=counts.sequences,
            sum_squared_lengths=counts.sum_squared_lengths,
            measured_steps=len(times),
            raced_out=self._is_raced_out(times),
            measured_s=sum(step.step_s for step in times),
            step_s=tuple(step.step_s for step in times),
            peak_memory_bytes=max(rank.peak_memory_bytes for rank in memory),
            peak_resident_bytes=max(rank.peak_resident_bytes for rank in memory),
            limit_bytes=self.device.limit_bytes,
            ranks=tuple(memory),
            probe_row_tokens=batches.longest_row_tokens,
            reaches_sequence_length=batches.longest_row_tokens >= self.config.data.sequence_length,
            trainable_parameters=self.loaded.trainable_parameters,
            total_parameters=self.loaded.total_parameters,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            device=self.device.kind,
            device_name=self.device.name(),
            threads_per_rank=torch.get_num_threads(),
            resolved=self._resolved(),
        )

    def _resolved(self) -> dict[str, JsonValue]:
        knobs = self.config.knobs
        return {
            "deepspeed": self.engine.config,
            "optimizer": self.engine.optimizer,
            "lora": self.loaded.lora,
            "precision": knobs.precision.value,
            "attention": knobs.attention.value,
            "gradient_checkpointing": knobs.gradient_checkpointing.value,
            "use_reentrant": False,
            "world_size": self.place.world_size,
            "environment": dict(PROCESS_ENVIRONMENT),
        }
