"""What the preflight is asked for a spec: the model, the data, and every set of layers that some candidate adapts."""

from pathlib import Path
from typing import Literal

from orchestrator.contract.config import Precision
from orchestrator.contract.facts import DataRequest, PreflightRequest
from orchestrator.space.defaults import default_choices
from orchestrator.space.trials import model_source
from orchestrator.spec.sweep import KnobValue, ResourcesSection, SweepSpec


def preflight_request(spec: SweepSpec, data_directory: Path, threads_per_rank: int = 1) -> PreflightRequest:
    """The request for `spec`; prepared rows go to `data_directory`."""
    quality = spec.measure.quality
    precisions = {Precision(str(value)) for value in _values(spec, "precision")}
    return PreflightRequest(
        model=model_source(spec.model),
        data=DataRequest(**spec.data.model_dump(), eval_rows=quality.eval_rows if quality is not None else 0),
        data_directory=str(data_directory.absolute()),
        lora_targets=lora_target_sets(spec),
        precisions=tuple(sorted(precisions)) or tuple(Precision),
        device=device_of(spec.resources),
        threads_per_rank=threads_per_rank,
    )


def device_of(resources: ResourcesSection) -> Literal["auto", "cpu", "cuda"]:
    """What the preflight looks at: a kind of GPU that the spec names need not be there where the driver runs."""
    match resources.device:
        case "cpu" | "cuda" as word:
            return word
        case _:
            return "auto"


def lora_target_sets(spec: SweepSpec) -> tuple[tuple[str, ...], ...]:
    """Each set of named layers that the spec fixes, searches, pairs or has in its baseline; all-linear is none."""
    named = {value for value in _values(spec, "lora_targets") if isinstance(value, tuple)}
    return tuple(sorted(named))


def _values(spec: SweepSpec, knob: str) -> list[KnobValue]:
    """Every value that the spec gives to `knob` anywhere."""
    searched = spec.search.knobs if spec.search is not None else default_choices(spec)
    values = list(searched.get(knob, ()))
    points = [spec.train.fixed]
    if spec.search is not None:
        points += [*spec.search.paired, *([spec.search.baseline] if spec.search.baseline else [])]
    return values + [point[knob] for point in points if knob in point]
