"""What a simulated cluster does with a configuration: facts of its devices, and non-idealities that no prior knows.

Shared with the prediction are counts alone: FLOPs, bytes and collectives of a step, and the terms of the memory bill.
What they cost is worked out here in another way, with constants drawn for each landscape from published ranges. None of
it is a measurement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.landscapes.clusters import Cluster
from benchmarks.landscapes.priors import Priced
from orchestrator.contract.profile import Dtype
from orchestrator.contract.units import GIB
from orchestrator.predict.traffic import Collective
from orchestrator.predict.work import StepWork
from orchestrator.spec.hardware import BETWEEN_NODES

THRASH_FROM = 0.93
"""Share of the limit above which the allocator gives its cache back within steps."""
MEMORY_BIAS = (-0.12, 0.14)
"""Of a whole landscape, in log units: what estimators miss in common (drivers, communicators, library versions)."""
TERM_DEVIATIONS = {
    "activations": 0.06,
    "temporaries": 0.15,
    "logits": 0.05,
    "gathered_weights": 0.12,
    "gradients": 0.06,
    "reduce_buckets": 0.10,
}
"""Of the logarithm of a term of the bill, drawn once a landscape; 0.02 for the others."""
MEMORY_RESPONSE = 0.04
"""Standard deviation of what knobs add to the logarithm of the need, beside the bill's terms."""
PAIR_SHARE = 0.35
"""Deviation of what a pair of levels adds, over that of a single one."""
FRAGMENTATION = (1.01, 1.09)
"""Smallest capacity over allocated, by structure: the span in replays of 54 structures of 1B to 8B models
(`orchestrator.predict.verdict.FRAGMENTATION`, which holds the middle)."""

_HOOK_S = 120e-6
"""Of the Python that stage 3 runs around a module in one pass. Made up, and apart from the prediction's figure."""
_CALL_S = 150e-6
"""That a collective between nodes takes beside its bytes, for each unit by which the cliff is above 1. Made up."""
_WITHOUT_PEERS = 0.45
"""Share of the links' rate where devices reach each other through the host alone. Made up."""
_MOST_HIDDEN = 0.9
"""Share of a step's computing beside which something can hide, at most. Made up."""

Pair = tuple[str, str | int, str, str | int]


@dataclass(frozen=True)
class Rates:
    """Drawn once a landscape."""

    matmul_share: float
    """Of the best product measured on the device, by large micro-batches. Published steps reach 0.45 to 0.65 of the
    peak."""
    half_tokens: float
    """Tokens of a micro-batch at which products reach half of that."""
    falloff: float
    """Loss a doubling beyond 16 rows: caches, longer kernels' tails."""
    attention_share: float
    """Of the peak. FlashAttention-2 reports 0.35 to 0.73 by head size and pass (arXiv:2307.08691, section 4.1)."""
    memory_share: float
    traffic_per_born_byte: float
    launch_s: float
    micro_step_s: float
    step_s: float
    bus_share: float
    """Of the links' rate: NCCL's tests reach 0.7 to 0.85 with large messages (stas00/ml-engineering, network)."""
    half_message_bytes: float
    """Message size at which a ring reaches half of that."""
    node_cliff: float
    """By how much collectives between nodes are slower than their link's rate says, in small calls above all."""
    overlap: Mapping[str, float]
    """Share of collectives, and of copies, that hides."""
    devices_on_switch: int
    """That share one link to the host."""
    host_link_share: float
    host_optimizer_share: float
    """Of the host's memory rate, with all ranks at once; CPU-Adam alone reaches half (arXiv:2101.06840)."""
    thrash: float
    """Slowdown at the limit."""


def draw_rates(rng: np.random.Generator, cluster: Cluster) -> Rates:
    """Constants of one landscape."""
    on_pcie = cluster.device.link.startswith("PCIe")
    return Rates(
        matmul_share=rng.uniform(0.70, 0.95),
        half_tokens=float(np.exp(rng.uniform(np.log(150), np.log(1200)))),
        falloff=rng.uniform(0.0, 0.04),
        attention_share=rng.uniform(0.35, 0.65),
        memory_share=rng.uniform(0.70, 0.90),
        traffic_per_born_byte=rng.uniform(1.5, 2.4),
        launch_s=rng.uniform(6e-6, 16e-6),
        micro_step_s=rng.uniform(1e-3, 5e-3),
        step_s=rng.uniform(3e-3, 40e-3),
        bus_share=rng.uniform(0.60, 0.85),
        half_message_bytes=float(np.exp(rng.uniform(np.log(2e6), np.log(3e7)))),
        node_cliff=rng.uniform(1.1, 2.2),
        overlap={"collective": rng.uniform(0.2, 0.8), "copy": rng.uniform(0.1, 0.7)},
        devices_on_switch=min(cluster.devices_per_node, int(rng.choice([1, 2, 4] if on_pcie else [1, 2]))),
        host_link_share=rng.uniform(0.6, 0.85),
        host_optimizer_share=rng.uniform(0.25, 0.55),
        thrash=rng.uniform(0.10, 0.60),
    )


class Truth:
    """The cluster of one landscape: equal seeds and clusters give equal answers, in the order of `priced`."""

    def __init__(self, cluster: Cluster, seed: int, priced: Sequence[Priced], limit_gib: float) -> None:
        self._cluster, self._priced, self._limit_gib = cluster, priced, limit_gib
        name = np.frombuffer(cluster.name.encode(), dtype=np.uint8)
        self._rng = np.random.default_rng([seed, *name.tolist()])
        self.rates = draw_rates(self._rng, cluster)
        self.noise = float(self._rng.uniform(0.01, 0.03))
        self.memory_bias = float(self._rng.uniform(*MEMORY_BIAS))
        self.response_deviation = float(self._rng.uniform(0.02, 0.05)) * (1.7 if cluster.has_trap else 1.0)
        self._terms: dict[str, float] = {}
        self.trap = self._draw_trap() if cluster.has_trap else None
        self._knobs = [asdict(each.configuration) for each in priced]

    def device_gib(self) -> NDArray[np.float64]:
        """What each configuration needs of a device."""
        structures: dict[tuple[object, ...], float] = {}
        needs = []
        for each in self._priced:
            one = each.configuration
            structure = (one.method, one.zero_stage, one.gradient_checkpointing, one.offload_param)
            if structure not in structures:
                structures[structure] = float(self._rng.uniform(*FRAGMENTATION))
            allocated = max(
                sum(size * self._term(name) for name, size in terms.items()) for terms in each.bill.phases.values()
            )
            beside = sum(each.bill.device_overhead.values())
            needs.append((allocated * structures[structure] + beside) / GIB)
        own = self._effects(MEMORY_RESPONSE) + self._rng.normal(0, 0.01, len(needs))
        return np.array(needs) * np.exp(self.memory_bias + own)

    def host_gib(self) -> NDArray[np.float64]:
        """What each needs of a node's host."""
        bias = self._rng.uniform(-0.10, 0.15)
        own = self._rng.normal(0, 0.03, len(self._priced))
        return np.array([each.host_gib for each in self._priced]) * np.exp(bias + own)

    def tokens_per_s(self, device_gib: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean speed of each, also of those that do not fit, for which it has no meaning."""
        tokens = self._cluster.global_sequences * self._cluster.sequence_tokens
        ideal = np.array([tokens / self._step_s(each) for each in self._priced])
        return ideal * self._dips() * self._response() * self.thrash(device_gib) * self.trapped()

    def _term(self, name: str) -> float:
        if name not in self._terms:
            self._terms[name] = float(np.exp(self._rng.normal(0, TERM_DEVIATIONS.get(name, 0.02))))
        return self._terms[name]

    def _step_s(self, each: Priced) -> float:
        work = each.work
        micro_s = sum(self._passes_s(each)) + self.rates.micro_step_s
        compute_s = work.micro_steps * micro_s
        collective_s, hidden = self._collectives_s(work)
        copies_s = self._copies_s(work)
        exposed_s = collective_s - min(hidden * self.rates.overlap["collective"], _MOST_HIDDEN * compute_s)
        exposed_s += copies_s - min(copies_s * self.rates.overlap["copy"], _MOST_HIDDEN * compute_s)
        return compute_s + exposed_s + self._update_s(work) + self.rates.step_s

    def _passes_s(self, each: Priced) -> tuple[float, float]:
        """Forward, and backward with recomputation: kernels or launches, whichever is slower, and not by a corner."""
        found = []
        for streamed, passes in ((each.work.forward, ("forward",)), (each.work.backward, ("recompute", "backward"))):
            products = [item for item in each.work.products if item.step in passes]
            linear = sum(item.linear_flops + item.adapter_flops for item in products)
            attention = sum(item.fused_attention_flops + item.plain_attention_flops for item in products)
            peak = self._peak(each.work.compute_dtype)
            kernel_s = linear / (peak * self._matmul_share(each)) + attention / (peak * self.rates.attention_share)
            memory_rate = self._cluster.device.memory_bytes_per_s * self.rates.memory_share
            kernel_s += streamed.born_bytes * self.rates.traffic_per_born_byte / memory_rate
            # stage 3 runs Python around each module
            launch_s = streamed.kernels * self.rates.launch_s + len(passes) * each.work.hooked_modules * _HOOK_S
            found.append(float((kernel_s**4 + launch_s**4) ** 0.25))
        return found[0], found[1]

    def _peak(self, dtype: Dtype) -> float:
        return float(self._cluster.device.matmul_flops_per_s(dtype))

    def _matmul_share(self, each: Priced) -> float:
        rows = each.configuration.micro_batch
        tokens = each.work.padded_tokens
        best = self._cluster.device.achievable_share * self.rates.matmul_share
        saturation = tokens / (tokens + self.rates.half_tokens)
        return float(best * saturation * (1 - self.rates.falloff * max(0.0, np.log2(rows / 16))))

    def _collectives_s(self, work: StepWork) -> tuple[float, float]:
        """Seconds of all, and of those that run beside computation."""
        times = [(self._collective_s(item), item.overlaps) for item in work.collectives]
        return sum(each for each, _ in times), sum(each for each, overlaps in times if overlaps)

    def _collective_s(self, item: Collective) -> float:
        cluster, rates = self._cluster, self.rates
        message = item.payload_bytes / item.calls
        share = rates.bus_share * message / (message + rates.half_message_bytes)
        rounds = 2 if item.kind == "all_reduce" else 1
        sent = rounds * item.payload_bytes * (cluster.ranks - 1) / cluster.ranks
        rate = cluster.device.link_bytes_per_s / 2 * (1.0 if cluster.device.has_peer_access else _WITHOUT_PEERS)
        if cluster.device.link.startswith("PCIe"):
            rate /= np.sqrt(rates.devices_on_switch)
        seconds = sent / (rate * share)
        if cluster.nodes > 1:
            between = sent / (BETWEEN_NODES[cluster.link] / 2 * share) * rates.node_cliff
            seconds = max(seconds, between) + item.calls * _CALL_S * (rates.node_cliff - 1)
        return float(item.times * seconds)

    def _copies_s(self, work: StepWork) -> float:
        """To and from the host: devices of one switch share its link, those of a node its memory."""
        cluster = self._cluster
        rate = cluster.device.host_link_bytes_per_s / 2 / self.rates.devices_on_switch
        rate = min(rate, cluster.device.host.memory_bytes_per_s / cluster.devices_per_node)
        return float(sum(item.bytes_per_step for item in work.transfers) / (rate * self.rates.host_link_share))

    def _update_s(self, work: StepWork) -> float:
        device = self._cluster.device
        host_rate = device.host.memory_bytes_per_s * self.rates.host_optimizer_share
        on_device_s = work.update.touched_bytes / (device.memory_bytes_per_s * self.rates.memory_share)
        return on_device_s + work.update.host_bytes * work.ranks_on_node / host_rate

    def _dips(self) -> NDArray[np.float64]:
        """A third of the micro-batches are slower by 2 to 12 %: shapes for which a library has no good kernel."""
        sizes = sorted({each.configuration.micro_batch for each in self._priced})
        factors = {size: 1 - (self._rng.uniform(0.02, 0.12) if self._rng.random() < 0.35 else 0.0) for size in sizes}
        return np.array([factors[each.configuration.micro_batch] for each in self._priced])

    def _response(self) -> NDArray[np.float64]:
        """What single knobs and pairs of them do beside all that is written down, and each configuration alone."""
        log = self._effects(self.response_deviation)
        return np.asarray(np.exp(log + self._rng.normal(0, 0.005, len(log))))

    def _effects(self, deviation: float) -> NDArray[np.float64]:
        """A number for each level of each knob, and smaller ones for pairs of levels, added up for each configuration:
        `deviation` is that of the sum."""
        log = np.zeros(len(self._knobs))
        names = [name for name in self._knobs[0] if len({knobs[name] for knobs in self._knobs}) > 1]
        single = deviation / np.sqrt(len(names) + PAIR_SHARE**2 * len(names) * (len(names) - 1) / 2)
        effects: dict[tuple[object, ...], float] = {}
        for first, name in enumerate(names):
            for other in names[first:]:
                own = single * (1.0 if other == name else PAIR_SHARE)
                for row, knobs in enumerate(self._knobs):
                    key = (name, knobs[name], other, knobs[other])
                    if key not in effects:
                        effects[key] = float(self._rng.normal(0, own))
                    log[row] += effects[key]
        return log

    def thrash(self, device_gib: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor on the speed of needs near the limit."""
        over = np.clip((device_gib / self._limit_gib - THRASH_FROM) / (1 - THRASH_FROM), 0, 1)
        return 1 - self.rates.thrash * over

    def _draw_trap(self) -> tuple[Pair, float]:
        """Two settings of the prediction's favourite that are slow together."""
        fitting = [each for each in self._priced if each.device_gib < self._limit_gib] or list(self._priced)
        favourite = asdict(max(fitting, key=lambda each: each.tokens_per_s).configuration)
        moving = [name for name in favourite if len({getattr(each.configuration, name) for each in self._priced}) > 1]
        first, second = self._rng.choice([name for name in moving if name != "method"], size=2, replace=False).tolist()
        return (first, favourite[first], second, favourite[second]), float(self._rng.uniform(0.25, 0.50))

    def trapped(self) -> NDArray[np.float64]:
        """The factor on the speed of configurations in the trap."""
        if self.trap is None:
            return np.ones(len(self._knobs))
        (first, value, second, other), loss = self.trap
        caught = np.array([knobs[first] == value and knobs[second] == other for knobs in self._knobs])
        return np.where(caught, 1 - loss, 1.0)
