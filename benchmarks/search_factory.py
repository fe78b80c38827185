"""Brimful's sampler for a benchmark on recorded landscapes: candidates as knobs, a prediction, and limits in GiB."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.guided import Guided, Limits, Observation, Prediction
from orchestrator.search.residuals import Axis
from orchestrator.spec.sweep import STOP_BELOW_GAIN

Knobs = Mapping[str, str | int]


def _is_active(name: str, knobs: Knobs) -> bool:
    stage = knobs.get("zero_stage", 0)
    match name:
        case "lora_rank":
            return knobs.get("method") != "full"
        case "offload_param":
            return stage == 3
        case "offload_optimizer" | "reduce_bucket":
            return stage != 0
        case _:
            return True


def guided_of(
    candidates: Sequence[Knobs],
    names: Sequence[str],
    prior: Mapping[str, NDArray[np.float64]],
    limits: Mapping[str, float],
) -> Guided:
    """The sampler over `candidates`. Knobs without an effect are a level of their own."""
    columns, axes = [], []
    for name in names:
        values = sorted(
            {each[name] for each in candidates if _is_active(name, each)}, key=lambda v: (isinstance(v, str), v)
        )
        index = {value: number for number, value in enumerate(values)}
        columns.append([index[each[name]] if _is_active(name, each) else len(values) for each in candidates])
        is_ordered = bool(values) and all(isinstance(value, int) for value in values) and name != "zero_stage"
        axes.append(Axis(len(values) + 1, tuple(np.linspace(0, 1, len(values)).tolist()) if is_ordered else ()))
    return Guided(
        levels=np.array(columns, dtype=np.int64).T,
        axes=tuple(axes),
        prediction=Prediction(np.log(prior["tokens_per_s"]), np.log(prior["peak_gib"]), np.log(prior["host_gib"])),
        limits=Limits(float(np.log(limits["peak_gib"])), float(np.log(limits["host_gib"]))),
        monotone=(list(names).index("micro_batch"),) if "micro_batch" in names else (),
    )


class Asked:
    """ask and tell, as the benchmark wants them."""

    def __init__(self, sampler: Guided, stop_gain: float | None = None) -> None:
        self._sampler = sampler
        self._stop_gain = stop_gain
        self._seen: list[Observation] = []
        self._running: list[int] = []

    @property
    def is_led(self) -> bool:
        """Whether predicted speeds still lead the search."""
        return self._sampler.leading_speed(self._seen) is not None

    def ask(self) -> int | None:
        suggestion = self._sampler.ask(self._seen, self._running)
        if suggestion is None:
            return None
        gain = suggestion.expected_gain
        if self._stop_gain is not None and gain is not None and gain < self._stop_gain:
            return None
        self._running.append(suggestion.candidate)
        return suggestion.candidate

    def tell(self, index: int, outcome: Mapping[str, Any]) -> None:
        if index in self._running:
            self._running.remove(index)
        if outcome["ok"]:
            seen = Observation(
                index,
                "ok",
                float(np.log(outcome["tokens_per_s"])),
                float(np.log(outcome["peak_gib"])),
                float(np.log(outcome["host_gib"])),
            )
        else:
            seen = Observation(index, "oom_host" if outcome["oom"] == "host" else "oom_device")
        self._seen.append(seen)


def guided(candidates: Any, knobs: Any, prior: Any, limits: Any, seed: int) -> Asked:
    """As a sweep runs it, to its budget. Nothing is drawn at random, so the seed has no part."""
    return Asked(guided_of(candidates, knobs, prior, limits))


def guided_stop(candidates: Any, knobs: Any, prior: Any, limits: Any, seed: int) -> Asked:
    """The same, ending when the expected gain is small."""
    return Asked(guided_of(candidates, knobs, prior, limits), STOP_BELOW_GAIN)
