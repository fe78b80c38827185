"""What a job's engine adds to a model: one door to all engines."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.contract.profile import Dtype, Parameter, Point
from orchestrator.predict.fsdp import fsdp_terms
from orchestrator.predict.job import Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.replicated import replicated_terms
from orchestrator.predict.terms import EngineTerms
from orchestrator.predict.weights import Weight, weights_of
from orchestrator.predict.zero import partitioned_terms, unsharded_terms
from orchestrator.predict.zero3 import sharded_zero_terms

_ANY_POINT = Point(1, 1)


def engine_terms(parameters: Sequence[Parameter], job: Job, precision: Dtype) -> EngineTerms:
    """Bytes that the job's engine holds for `parameters` (in the model's order), by term and phase.

    `precision` is the model's own (`TraceRequest.dtype`); under DeepSpeed a 16-bit one means that its bf16 or fp16
    mode is on.
    """
    # an engine knows rows no better than by whether gradients accumulate
    settings = replace(job, point=_ANY_POINT, gradient_accumulation=min(job.gradient_accumulation, 2))
    return _terms(weights_of(parameters, job, precision), settings, precision)


@remembered(identities=1, size=256)
def _terms(weights: Sequence[Weight], job: Job, precision: Dtype) -> EngineTerms:
    match job.engine:
        case "torch":
            return replicated_terms(weights, job)
        case "fsdp":
            return fsdp_terms(weights, job, precision)
        case "deepspeed":
            match job.zero_stage:
                case 0:
                    return unsharded_terms(weights, job, precision)
                case 1 | 2:
                    return partitioned_terms(weights, job, precision)
                case 3:
                    return sharded_zero_terms(weights, job, precision)
