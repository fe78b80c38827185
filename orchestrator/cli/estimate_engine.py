"""What `estimate` can price and a sweep cannot run: other engines, quantised base weights, offload to NVMe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import JsonValue

from orchestrator.contract.errors import UsageError
from orchestrator.contract.profile import Quantization, TraceRequest
from orchestrator.predict.job import Job, OffloadDevice
from orchestrator.spec.places import did_you_mean
from orchestrator.spec.sweep import KnobValue

NVME = "nvme"
ENGINES = ("deepspeed", "fsdp", "ddp")
QUANTIZATIONS = (Quantization.NONE, Quantization.NF4, Quantization.NF4_DOUBLE, Quantization.INT8)
_OFFLOADS = ("offload_optimizer", "offload_param")
_NEEDS_DEEPSPEED = ("zero_stage", *_OFFLOADS)


@dataclass(frozen=True)
class EngineChoice:
    """`to_nvme` names the knobs of offload that stand at `cpu` in the point and mean `nvme`."""

    engine: Literal["deepspeed", "fsdp", "ddp"] = "deepspeed"
    quantization: Quantization = Quantization.NONE
    to_nvme: tuple[str, ...] = ()

    def request(self, asked: TraceRequest) -> TraceRequest:
        """The structure under this engine. Autocast computes in half precision beside DeepSpeed's own casts; peft's
        adapters are float32 there, and FSDP computes with them in half precision."""
        changes: dict[str, object] = {"quantization": self.quantization}
        if self.engine != "deepspeed" and asked.dtype != "fp32":
            changes["autocast"] = asked.dtype
            changes["adapter_dtype"] = asked.dtype if asked.adapter and self.engine == "fsdp" else None
        return asked.model_copy(update=changes)

    def job(self, job: Job) -> Job:
        """The run under this engine. Under DDP weights are updated in their own type; accelerate makes what FSDP
        trains under mixed precision float32 (`accelerator.py`, prepare_model)."""
        match self.engine:
            case "ddp":
                return replace(job, engine="torch", zero_stage=0, master_dtype=None)
            case "fsdp":
                return replace(job, engine="fsdp", zero_stage=0)
            case "deepspeed":
                optimizer: OffloadDevice = "nvme" if "offload_optimizer" in self.to_nvme else job.offload_optimizer
                param: OffloadDevice = "nvme" if "offload_param" in self.to_nvme else job.offload_param
                return replace(job, offload_optimizer=optimizer, offload_param=param)

    def allows(self, change: Mapping[str, KnobValue]) -> bool:
        """Whether new values of these knobs mean anything under this engine."""
        return self.engine == "deepspeed" or not change.keys() & set(_NEEDS_DEEPSPEED)

    def shown(self, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Values of knobs as the user knows them."""
        return config | {name: NVME for name in self.to_nvme if config.get(name) is not None}

    def assumptions(self) -> list[str]:
        """What is taken for granted of the engine."""
        found = {
            "deepspeed": "engine: DeepSpeed, whose settings are those of the knobs; unset knobs at their defaults",
            "fsdp": "engine: FSDP as accelerate runs it, full shard, one unit a layer, bf16 by mixed precision with "
            "trained weights in fp32",
            "ddp": "engine: plain PyTorch, DistributedDataParallel on several devices; weights and states in their "
            "precision without fp32 masters, bf16 by autocast, adapters in fp32",
        }
        quantised = f"frozen linear weights stored as {self.quantization}, the others in their precision"
        return [found[self.engine], *([quantised] if self.quantization is not Quantization.NONE else [])]


def engine_choice(
    engine: str | None, quantization: str | None, point: Mapping[str, KnobValue], to_nvme: tuple[str, ...]
) -> EngineChoice:
    """The choice of the command line beside the knobs of `point`. Raises UsageError for what cannot be run."""
    word = engine or "deepspeed"
    if word not in ENGINES:
        raise UsageError(f"--engine {word}: {did_you_mean(word, ENGINES)}")
    stored = quantization or "none"
    if stored not in QUANTIZATIONS:
        raise UsageError(f"--quantization {stored}: {did_you_mean(stored, [each.value for each in QUANTIZATIONS])}")
    if stored != "none" and point.get("method") != "lora":
        raise UsageError(f"--quantization {stored}: quantised weights cannot be trained themselves; add --method lora")
    needless = [name for name in _NEEDS_DEEPSPEED if point.get(name) not in (None, 0, "none")]
    if word != "deepspeed" and needless:
        option = needless[0].replace("_", "-")
        raise UsageError(f"--{option} is DeepSpeed's: leave it out, or say --engine deepspeed instead of {word}")
    if to_nvme and point.get("zero_stage") != 3:
        option = to_nvme[0].replace("_", "-")
        raise UsageError(f"--{option} nvme: DeepSpeed does so in stage 3 alone; add --zero-stage 3")
    return EngineChoice(word, Quantization(stored), to_nvme)  # type: ignore[arg-type]


def without_nvme(texts: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Options as knobs know them, and the names of those that said `nvme`."""
    named = tuple(name for name in _OFFLOADS if texts.get(name) == NVME)
    return {**texts, **dict.fromkeys(named, "cpu")}, named
