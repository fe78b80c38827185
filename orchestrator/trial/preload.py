"""Imports everything that a trial uses, so that a fork of this process starts training at once.

Some libraries import more inside their calls; what those calls need is listed here by name. No device is touched and
no thread of Python, OpenMP or BLAS is started: a fork keeps only the thread that called it.
"""

import importlib
import os
import sys

PROCESS_ENVIRONMENT = {
    "LRU_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**23),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Read once by a library when the process starts, so it has to stand in the environment before.

The malloc settings make peaks on CPU repeatable. Each further arena reserves 64 MiB of address space, which would count
as memory of the trial. With glibc's own, growing threshold, tensors of up to 32 MiB share a heap that fragments: the
peak of one and the same trial then climbs from step to step, by 39 % in 11 steps of a 6.5 M parameter Llama (250 to
348 MiB), against 270 MiB, reached in the second step, with a fixed one. oneDNN and PyTorch keep 1024 compiled kernels
each, one for every shape: in bf16 with batches of unlike length they grew from 190 to 1199 MiB in 11 steps, and to
304 MiB with these two capacities, at the same speed.
"""

TRAINING_MODULES = (
    "numpy",
    "scipy.stats",
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.modeling_utils",
    "transformers.integrations.deepspeed",
    "transformers.integrations.sdpa_attention",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "peft.utils.transformers_weight_conversion",
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.adam",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.profiler._cupti_monitor",
    "orchestrator.trial.guard",
)


def restart_with_environment() -> None:
    """Start this process again, command line and all, unless it runs under `PROCESS_ENVIRONMENT`."""
    missing = {name: value for name, value in PROCESS_ENVIRONMENT.items() if name not in os.environ}
    if missing:
        os.environ.update(missing)
        os.execv(sys.executable, sys.orig_argv)


def preload() -> None:
    """Import all training modules."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        # else DeepSpeed searches for a device, and warns
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in TRAINING_MODULES:
        importlib.import_module(name)
