"""How long one optimizer step takes: its work priced at a machine's rates, with what hides behind what.

Kernels of one device run one after another: each costs its arithmetic at the achievable rate or its bytes at the
memory's, so their times add up. Communication hides behind the computation of its phase where the engine overlaps it;
the host's launches hide behind queued kernels.
"""

from typing import Literal

from orchestrator.contract.config import Frozen
from orchestrator.contract.profile import Dtype, Profile
from orchestrator.predict.constants import ClockConstants
from orchestrator.predict.job import Job
from orchestrator.predict.machine import Links, Processor
from orchestrator.predict.traffic import Collective, Transfer
from orchestrator.predict.work import Pass, Products, StepWork, Streamed, step_work

TimeKind = Literal["compute", "memory", "launch", "collective", "transfer", "host_optimizer", "optimizer", "overhead"]
TimePhase = Literal["forward", "recompute", "backward", "optimizer_step"]


class TimeTerm(Frozen):
    """One itemised cost of an optimizer step. `exposed_s` is what it adds to the step; the rest of `busy_s` hides."""

    name: str
    kind: TimeKind
    phase: TimePhase
    busy_s: float
    exposed_s: float


class StepTime(Frozen):
    """One optimizer step. FLOPs are of one rank in the whole step; the exposed times of `terms` add up to `step_s`."""

    step_s: float
    tokens_per_second: float
    """Without padding, all ranks together."""
    model_flops: float
    """What the step needs: no padding, no recomputation."""
    hardware_flops: float
    mfu: float
    hfu: float
    terms: tuple[TimeTerm, ...]

    @property
    def binding(self) -> TimeTerm:
        """The term that adds most to the step."""
        return max(self.terms, key=lambda term: term.exposed_s)

    def exposed_s(self, kind: TimeKind, phase: TimePhase | None = None) -> float:
        """What all terms of a kind (in a phase) add to the step."""
        return sum(term.exposed_s for term in self._chosen(kind, phase))

    def busy_s(self, kind: TimeKind, phase: TimePhase | None = None) -> float:
        """How long all terms of a kind (in a phase) keep their resource busy."""
        return sum(term.busy_s for term in self._chosen(kind, phase))

    def _chosen(self, kind: TimeKind, phase: TimePhase | None) -> list[TimeTerm]:
        return [term for term in self.terms if term.kind == kind and phase in (None, term.phase)]


def step_time(
    profile: Profile,
    job: Job,
    processor: Processor,
    links: Links,
    constants: ClockConstants,
    padding_fraction: float = 0.0,
) -> StepTime:
    """The clock's answer for one run. `padding_fraction` of the batch's tokens are padding."""
    return priced(step_work(profile, job), processor, links, constants, padding_fraction)


def priced(
    work: StepWork, processor: Processor, links: Links, constants: ClockConstants, padding_fraction: float = 0.0
) -> StepTime:
    """`work` at the rates of a machine. Costs microseconds: the work of a run can be priced again and again."""
    rates = _Rates(work, processor, links, constants)
    terms = [*rates.phase("forward"), *rates.phase("backward"), *rates.optimizer_step()]
    step_s = sum(term.exposed_s for term in terms)
    real = 1.0 - padding_fraction
    linear_flops, attention_flops = work.model_flops
    # rows that are all a share of the batch's length see that share squared of its pairs
    model_flops = work.micro_steps * (real * linear_flops + real**2 * attention_flops)
    hardware_flops = work.micro_steps * work.hardware_flops
    peak = processor.peak_flops_per_s[work.compute_dtype]
    return StepTime(
        step_s=step_s,
        tokens_per_second=real * work.padded_tokens * work.micro_steps * work.world_size / step_s,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / step_s / peak,
        hfu=hardware_flops / step_s / peak,
        terms=tuple(terms),
    )


class _Rates:
    """One step's work beside the machine that it runs on."""

    def __init__(self, work: StepWork, processor: Processor, links: Links, constants: ClockConstants) -> None:
        self._work = work
        self._processor = processor
        self._links = links
        self._constants = constants
        self._memory_bytes_per_s = processor.memory_bytes_per_s * constants.memory_efficiency
        self._update_bytes_per_s = self._memory_bytes_per_s * constants.update_efficiency

    def phase(self, phase: Literal["forward", "backward"]) -> list[TimeTerm]:
        """Kernels, the launches that do not hide behind them, and the traffic that does not hide behind both."""
        passes: tuple[Pass, ...] = ("forward",) if phase == "forward" else ("recompute", "backward")
        streamed = self._work.forward if phase == "forward" else self._work.backward
        kernels = [term for item in self._work.products if item.step in passes for term in self._products(item)]
        kernels += self._streamed(phase, streamed)
        kernel_s = sum(term.busy_s for term in kernels)
        launches = self._launches(phase, streamed, kernel_s)
        return [*kernels, launches, *self._traffic(phase, kernel_s + launches.exposed_s)]

    def optimizer_step(self) -> list[TimeTerm]:
        """The update where it runs, its traffic, and what every step costs beside."""
        update, constants = self._work.update, self._constants
        touched_s = update.touched_bytes / self._update_bytes_per_s
        launch_s = update.kernels * constants.kernel_launch_s * constants.overhead_factor
        update_s = max(touched_s, launch_s) if self._processor.is_asynchronous else touched_s + launch_s
        host_s = update.host_bytes * self._work.ranks_on_node / self._host_optimizer_bytes_per_s()
        rest_s = constants.step_overhead_s * constants.overhead_factor
        return [
            _term("update", "optimizer", "optimizer_step", update_s),
            _term("host_update", "host_optimizer", "optimizer_step", host_s),
            *self._traffic("optimizer_step", 0.0),
            _term("step", "overhead", "optimizer_step", rest_s),
        ]

    def _host_optimizer_bytes_per_s(self) -> float:
        by_memory = self._links.host_memory_bytes_per_s * self._constants.host_optimizer_efficiency
        return min(by_memory, self._links.host_cores * self._constants.host_core_bytes_per_s)

    def _products(self, item: Products) -> list[TimeTerm]:
        """The three kinds of products of one pass, over all micro-steps."""
        constants, times = self._constants, self._work.micro_steps
        peak = self._peak(self._work.compute_dtype)
        is_flash = self._work.is_flash_attention
        share = constants.attention_efficiency if is_flash else constants.plain_attention_efficiency
        attention_s = item.fused_attention_flops / (peak * share)
        attention_s += item.plain_attention_flops / (peak * constants.plain_attention_efficiency)
        linear_s = item.linear_flops / self._achievable(self._work.compute_dtype)
        adapter_s = item.adapter_flops / self._achievable(self._work.adapter_dtype)
        return [
            _term("linear", "compute", item.step, times * linear_s),
            _term("adapter", "compute", item.step, times * adapter_s),
            _term("attention", "compute", item.step, times * attention_s),
        ]

    def _peak(self, dtype: Dtype) -> float:
        return self._processor.peak_flops_per_s[dtype]

    def _achievable(self, dtype: Dtype) -> float:
        return self._peak(dtype) * self._processor.achievable_share * self._constants.compute_efficiency

    def _streamed(self, phase: Literal["forward", "backward"], streamed: Streamed) -> list[TimeTerm]:
        times = self._work.micro_steps
        touched_bytes = streamed.born_bytes * self._constants.traffic_per_born_byte
        return [
            _term("elementwise", "memory", phase, times * touched_bytes / self._memory_bytes_per_s),
            _term("weights_read", "memory", phase, times * streamed.weight_bytes / self._memory_bytes_per_s),
            *self._sometimes(phase, times * streamed.fresh_bytes),
        ]

    def _sometimes(self, phase: Literal["forward", "backward"], fresh_bytes: float) -> list[TimeTerm]:
        """What few runs have. Gradients in buckets are read and written once each way."""
        terms = []
        if fresh_bytes:
            terms.append(_term("fresh_memory", "memory", phase, fresh_bytes / self._constants.fresh_bytes_per_s))
        if phase == "backward" and self._work.bucketed_bytes:
            busy_s = 2 * self._work.bucketed_bytes / self._update_bytes_per_s
            terms.append(_term("gradient_buckets", "memory", phase, busy_s))
        return terms

    def _launches(self, phase: Literal["forward", "backward"], streamed: Streamed, kernel_s: float) -> TimeTerm:
        constants = self._constants
        passes = 1 if phase == "forward" else self._work.passes - 1
        once_s = streamed.kernels * constants.kernel_launch_s
        once_s += passes * self._work.hooked_modules * constants.module_hook_s
        once_s += passes * self._work.gathered_modules * constants.module_fetch_s
        busy_s = self._work.micro_steps * once_s * constants.overhead_factor
        exposed_s = max(0.0, busy_s - kernel_s) if self._processor.is_asynchronous else busy_s
        return TimeTerm(name="launches", kind="launch", phase=phase, busy_s=busy_s, exposed_s=exposed_s)

    def _traffic(self, phase: TimePhase, computed_s: float) -> list[TimeTerm]:
        """Ranks' links, host links and disks work beside each other; what shares one of them queues."""
        found: list[TimeTerm] = []
        for kind, items in (
            (
                "collective",
                [(item, self._collective_s(item)) for item in self._work.collectives if item.phase == phase],
            ),
            ("transfer", [(item, self._transfer_s(item)) for item in self._work.transfers if item.phase == phase]),
        ):
            room_s = computed_s
            for item, busy_s in items:
                copied_s = self._copied_s(item)
                can_hide_s = self._constants.overlap_efficiency * (busy_s - copied_s) if item.overlaps else 0.0
                hidden_s = min(can_hide_s, room_s * self._part(item))
                room_s -= hidden_s
                found.append(
                    TimeTerm(name=item.name, kind=kind, phase=phase, busy_s=busy_s, exposed_s=busy_s - hidden_s)
                )
        return found

    def _part(self, item: Collective | Transfer) -> float:
        """Share of a phase's computation that goes on beside an item: what happens once a step has one micro-step."""
        return item.times / self._work.micro_steps if isinstance(item, Collective) else 1.0

    def _collective_s(self, item: Collective) -> float:
        """A ring: (n - 1) / n of the payload over each link in each direction, twice for an all-reduce. Over several
        nodes the slowest link is a node's, which all rings of its devices share."""
        ranks, links = self._work.world_size, self._links
        nodes = -(-ranks // self._work.ranks_on_node)
        rate, step_s = links.device_bytes_per_s, links.device_step_s
        latency_s = (ranks - 1) * step_s
        if nodes > 1:
            if links.node_bytes_per_s is None:
                raise ValueError(f"{ranks} ranks with {self._work.ranks_on_node} on a node need a link between nodes")
            rate = min(rate, links.node_bytes_per_s) if self._work.ranks_on_node > 1 else links.node_bytes_per_s
            latency_s = (ranks - nodes) * step_s + nodes * links.node_step_s
        rounds = 2 if item.kind == "all_reduce" else 1
        sent_s = (ranks - 1) / ranks * item.payload_bytes / (rate * self._constants.link_efficiency)
        return item.times * rounds * (sent_s + item.calls * latency_s) + self._copied_s(item)

    def _copied_s(self, item: Collective | Transfer) -> float:
        """Into a flat buffer before a reduction, out of one after a gather: kernels among the others."""
        if isinstance(item, Transfer):
            return 0.0
        return item.times * 2 * item.payload_bytes / self._memory_bytes_per_s

    def _transfer_s(self, item: Transfer) -> float:
        constants, links = self._constants, self._links
        if item.place == "disk":
            return item.bytes_per_step * self._work.ranks_on_node / (links.disk_bytes_per_s * constants.disk_efficiency)
        share = 1.0 if self._work.pin_memory else constants.pageable_share
        # devices of one node share its memory
        rate = min(links.host_link_bytes_per_s, links.host_memory_bytes_per_s / self._work.ranks_on_node)
        return item.bytes_per_step / (rate * constants.host_link_efficiency * share)


def _term(name: str, kind: TimeKind, phase: TimePhase, busy_s: float) -> TimeTerm:
    return TimeTerm(name=name, kind=kind, phase=phase, busy_s=busy_s, exposed_s=busy_s)
