"""What a training process takes beside its tensors: on the device outside of the allocator, and on its host."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.units import GIB, MIB
from orchestrator.predict.job import Job
from orchestrator.predict.terms import Terms


@dataclass(frozen=True)
class Overhead:
    """Bytes of one rank. `communicator_bytes` counts once for each group of ranks that a run makes."""

    context_bytes: int
    communicator_bytes: int
    workspace_bytes: int
    process_bytes: int

    def device_terms(self, job: Job) -> Terms:
        """Outside of the allocator."""
        communicators = self.communicator_bytes if job.world_size > 1 else 0
        terms = {"context": self.context_bytes, "communicator": communicators}
        return {name: size_bytes for name, size_bytes in terms.items() if size_bytes}


CUDA = Overhead(
    context_bytes=400 * MIB,
    communicator_bytes=656 * MIB,
    workspace_bytes=2 * (8 * MIB + 128 * 1024),
    process_bytes=3 * GIB,
)
"""Context: 0.47 GiB with lazy loading on an A100, torch 2.1 (stas00/ml-engineering, debug/memory), and at most 0.39
GiB where a run reserved 78.76 of 79.15 GiB (modelscope/ms-swift 6cfbc2ec, docs/source_en/LLM/Benchmark.md); drivers,
libraries and older PyTorch change it, so a sweep measures its own. Communicator: 544 to 688 MB each on four A100
(NVIDIA/nccl #964). Workspace: cuBLAS' 8.125 MiB (torch 2.13
ATen/cuda/CublasHandlePool.cpp, 32 MiB on Hopper) for the thread of the forward pass and that of the backward pass.
Process: resident size of a rank that has imported PyTorch, transformers and DeepSpeed and made a CUDA context; assumed.
"""

CPU = Overhead(context_bytes=96 * MIB, communicator_bytes=40 * MIB, workspace_bytes=0, process_bytes=GIB // 2)
"""Context: by what a rank's address space grew beyond its tensors (stacks of threads, the heap's gaps): 70 to 125 MiB
in trials of one rank, some 40 MiB more with a second one over gloo, on two cores of an EPYC
(`benchmarks/predicted_sweep.py`). Process: resident size of a rank forked from a warm template."""


def default_overhead(device: Literal["cuda", "cpu"]) -> Overhead:
    """Where nothing was measured."""
    return CUDA if device == "cuda" else CPU
