"""Short names of candidates for people, for tables and for MLflow."""

from collections.abc import Collection

from orchestrator.contract.config import Checkpointing, Layout, Method, Offload
from orchestrator.space.knobs import Point

MAX_LABEL = 60

_SHORT = {
    "attention": "",
    "optimizer": "",
    "reduce_bucket_size": "rb",
    "allgather_bucket_size": "ab",
    "overlap_comm": "overlap-",
    "stage3_max_live_parameters": "live",
    "stage3_max_reuse_distance": "reuse",
    "stage3_prefetch_bucket_size": "pre",
    "stage3_param_persistence_threshold": "keep",
    "sub_group_size": "sub",
}


def label(canonical: Point, searched: Collection[str], candidate: str, layout: Layout) -> str:
    """E.g. `lora r16 z2 off-opt gc mb4 bf16`: the main knobs, then of the devices, the nodes and the other knobs each
    in `searched` that has an effect.

    `canonical` is a point in canonical form. At most MAX_LABEL characters; a longer label is cut and ends with the
    beginning of the id `candidate`.
    """
    words = [str(canonical["method"])]
    if canonical["method"] == Method.LORA:
        words.append(f"r{canonical['lora_rank']}")
        if "lora_targets" in searched:
            targets = canonical["lora_targets"]
            words.append("+".join(targets) if isinstance(targets, tuple) else str(targets))
    words.append(f"z{canonical['zero_stage']}")
    if canonical["offload_optimizer"] == Offload.CPU:
        words.append("off-opt")
    if canonical["offload_param"] == Offload.CPU:
        words.append("off-par")
    if canonical["gradient_checkpointing"] == Checkpointing.FULL:
        words.append("gc")
    words += [f"mb{canonical['micro_batch']}", str(canonical["precision"])]
    if "devices_per_trial" in searched:
        words.append(f"{layout.world_size}dev")
    if "nodes" in searched and layout.nodes is not None:
        words.append(f"{layout.nodes}node{'s' * (layout.nodes != 1)}")
    for name, short in _SHORT.items():
        if name in searched and canonical[name] is not None:
            words.append(f"{short}{_count(canonical[name])}")
    text = " ".join(words)
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 7]}~{candidate[:6]}"


def _count(value: object) -> str:
    """A count of elements in few characters: `5e8`, `16k`, `4096`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 1000:
        digits = str(value).rstrip("0")
        zeros = len(str(value)) - len(digits)
        return f"{digits}e{zeros}" if zeros >= 3 else str(value)
    return str(value)
