"""The fastest matrix product that this CPU showed, as the yardstick for MFU."""

import time

import torch

from orchestrator.contract.config import Precision
from orchestrator.trial.model import DTYPES

SIZES = (512, 1024, 2048)
MEASURE_S = 0.4
"""For each precision and size; the best run counts, since a shared machine only ever slows one down."""
SOURCE = "the best of repeated square matrix products ({sizes}) on this CPU with {threads} threads"


def cpu_peak_flops_per_s(precisions: tuple[Precision, ...], threads: int) -> dict[Precision, float]:
    """Floating-point operations per second of the best matrix product, by precision."""
    torch.set_num_threads(threads)
    return {precision: max(_best_flops_per_s(size, DTYPES[precision]) for size in SIZES) for precision in precisions}


def peak_source(threads: int) -> str:
    """Where the numbers come from, for the reader."""
    return SOURCE.format(sizes=", ".join(map(str, SIZES)), threads=threads)


def _best_flops_per_s(size: int, dtype: torch.dtype) -> float:
    left, right = (torch.ones((size, size), dtype=dtype) for _ in range(2))
    best_s = float("inf")
    end_s = time.perf_counter() + MEASURE_S
    # the first product may still start threads and choose a kernel; it never is the best
    while time.perf_counter() < end_s or best_s == float("inf"):
        start_s = time.perf_counter()
        torch.mm(left, right)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s
