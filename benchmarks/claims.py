"""Public claims about the memory of fine-tuning, each beside an itemised bill and a stand computed from it.

    python -m benchmarks.claims [--json] [--cache .brimful/cache] [--output docs/measurements/claims.md]

Every figure is predicted, none is measured. A claim holds where all configurations that its words allow agree with it,
holds only if where some do, and does not hold where none does. The page names what each configuration assumes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from benchmarks.claims_stands import Amount, Fit, Priced, Share, Test
from orchestrator.contract.config import Checkpointing, ModelSource
from orchestrator.contract.profile import Dtype, Point, Quantization, TraceRequest
from orchestrator.contract.units import GIB
from orchestrator.placement.tracing import Untraceable, request_key, trace_all
from orchestrator.predict.job import Job
from orchestrator.predict.overhead import CUDA
from orchestrator.predict.verdict import judge
from orchestrator.report.markdown import markdown_table
from orchestrator.report.tables import Table
from orchestrator.spec.catalog import known
from orchestrator.spec.hardware import BY_KEY

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements" / "claims.md"
GB = 10**9
LLAMA_7B, LLAMA_70B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf"
SMALL_BUCKETS = {"reduce_bucket_size": 4096 * 4096, "stage3_prefetch_bucket_size": int(0.9 * 4096 * 4096)}
"""What transformers sets for "auto" at a hidden size of 4096, in elements."""


@dataclass(frozen=True)
class Configuration:
    """One reading of a claim. `label` says what it assumes beyond the claim's own words."""

    label: str
    request: TraceRequest
    job: Job
    device: str | None = None


@dataclass(frozen=True)
class Claim:
    """`text`: as it is told; `test`: when a configuration agrees with it."""

    key: str
    text: str
    test: Test
    configurations: tuple[Configuration, ...]


def structure(
    name: str,
    *,
    method: Literal["full", "lora", "qlora"] = "full",
    dtype: Dtype = "bf16",
    recomputes: bool = True,
    attention: Literal["eager", "sdpa"] = "sdpa",
) -> TraceRequest:
    """A built-in shape; LoRA on the query and value projections, as peft's default is for Llama."""
    entry = known(name)
    assert entry is not None, name
    adapter: dict[str, JsonValue] = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}
    return TraceRequest(
        model=ModelSource(config=entry.config),
        dtype=dtype,
        adapter=None if method == "full" else adapter,
        adapter_dtype=None if method == "full" else dtype,
        has_rank=method != "full",
        quantization=Quantization.NF4_DOUBLE if method == "qlora" else Quantization.NONE,
        gradient_checkpointing=Checkpointing.FULL if recomputes else Checkpointing.NONE,
        attention=attention,
    )


def _zero(stage: Literal[0, 1, 2, 3], point: Point, ranks: int = 1, changes: Mapping[str, Any] | None = None) -> Job:
    """On one node, with DeepSpeed's own defaults but for `changes`."""
    return replace(Job(point, world_size=ranks, ranks_on_node=ranks, zero_stage=stage), **(changes or {}))


def _adam() -> Claim:
    request, point = structure(LLAMA_7B, dtype="fp16"), Point(1, 512)
    pure = Job(point, engine="torch", master_dtype=None)
    return Claim(
        "7b-adam",
        "A 7B model in fp16 with Adam needs 42 GB.",
        Amount((42 * GB, 42 * GB), "of the whole device"),
        (
            Configuration("all in fp16, states too; sequence 512, checkpointing", request, pure),
            Configuration(
                "all in fp16, foreach update; sequence 512, checkpointing",
                request,
                replace(pure, optimizer_loop="foreach"),
            ),
            Configuration("fp32 masters and states (DeepSpeed, stage 0); sequence 512, checkpointing", request,
                          _zero(0, point)),
            Configuration("fp32 masters and states, stage 2 on one device; sequence 512, checkpointing", request,
                          _zero(2, point)),
        ),
    )  # fmt: skip


def _t4() -> Claim:
    request = structure(LLAMA_7B, method="lora", dtype="fp16")
    offload = {"offload_optimizer": "cpu"}
    return Claim(
        "7b-lora-t4",
        "LoRA of rank 8 on a 7B model fits a T4 of 16 GB with checkpointing and ZeRO-2 with optimizer offload, "
        "at about 14 GB.",
        Fit((14 * GB, 14 * GB)),
        tuple(
            Configuration(f"micro-batch 1, sequence {tokens}, {words}", request,
                          _zero(2, Point(1, tokens, 8), changes={**offload, **buckets}), "t4")
            for tokens in (512, 1024, 2048)
            for words, buckets in (
                ("DeepSpeed's own buckets", {}),
                ("buckets of 1.7e7", {"reduce_bucket_size": SMALL_BUCKETS["reduce_bucket_size"]}),
            )
        ),
    )  # fmt: skip


def _two_a10() -> Claim:
    return Claim(
        "7b-lora-2xa10",
        "Two A10 of 24 GB run LoRA of rank 16 on a 7B model with ZeRO-3 and accumulation 4 at about 18 GB each.",
        Fit((18 * GB, 18 * GB)),
        tuple(
            Configuration(
                f"micro-batch {batch}, sequence {tokens}, {'' if recomputes else 'no '}checkpointing",
                structure(LLAMA_7B, method="lora", recomputes=recomputes),
                _zero(3, Point(batch, tokens, 16), 2, {"gradient_accumulation": 4}),
                "a10",
            )
            for batch, tokens, recomputes in ((1, 512, True), (1, 2048, True), (4, 2048, True), (1, 512, False),
                                              (2, 512, False), (1, 2048, False))
        ),
    )  # fmt: skip


def _activations(batch: int, claimed: tuple[int, int]) -> Claim:
    kinds: tuple[tuple[str, TraceRequest], ...] = (
        ("full, sdpa, no checkpointing", structure(LLAMA_7B, recomputes=False)),
        ("full, eager attention, no checkpointing", structure(LLAMA_7B, recomputes=False, attention="eager")),
        ("LoRA r16, sdpa, no checkpointing", structure(LLAMA_7B, method="lora", recomputes=False)),
        ("full, sdpa, checkpointing", structure(LLAMA_7B)),
    )
    return Claim(
        f"7b-activations-{batch}",
        f"Activations of a 7B model take {claimed[0] // GB} to {claimed[1] // GB} GB at sequence 2048 and batch "
        f"{batch}" + (", four times those of batch 1." if batch > 1 else "."),
        Amount(claimed, "of activations, logits and temporaries", ("activations", "logits", "temporaries")),
        tuple(
            Configuration(
                label,
                request,
                Job(Point(batch, 2048, 0 if request.adapter is None else 16), engine="torch", master_dtype=None),
            )
            for label, request in kinds
        ),
    )


def _seventy() -> Claim:
    both = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    full, adapted = structure(LLAMA_70B), structure(LLAMA_70B, method="lora")
    nvme = {"offload_optimizer": "nvme", "offload_param": "nvme"}
    small = {**SMALL_BUCKETS, "stage3_max_live_parameters": 300_000_000, "stage3_max_reuse_distance": 300_000_000}
    return Claim(
        "70b-24gb",
        "A 70B model trains on one card of 24 GB with ZeRO-3 and offload.",
        Fit(None),
        (
            Configuration("full, both offloads to the host, sequence 512, checkpointing", full,
                          _zero(3, Point(1, 512), changes=both), "rtx4090"),
            Configuration("full, both offloads to NVMe, sequence 512, checkpointing", full,
                          _zero(3, Point(1, 512), changes=nvme), "rtx4090"),
            Configuration("full, both offloads to the host, sequence 2048, checkpointing, window of 3e8", full,
                          _zero(3, Point(1, 2048), changes={**both, **small}), "rtx4090"),
            Configuration("LoRA r16, both offloads to the host, sequence 512, checkpointing", adapted,
                          _zero(3, Point(1, 512, 16), changes=both), "rtx4090"),
            Configuration("LoRA r16, nothing offloaded, sequence 512, checkpointing", adapted,
                          _zero(3, Point(1, 512, 16)), "rtx4090"),
        ),
    )  # fmt: skip


def _share(method: Literal["lora", "qlora"], claimed: tuple[float, float]) -> Claim:
    name = {"lora": "LoRA", "qlora": "QLoRA"}[method]
    configurations = []
    engines: tuple[tuple[str, Callable[[Point], Job]], ...] = (
        ("all in bf16", lambda point: Job(point, engine="torch", master_dtype=None)),
        ("with fp32 masters", lambda point: _zero(0, point)),
    )
    for words, engine in engines:
        for batch, tokens in ((1, 512), (1, 2048), (4, 2048)):
            point = Point(batch, tokens, 16)
            sizes = f"micro-batch {batch}, sequence {tokens}, checkpointing"
            configurations += [
                Configuration(f"full {words}; {sizes}", structure(LLAMA_7B), engine(replace(point, lora_rank=0))),
                Configuration(f"{name} r16 {words}; {sizes}", structure(LLAMA_7B, method=method), engine(point)),
            ]
    return Claim(
        f"7b-{method}-share",
        f"{name} needs {100 * claimed[0]:.0f} to {100 * claimed[1]:.0f} % of the memory of full fine-tuning.",
        Share(claimed),
        tuple(configurations),
    )


def claims() -> tuple[Claim, ...]:
    """All, in the order of the page."""
    return (
        _adam(),
        _t4(),
        _two_a10(),
        _activations(1, (4 * GB, 6 * GB)),
        _activations(4, (16 * GB, 24 * GB)),
        _seventy(),
        _share("lora", (0.2, 0.3)),
        _share("qlora", (0.1, 0.15)),
    )


def price(found: Sequence[Claim], cache: Path) -> dict[str, tuple[Priced, ...]]:
    """Every configuration of every claim, by the claim's key. Raises Untraceable."""
    requests = {request_key(one.request): one.request for claim in found for one in claim.configurations}

    def told(done: int, total: int) -> None:
        print(f"traced {done} of {total} structures", file=sys.stderr)

    profiles = trace_all(requests.values(), cache, processes=2, progress=told)
    result: dict[str, tuple[Priced, ...]] = {}
    for claim in found:
        priced = []
        for one in claim.configurations:
            profile = profiles[request_key(one.request)]
            if isinstance(profile, Untraceable):
                raise profile
            capacity = BY_KEY[one.device].usable_memory_bytes if one.device else None
            priced.append(Priced(one.label, judge(profile, one.job, CUDA, capacity), one.device))
        result[claim.key] = tuple(priced)
    return result


def page(found: Sequence[Claim], prices: dict[str, tuple[Priced, ...]]) -> str:
    """The page in Markdown."""
    parts = [
        "# Public claims beside bills",
        "`python -m benchmarks.claims` makes this page. Every figure is **predicted, not measured**: the bill of "
        "Llama-2 7B or 70B under the installed libraries, in GB of 10^9 bytes, at the highest moment. The peak is what "
        "the allocator is asked for; the whole device adds what the allocator cannot use and the context "
        f"({CUDA.context_bytes / GIB:.1f} GiB assumed). A figure agrees with a claim within 15 %.",
    ]
    for claim in found:
        rows = prices[claim.key]
        stand = claim.test.stand(rows)
        parts += [
            f"## {claim.text}",
            f"**{stand.verdict}** {stand.reason}",
            markdown_table(_table(rows, claim.test.terms)),
        ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Priced], names: tuple[str, ...]) -> Table:
    """Terms of the binding phase, or of the phase in which `names` come to most."""
    shown = [row.terms(names) for row in rows]
    columns = list(dict.fromkeys(term for terms in shown for term in terms if terms[term] >= GB // 100))
    header = ("configuration", "phase", *(term.replace("_", " ") for term in columns), "peak", "whole device", "host")
    cells = tuple(
        (
            row.label,
            row.phase(names).value,
            *(_gb(terms.get(term, 0)) for term in columns),
            _gb(row.verdict.bill.peak_allocated_bytes),
            _gb(row.verdict.needed_bytes),
            _gb(row.verdict.bill.peak_host_bytes),
        )
        for row, terms in zip(rows, shown, strict=True)
    )
    return Table("", header, cells, frozenset({"configuration", "phase"}))


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.2f}"


def as_json(found: Sequence[Claim], prices: dict[str, tuple[Priced, ...]]) -> JsonValue:
    """Claims with their stand and whole bills."""
    return [
        {
            "key": claim.key,
            "claim": claim.text,
            "stand": stand.verdict,
            "reason": stand.reason,
            "configurations": [row.as_json() for row in prices[claim.key]],
        }
        for claim in found
        for stand in (claim.test.stand(prices[claim.key]),)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the claims as JSON and write no page")
    parser.add_argument("--cache", type=Path, default=Path(".brimful/cache"), help="folder of traces")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    chosen = parser.parse_args(arguments)
    found = claims()
    prices = price(found, chosen.cache)
    if chosen.json:
        json.dump(as_json(found, prices), sys.stdout, indent=1)
        print()
        return 0
    text = page(found, prices)
    chosen.output.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
