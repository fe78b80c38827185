"""What memory estimators model, each cell of Brimful's row with the figure that proves it.

    python -m benchmarks.capabilities [--json] [--cache .brimful/cache] [--rivals-python RIVALS/bin/python]
                                      [--output docs/measurements/capabilities.md]

Brimful's cells are differences between bills of Llama-2 7B: what is switched, and by how much the figure moves. Other
tools that can run here are asked for the same configurations; the rest is read in their source and marked so.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import capabilities_rivals as rivals
from benchmarks.claims import LLAMA_7B, structure
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import LossPath, Point, Profile, TraceRequest
from orchestrator.contract.units import GIB, format_bytes
from orchestrator.placement.tracing import Untraceable, request_key, trace_all
from orchestrator.predict.job import Job
from orchestrator.predict.memory import Bill, bill
from orchestrator.predict.overhead import CUDA
from orchestrator.predict.verdict import Verdict, judge
from orchestrator.report.markdown import markdown_table
from orchestrator.report.tables import Table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements" / "capabilities.md"
TOKENS = 2048
COLUMNS = (
    "LoRA", "QLoRA", "ZeRO-3 window", "logits and loss", "optimizer step", "reserved", "context, NCCL", "buckets",
    "activations", "published error",
)  # fmt: skip

REQUESTS: dict[str, TraceRequest] = {
    "full": structure(LLAMA_7B),
    "full_kept": structure(LLAMA_7B, recomputes=False),
    "lora": structure(LLAMA_7B, method="lora"),
    "lora_kept": structure(LLAMA_7B, method="lora", recomputes=False),
    "lora_fused_loss": structure(LLAMA_7B, method="lora").model_copy(update={"loss": LossPath.FUSED_LINEAR}),
    "qlora": structure(LLAMA_7B, method="qlora"),
}


@dataclass(frozen=True)
class Models:
    """Traces by the names of REQUESTS."""

    profiles: dict[str, Profile]

    def judged(self, name: str, job: Job) -> Verdict:
        """With a replay of the allocator."""
        return judge(self.profiles[name], job, CUDA)

    def bill(self, name: str, job: Job) -> Bill:
        return bill(self.profiles[name], job, CUDA)

    def term(self, name: str, job: Job, phase: Phase, term: str) -> int:
        """Bytes of a term at the highest moment of a phase."""
        return self.bill(name, job).phases[phase].get(term, 0)


def _plain(rank: int = 0, **changes: object) -> Job:
    job = Job(Point(1, TOKENS, rank), engine="torch", master_dtype=None)
    return replace(job, **changes)  # type: ignore[arg-type]


def _zero(stage: int, ranks: int, rank: int = 0, **changes: object) -> Job:
    job = Job(Point(1, TOKENS, rank), world_size=ranks, ranks_on_node=ranks, zero_stage=stage)  # type: ignore[arg-type]
    return replace(job, **changes)  # type: ignore[arg-type]


def _lora(models: Models) -> str:
    sixteen, large = (models.bill("lora_kept", _plain(rank)).phases[Phase.BACKWARD] for rank in (16, 256))
    return (
        f"rank 16 to 256: trained {format_bytes(sixteen['trained_weights'])} to "
        f"{format_bytes(large['trained_weights'])}, activations {format_bytes(sixteen['activations'])} to "
        f"{format_bytes(large['activations'])}"
    )


def _qlora(models: Models) -> str:
    plain, packed = (models.term(name, _plain(16), Phase.BACKWARD, "frozen_weights") for name in ("lora", "qlora"))
    return f"frozen weights {format_bytes(plain)} to {format_bytes(packed)}"


def _window(models: Models) -> str:
    wide, narrow = (
        models.term("full", _zero(3, 8, stage3_max_live_parameters=live, stage3_max_reuse_distance=live),
                    Phase.FORWARD, "gathered_weights")
        for live in (1_000_000_000, 100_000_000)
    )  # fmt: skip
    return f"live parameters 1e9 to 1e8: gathered {format_bytes(wide)} to {format_bytes(narrow)}"


def _logits(models: Models) -> str:
    kept, fused = (
        max(phase.get("logits", 0) for phase in models.bill(name, _plain(16)).phases.values())
        for name in ("lora", "lora_fused_loss")
    )
    each = kept / (TOKENS * 32_000)
    return f"{format_bytes(kept)}, {each:.0f} bytes for a token and word; fused loss: {format_bytes(fused)}"


def _step(models: Models) -> str:
    foreach, fused = (
        models.bill("full", _plain(optimizer_loop=loop)).phases[Phase.OPTIMIZER_STEP].get("optimizer_temporaries", 0)
        for loop in ("foreach", "fused")
    )
    return f"foreach {format_bytes(foreach)}, fused {format_bytes(fused)}"


def _reserved(models: Models) -> str:
    verdict = models.judged("full_kept", _plain())
    low, high = map(format_bytes, verdict.reserved_bytes)
    return (
        f"allocated {format_bytes(verdict.bill.peak_allocated_bytes)}, reserved {low} to {high}, runs in "
        f"{format_bytes(verdict.smallest_capacity_bytes)}"
    )


def _context(models: Models) -> str:
    one, eight = (models.bill("full", _zero(2, ranks)).device_overhead for ranks in (1, 8))
    return f"context {format_bytes(one['context'])}, communicator {format_bytes(eight['communicator'])}; " + (
        "a sweep measures its own"
    )


def _buckets(models: Models) -> str:
    wide, narrow = (
        models.term("full", _zero(2, 8, 0, reduce_bucket_size=size, overlap_comm=True), Phase.BACKWARD,
                    "reduce_buckets")
        for size in (500_000_000, 16_777_216)
    )  # fmt: skip
    return f"5e8 to 1.7e7 elements, overlapped: {format_bytes(wide)} to {format_bytes(narrow)}"


def _activations(models: Models) -> str:
    kept, recomputed = (models.term(name, _plain(), Phase.FORWARD, "activations") for name in ("full_kept", "full"))
    return f"{format_bytes(kept)}, with checkpointing {format_bytes(recomputed)}"


def _published(models: Models) -> str:
    return "by source: `python -m benchmarks.published FILE.csv`"


CELLS: dict[str, Callable[[Models], str]] = dict(
    zip(
        COLUMNS,
        (_lora, _qlora, _window, _logits, _step, _reserved, _context, _buckets, _activations, _published),
        strict=True,
    )
)
"""What proves each cell of Brimful's row."""

MODELLED = {"y": "yes", "p": "partly", "-": "no", "?": "not told"}
FROM_SOURCE: tuple[tuple[str, str, str, str], ...] = (
    ("DeepSpeed estimate_*", "- - p - - - - - -", "none", "runtime/zero/stage3.py:4016, stage_1_and_2.py; run"),
    ("accelerate estimate-memory", "- - - - - - - - -", "\"few %\", loading only",
     "accelerate commands/estimate.py; run"),
    ("torch MemTracker", "p - y y y - - - y", "none", "torch/distributed/_tools/mem_tracker.py; run"),
    ("llm-analysis 0.2.2", "- - p y - - - - y", "none (a lower bound)", "its analysis.py; run"),
    ("fitcheck-llm 0.3.1", "y y - y ? p p - y", "0.8 % and 5.5 % mean on 10 runs of a T4", "its README; run"),
    ("EleutherAI calc_transformer_mem", "- - y - - - p p p", "none", "cookbook calc/; from source, not run"),
    ("Megatron report_theoretical_memory", "- - - y - - - - y", "none",
     "megatron/training/theoretical_memory_usage.py; from source, not run"),
    ("xMem, VeritasEst", "- - - y y y p - y", "relative to others only", "arXiv 2510.21048; from source, not run"),
    ("LLMem", "- - y p - p p - p", "1.6 % on one GPU, 3.0 % on several", "arXiv 2404.10933; from source, not run"),
    ("Unsloth Studio", "y y - - - p p - p", "none", "studio vram_estimation.py; from source, not run"),
    ("fm-training-estimator", "p p p - - p p - p", "none", "@1d04f05; from source, not run"),
    ("xtuner llm_calc", "- - y y - - - - y", "none", "tools/llm_calc @b934f46; from source, not run"),
)  # fmt: skip
"""Tool, marks for COLUMNS but the last, published error, where it was read and whether it runs here."""


@dataclass(frozen=True)
class Compared:
    """One configuration, Brimful's figure and the others' answers."""

    title: str
    verdict: Verdict
    answers: dict[str, rivals.Answer]


def comparisons(models: Models, python: Path | None) -> tuple[Compared, ...]:
    """Llama-2 7B, one row of 2048 tokens a device, checkpointing."""
    return (
        Compared(
            "full, bf16, ZeRO-3 over 8 devices",
            models.judged("full", _zero(3, 8)),
            {
                "DeepSpeed": rivals.deepspeed_states(3, 8),
                "accelerate": rivals.accelerate_estimate(),
                "llm-analysis": rivals.llm_analysis(python, 3, 8, TOKENS),
            },
        ),
        Compared(
            "full, bf16, ZeRO-2 over 8 devices",
            models.judged("full", _zero(2, 8)),
            {"DeepSpeed": rivals.deepspeed_states(2, 8), "llm-analysis": rivals.llm_analysis(python, 2, 8, TOKENS)},
        ),
        Compared(
            "full, all in bf16, one device, foreach AdamW",
            models.judged("full", _plain(optimizer_loop="foreach")),
            {"torch MemTracker": rivals.mem_tracker("full", TOKENS)},
        ),
        Compared(
            "LoRA r16 on query and value, one device",
            models.judged("lora", _plain(16)),
            {
                "torch MemTracker": rivals.mem_tracker("lora", TOKENS),
                "fitcheck-llm": rivals.fitcheck(python, "none", TOKENS),
            },
        ),
        Compared(
            "QLoRA r16 on query and value, one device",
            models.judged("qlora", _plain(16)),
            {"fitcheck-llm": rivals.fitcheck(python, "nf4", TOKENS)},
        ),
    )


def page(cells: dict[str, str], compared: Sequence[Compared]) -> str:
    """The page in Markdown."""
    row = ("Brimful", *("yes" for _ in COLUMNS[:-1]), cells[COLUMNS[-1]], "proved below")
    others = [
        (tool, *(MODELLED[mark] for mark in marks.split()), error, source) for tool, marks, error, source in FROM_SOURCE
    ]
    proof = Table("", ("capability", "figure"), tuple(cells.items()), frozenset({"capability", "figure"}))
    lines = tuple(
        (
            one.title,
            _gib(one.verdict.bill.peak_allocated_bytes),
            _gib(one.verdict.needed_bytes),
            tool,
            _gib(answer.device_bytes),
            answer.words,
        )
        for one in compared
        for tool, answer in one.answers.items()
    )
    header = ("configuration", "allocated, GiB", "whole device, GiB", "tool", "its figure, GiB", "what it counts")
    words = frozenset({*COLUMNS, "estimator", "source", "configuration", "tool", "what it counts"})
    return (
        "\n\n".join(
            (
                "# What memory estimators model",
                "`python -m benchmarks.capabilities --rivals-python RIVALS/bin/python` makes this page. No figure here "
                "is measured on a device: all are predictions.",
                markdown_table(Table("", ("estimator", *COLUMNS, "source"), (row, *others), words)),
                "## What proves Brimful's row",
                f"Llama-2 7B, one row of {TOKENS} tokens a device; what is switched, and how the bill moves.",
                markdown_table(proof),
                "## The same configuration asked of others",
                "Llama-2 7B, checkpointing, one row of 2048 tokens a device. Brimful's figure is the whole device that "
                "the run needs, with context and communicator.",
                markdown_table(Table("", header, lines, words)),
            )
        )
        + "\n"
    )


def _gib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.2f}"


def traced(cache: Path) -> Models:
    """Raises Untraceable."""

    def told(done: int, total: int) -> None:
        print(f"traced {done} of {total} structures", file=sys.stderr)

    found = trace_all(REQUESTS.values(), cache, processes=2, progress=told)
    profiles = {}
    for name, request in REQUESTS.items():
        profile = found[request_key(request)]
        if isinstance(profile, Untraceable):
            raise profile
        profiles[name] = profile
    return Models(profiles)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print cells and comparisons as JSON and write no page")
    parser.add_argument("--cache", type=Path, default=Path(".brimful/cache"), help="folder of traces")
    parser.add_argument("--rivals-python", type=Path, help="interpreter with llm-analysis and fitcheck-llm")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    chosen = parser.parse_args(arguments)
    models = traced(chosen.cache)
    cells = {name: prove(models) for name, prove in CELLS.items()}
    compared = comparisons(models, chosen.rivals_python)
    if chosen.json:
        table = [
            {"configuration": one.title, "peak_allocated_bytes": one.verdict.bill.peak_allocated_bytes,
             "needed_bytes": one.verdict.needed_bytes,
             "others": {tool: {"device_bytes": answer.device_bytes, "words": answer.words}
                        for tool, answer in one.answers.items()}}
            for one in compared
        ]  # fmt: skip
        json.dump({"cells": cells, "comparisons": table}, sys.stdout, indent=1)
        print()
        return 0
    text = page(cells, compared)
    chosen.output.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
