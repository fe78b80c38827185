"""Sixteen ways in which libraries say that memory is out, and what must not be taken for it."""

import pytest

from orchestrator.contract.outcome import Crashed, Diverged, Infra, Invalid, OomDevice, OomHost, Phase
from orchestrator.trial.classify import EVIDENCE_CHARACTERS, Failure, classify

pytestmark = pytest.mark.fault("B4")

MIB, GIB = 2**20, 2**30
RUNTIME = ("RuntimeError", "Exception")
OOM = ("OutOfMemoryError", "RuntimeError", "Exception")
DIST = ("DistBackendError", "DistError", "RuntimeError", "Exception")
NETWORK = ("DistNetworkError", "DistError", "RuntimeError", "Exception")
ACCELERATOR = ("AcceleratorError", "RuntimeError", "Exception")
MEMORY = ("MemoryError", "Exception")

TORCH_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 1.20 GiB is free."
    " Including non-PyTorch memory, this process has 22.79 GiB memory in use. Of the allocated memory 20.00 GiB is"
    " allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
TORCH_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 33554432 bytes. Error code 12 (Cannot allocate memory)"
)
EAGAIN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:79] Resource temporarily unavailable"


def failure(types: tuple[str, ...], text: str, device: str = "cuda", near_limit: bool = True) -> Failure:
    return Failure(
        types=types,
        text=text,
        traceback=f"Traceback\n{types[0]}: {text}\n",
        phase=Phase.BACKWARD,
        rank=1,
        device=device,
        step=3,
        batch_tokens=2048,
        limit_bytes=400 * MIB,
        peak_bytes=(395 if near_limit else 100) * MIB,
    )


@pytest.mark.parametrize(
    ("types", "text", "device", "kind"),
    [
        (OOM, TORCH_CUDA, "cuda", OomDevice),
        (RUNTIME, "CUDA out of memory. Tried to allocate 20.00 MiB", "cuda", OomDevice),
        (
            ACCELERATOR,
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "cuda",
            OomDevice,
        ),
        (RUNTIME, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda", OomDevice),
        (RUNTIME, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if", "cuda", OomDevice),
        (OOM, "HIP out of memory. Tried to allocate 1.00 GiB", "cuda", OomDevice),
        (DIST, "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'", "cuda", OomDevice),
        (RUNTIME, TORCH_CPU, "cpu", OomDevice),
        (MEMORY, "", "cpu", OomDevice),
        (MEMORY, "std::bad_alloc", "cpu", OomDevice),
        (RUNTIME, EAGAIN, "cpu", OomDevice),
        (RUNTIME, "can't start new thread", "cpu", OomDevice),
        (RUNTIME, "could not create a primitive", "cpu", OomDevice),
        (RUNTIME, TORCH_CPU, "cuda", OomHost),
        (MEMORY, "", "cuda", OomHost),
        (MEMORY, "std::bad_alloc", "cuda", OomHost),
        (RUNTIME, "CUDA error: out of memory during cudaHostAlloc(&ptr, size, flags)", "cuda", OomHost),
        (("OSError", "Exception"), "[Errno 12] Cannot allocate memory", "cuda", OomHost),
    ],
)
def test_memory_that_ran_out_is_recognised(types: tuple[str, ...], text: str, device: str, kind: type) -> None:
    verdict = classify(failure(types, text, device))
    assert isinstance(verdict.outcome, kind), verdict.outcome
    assert verdict.outcome.phase is Phase.BACKWARD
    assert text.splitlines()[0:1] == [] or text.splitlines()[0] in verdict.outcome.evidence
    assert not verdict.is_consequence


@pytest.mark.parametrize(
    ("types", "text", "kind"),
    [
        (("ValueError", "Exception"), "my loader is out of memory slots: CUDA out of memory", Crashed),
        (("OSError", "Exception"), "[Errno 28] No space left on device: '/data/x'", Infra),
        (RUNTIME, "CUDA error: uncorrectable ECC error encountered", Infra),
        (ACCELERATOR, "CUDA error: device-side assert triggered", Crashed),
        (ACCELERATOR, "CUDA error: an illegal memory access was encountered", Crashed),
        (NETWORK, "The server socket has failed to listen on any local network address. EADDRINUSE", Infra),
        (("OSError", "Exception"), "[Errno 98] Address already in use", Infra),
        (RUNTIME, "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)", Crashed),
        (("KeyError", "LookupError", "Exception"), "'memory'", Crashed),
        (("TypeError", "Exception"), "unsupported operand type(s)", Crashed),
        (("InvalidTrial", "Exception"), "2 of 14 adapters had no gradient", Invalid),
        (("LossDiverged", "Exception"), "the loss of step 4 is nan", Diverged),
    ],
)
def test_what_is_no_want_of_memory_is_not_taken_for_it(types: tuple[str, ...], text: str, kind: type) -> None:
    verdict = classify(failure(types, text))
    assert isinstance(verdict.outcome, kind), verdict.outcome
    assert not verdict.is_consequence


@pytest.mark.parametrize(
    ("types", "text"),
    [
        (RUNTIME, "[pair.cc:547] Connection closed by peer [127.0.0.1]:41523"),
        (RUNTIME, "[pair.cc:80] Read error: Connection reset by peer"),
        (NETWORK, "failed to recv, got 0 bytes"),
        (DIST, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
    ],
)
def test_the_end_of_a_peer_is_a_consequence(types: tuple[str, ...], text: str) -> None:
    verdict = classify(failure(types, text))
    assert verdict.is_consequence
    assert isinstance(verdict.outcome, Crashed)


def test_words_with_other_meanings_need_evidence_of_the_limit() -> None:
    verdict = classify(failure(RUNTIME, EAGAIN, "cpu", near_limit=False))
    assert isinstance(verdict.outcome, Crashed)


def test_the_sizes_of_an_oom_are_read_from_the_error() -> None:
    outcome = classify(failure(OOM, TORCH_CUDA)).outcome
    assert isinstance(outcome, OomDevice)
    assert (outcome.requested_bytes, outcome.allocated_bytes) == (2 * GIB, 20 * GIB)
    assert outcome.reserved_bytes == 20 * GIB + 512 * MIB
    assert (outcome.step, outcome.tokens, outcome.rank) == (3, 2048, 1)


def test_on_the_cpu_the_growth_stands_for_what_was_allocated() -> None:
    outcome = classify(failure(RUNTIME, TORCH_CPU, "cpu")).outcome
    assert isinstance(outcome, OomDevice)
    assert (outcome.requested_bytes, outcome.allocated_bytes) == (33554432, 395 * MIB)
    assert outcome.needed_bytes == 395 * MIB + 33554432


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    long = Failure(
        types=("ValueError", "Exception"),
        text="no",
        traceback="begin" + "x" * 10 * EVIDENCE_CHARACTERS + "end",
        phase=Phase.LOAD,
        rank=0,
        device="cpu",
    )
    outcome = classify(long).outcome
    assert isinstance(outcome, Crashed)
    assert outcome.evidence.startswith("begin")
    assert outcome.evidence.endswith("end")
    assert len(outcome.evidence) < EVIDENCE_CHARACTERS + 100
    assert outcome.error == "ValueError: no"
