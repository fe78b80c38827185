"""The clock's few constants: what share of each rate on a data sheet real steps reach. A sweep fits them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClockConstants:
    """Defaults hold for CUDA devices with transformers' own kernels. The first five are what a sweep fits most."""

    compute_efficiency: float = 0.9
    """Matrix products of a training step, against the best product measured on the device. With the traffic below, a
    full fine-tuning step of a 7B model on one A100 then reaches 60 % HFU and a LoRA step 50 %, as published
    (foundation-model-stack/fms-acceleration 876e2ed, scripts/benchmarks/refs/a100_80gb.csv)."""
    memory_efficiency: float = 0.8
    """Of the memory rate on the data sheet: a copy on an A100 reaches 1.6 of 2.0 TB/s. Assumed for others."""
    link_efficiency: float = 0.8
    """Of the rate in one direction: all-gather, reduce-scatter and ring all-reduce of 16 GiB reach 0.78 on A100 and
    0.80-0.82 on H200 (https://github.com/stas00/ml-engineering/tree/master/network, 744d01e)."""
    host_optimizer_efficiency: float = 0.5
    """Of the host's memory rate: CPU-Adam updates 1e9 weights in 0.22 s on two Xeon 8168 (ZeRO-Offload,
    arXiv:2101.06840, table 4): 28 bytes a weight at 127 of 256 GB/s."""
    update_efficiency: float = 1.0
    """Of the memory rate above, by the optimizer's update where the device runs it, and by gradients that are copied
    into buckets and out of them."""
    fresh_bytes_per_s: float = float("inf")
    """Of memory that the system has to map before its first use. CUDA's caching allocator hands out what is mapped."""
    overhead_factor: float = 1.0
    """On all of the host's own time: launches, hooks, the step's rest."""

    attention_efficiency: float = 0.6
    """Of the dense peak, by flash attention: forward up to 0.73, backward up to 0.63 on an A100 (FlashAttention-2,
    arXiv:2307.08691, section 4.1); less for heads of 64."""
    plain_attention_efficiency: float = 0.4
    """The same with a mask by the memory-efficient kernel, in fp32, or by two plain products. Assumed."""
    traffic_per_born_byte: float = 1.8
    """Bytes that kernels other than matrix products read and write, for each byte of all storages born: 1.70 to 2.00
    in the dispatched operations of Llama-2-7B's layers (full and LoRA with fp32 adapters, recomputed or not,
    transformers 5.24)."""
    host_link_efficiency: float = 0.8
    """Of PCIe in one direction, with pinned memory: 25 of 32 GB/s in generation 4. Assumed."""
    pageable_share: float = 0.4
    """Of the pinned rate, by copies from pageable memory, which are staged. Assumed."""
    host_core_bytes_per_s: float = 20e9
    """Of one core in DeepSpeed's CPU-Adam: 41 GB/s were measured on two cores of an EPYC."""
    disk_efficiency: float = 0.8
    """Of a drive's rate, by DeepSpeed's asynchronous reads and writes. Assumed."""
    kernel_launch_s: float = 15e-6
    """The host's time for one operation of an eager model, autograd and Python counted in: of 5 to 30 us in steps of 5
    what explains the short sequences of Qwen's own table best (QwenLM/Qwen README, one A100: 66 rows)."""
    module_hook_s: float = 150e-6
    """Stage 3's hooks around one module in one pass. Assumed: trials on busy CPU cores show 0.3 to 0.5 ms."""
    module_fetch_s: float = 0.0
    """Stage 3's gather and release of one module's weights in one pass, beside their bytes. On CUDA in the figure
    above."""
    step_overhead_s: float = 5e-3
    """Of one optimizer step: data loading, logging, synchronisation. Assumed."""
    overlap_efficiency: float = 0.5
    """At most this share of overlapped communication hides: it takes memory rate and multiprocessors from what it runs
    beside. On two 3090 a LoRA step is a third slower under FSDP than under DDP (AnswerDotAI/fsdp_qlora, benchmarks),
    on two A100 a full step a tenth slower than on one (fms-acceleration): hardly anything hid."""


CUDA_CLOCK = ClockConstants()

CPU_CLOCK = ClockConstants(
    compute_efficiency=0.9,
    memory_efficiency=1.0,
    link_efficiency=0.5,
    host_optimizer_efficiency=0.15,
    update_efficiency=0.15,
    fresh_bytes_per_s=0.4e9,
    attention_efficiency=0.3,
    plain_attention_efficiency=0.3,
    kernel_launch_s=12e-6,
    module_hook_s=200e-6,
    module_fetch_s=80e-6,
    step_overhead_s=5e-3,
    overlap_efficiency=0.0,
)
"""For ranks on CPU cores, where the peak itself was measured, caches serve small tensors and gloo takes the same cores.
Products, memory, launches, hooks, updates and fresh memory: rounded from a fit to half of 239 trials of a model of 2.5M
weights on one core of an EPYC (all of them in docs/measurements/predicted-landscape-cpu.md; of the half that was not
fitted the rank correlation is 0.975); the rest is assumed.
There, a first write to 33 MiB or more took 1.3 ns a byte where memory that is mapped took 0.02; trials, which read and
unmap it too, show 2.5. A sweep on the machine fits them."""
