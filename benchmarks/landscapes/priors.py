"""What Brimful predicts of a simulated cluster's configurations: its own bill and clock, as before any launch."""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.landscapes.clusters import Cluster, Configuration, configurations
from orchestrator.contract.config import Checkpointing, ModelSource, Precision
from orchestrator.contract.profile import Dtype, Point, Profile, TraceRequest
from orchestrator.contract.units import GIB
from orchestrator.placement.tracing import Untraceable, request_key, trace_all
from orchestrator.predict.constants import CUDA_CLOCK
from orchestrator.predict.job import Job
from orchestrator.predict.machine import device_links, processor
from orchestrator.predict.memory import Bill
from orchestrator.predict.overhead import CUDA
from orchestrator.predict.time import priced
from orchestrator.predict.verdict import judge
from orchestrator.predict.work import StepWork, step_work
from orchestrator.spec.catalog import weightless
from orchestrator.spec.hardware import BETWEEN_NODES


@dataclass(frozen=True)
class Priced:
    """A configuration with its prediction, and the bill and the work that the prediction is made from."""

    configuration: Configuration
    tokens_per_s: float
    device_gib: float
    host_gib: float
    bill: Bill
    work: StepWork


def price(cluster: Cluster, cache: Path) -> tuple[list[Priced], float]:
    """All configurations, in order, and the number of the model's weights. Traces are kept in `cache`."""
    found = list(configurations(cluster))
    requests = [_request(cluster, each) for each in found]
    profiles = trace_all(requests, cache, progress=_tell)
    keys = {request.model_dump_json(): request_key(request) for request in requests}
    result, weights = [], 0.0
    for each, request in zip(found, requests, strict=True):
        profile = profiles[keys[request.model_dump_json()]]
        if isinstance(profile, Untraceable):
            raise profile
        result.append(price_one(cluster, each, profile))
        weights = float(sum(parameter.numel(0) for parameter in profile.parameters))
    return result, weights


def precision_of(cluster: Cluster) -> Dtype:
    """Without bf16 in hardware people train in fp16."""
    return "bf16" if Precision.BF16 in cluster.device.peak_flops_per_s else "fp16"


def price_one(cluster: Cluster, configuration: Configuration, profile: Profile) -> Priced:
    """One configuration, by the trace of its structure."""
    job = _job(cluster, configuration)
    verdict = judge(profile, job, CUDA, replays=False)
    work = step_work(profile, job)
    links = device_links(cluster.device, BETWEEN_NODES[cluster.link])
    time = priced(work, processor(cluster.device), links, CUDA_CLOCK)
    return Priced(
        configuration=configuration,
        tokens_per_s=time.tokens_per_second,
        device_gib=verdict.needed_bytes / GIB,
        host_gib=verdict.bill.peak_host_bytes / GIB,
        bill=verdict.bill,
        work=work,
    )


def _request(cluster: Cluster, configuration: Configuration) -> TraceRequest:
    dtype = precision_of(cluster)
    is_lora = configuration.method == "lora"
    return TraceRequest(
        model=weightless(ModelSource(id=cluster.model)),
        dtype=dtype,
        adapter={"target_modules": "all-linear", "lora_dropout": 0.0} if is_lora else None,
        adapter_dtype=("fp32" if configuration.zero_stage == 3 else dtype) if is_lora else None,
        gradient_checkpointing=Checkpointing(configuration.gradient_checkpointing),
    )


def _job(cluster: Cluster, configuration: Configuration) -> Job:
    return Job(
        point=Point(configuration.micro_batch, cluster.sequence_tokens, configuration.lora_rank),
        world_size=cluster.ranks,
        ranks_on_node=cluster.devices_per_node,
        gradient_accumulation=cluster.global_sequences // (cluster.ranks * configuration.micro_batch),
        zero_stage=configuration.zero_stage,
        offload_optimizer=configuration.offload_optimizer,
        offload_param=configuration.offload_param,
        reduce_bucket_size=configuration.reduce_bucket,
        allgather_bucket_size=configuration.reduce_bucket,
    )


def _tell(done: int, total: int) -> None:
    print(f"traced {done} of {total} new structures", file=sys.stderr, flush=True)
