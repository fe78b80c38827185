"""The environment that a template and its ranks see: an allow-list, so that no secret of the driver reaches a trial."""

from collections.abc import Mapping

_PASSED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "SSL_CERT_FILE", "CUDA_HOME", "CUDA_PATH", "CUDA_DEVICE_ORDER",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_MODULES_CACHE",
    "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR",
    "TORCH_CUDA_ARCH_LIST",
})  # fmt: skip
_PASSED_PREFIXES = ("LC_", "NCCL_", "GLOO_", "TP_", "NVIDIA_", "PYTORCH_", "DS_")


def template_environment(
    environment: Mapping[str, str], visible_devices: str | None, threads_per_device: int
) -> dict[str, str]:
    """The environment of a template on one device, from that of the process that starts it.

    `visible_devices` is the value of CUDA_VISIBLE_DEVICES; None: the device is a CPU slot.
    """
    passed = {
        name: value for name, value in environment.items() if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    fixed = {
        "OMP_NUM_THREADS": str(threads_per_device),
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": visible_devices or "",
    }
    if visible_devices is None:
        fixed["DS_ACCELERATOR"] = "cpu"
    return passed | fixed


def rank_environment(threads_per_rank: int, ranks_on_node: int, is_one_node: bool) -> dict[str, str]:
    """Variables of one rank beside the torchrun ones that every rank has.

    Ray sets OMP_NUM_THREADS=1 in its workers: the trial's own count is said outright. `ranks_on_node`, of the rank's
    own node, share the host memory of `limits.host_memory`.
    """
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if is_one_node else {}
    return {"OMP_NUM_THREADS": str(threads_per_rank), "LOCAL_WORLD_SIZE": str(ranks_on_node)} | loopback
