"""Which kind of device the trials of a sweep use, in a cluster that has several: their speeds do not compare.

Clusters name kinds in their own words: Ray says `A100` of every A100, and `A100-80G` where it was told so.
"""

import re
from collections import Counter
from dataclasses import dataclass

from orchestrator.contract.errors import UnplaceableError
from orchestrator.contract.facts import Facts
from orchestrator.placement.cluster import ClusterView
from orchestrator.spec.hardware import BY_KEY, Device, lookup
from orchestrator.spec.sweep import ANY_DEVICES

_MAKERS = ("nvidia-", "tesla-", "geforce-", "amd-", "instinct-", "amd-instinct-")


@dataclass(frozen=True)
class Chosen:
    """`kind`: the cluster's word, None where all of it is one kind. `device`: its row in the device table, None where
    the word fits no row or several. `note` says what was chosen, where there was a choice."""

    kind: str | None
    device: Device | None
    note: str = ""


def choose_kind(cluster: ClusterView, wanted: str, before: str | None = None) -> Chosen:
    """The kind for a sweep whose spec says `wanted` (`resources.device`) and that used `before` in earlier sessions.

    Raises UnplaceableError when the cluster has no such devices.
    """
    counts = Counter[str]()
    for node in cluster.nodes:
        if node.is_alive and node.devices and node.kind is not None:
            counts[node.kind] += node.devices
    if wanted not in ANY_DEVICES:
        return _named(cluster, counts, wanted)
    if before is not None and before not in counts:
        raise UnplaceableError(f"the sweep's trials ran on {before}, the cluster has {_words(cluster, counts)}")
    if len(counts) < 2:
        return Chosen(None, _row(next(iter(counts), None)))
    kind = before or max(counts, key=lambda each: (counts[each], each))
    note = (
        f"The cluster has {_words(cluster, counts)}; the trials run on {kind} alone, since speeds of different kinds "
        "do not compare (resources.device names another)."
    )
    return Chosen(kind, _row(kind), note)


def named_device(wanted: str) -> Device | None:
    """The device that `resources.device` names; None where it leaves the kind open."""
    return BY_KEY.get(wanted)


def facts_on(facts: Facts, device: Device | None) -> Facts:
    """`facts` of trials that run on `device`, which need not be what the preflight found where the driver runs."""
    if device is None or (facts.device == "cuda" and lookup(facts.device_name) is device):
        return facts
    return facts.model_copy(
        update={
            "device": "cuda",
            "device_name": device.key,
            "device_memory_bytes": device.usable_memory_bytes,
            "peak_flops_per_s": device.peak_flops_per_s,
            "peak_source": f"the dense peak of {device.key} ({device.source})",
        }
    )


def _named(cluster: ClusterView, counts: Counter[str], wanted: str) -> Chosen:
    kinds = [kind for kind in counts if wanted in _keys(kind)]
    if len(kinds) == 1:
        return Chosen(kinds[0] if len(counts) > 1 else None, BY_KEY[wanted])
    if not kinds and not counts and cluster.device_kind == "GPU":
        # a cluster that does not tell what its GPUs are is taken at the spec's word
        return Chosen(None, BY_KEY[wanted])
    raise UnplaceableError(
        f"resources.device is {wanted}, the cluster has {_words(cluster, counts)}; name one of these, or use another "
        "cluster"
    )


def _row(kind: str | None) -> Device | None:
    keys = _keys(kind) if kind is not None else []
    return BY_KEY[keys[0]] if len(keys) == 1 else None


def _keys(kind: str) -> list[str]:
    """Rows of the device table that the cluster's word may mean."""
    word = kind.lower()
    for maker in _MAKERS:
        word = word.removeprefix(maker)
    for exact in (word, word := re.sub(r"(\d)gb?$", r"\1", word)):
        if exact in BY_KEY:
            return [exact]
    plain = word.replace("-", "")
    return [key for key in BY_KEY if key.replace("-", "") == plain or key.startswith(f"{word}-")]


def _words(cluster: ClusterView, counts: Counter[str]) -> str:
    known = ", ".join(f"{counts[kind]} x {kind}" for kind in sorted(counts))
    return known or f"{cluster.devices} x {cluster.device_kind}"
