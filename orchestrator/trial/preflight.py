"""`python -m orchestrator.trial.preflight DIR`: everything that is found out once per sweep, before any trial."""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from orchestrator.contract.config import ModelSource
from orchestrator.contract.errors import EXIT_OK, EXIT_USAGE, StateError
from orchestrator.contract.facts import (
    FACTS_FILE,
    FAILURE_FILE,
    REQUEST_FILE,
    Facts,
    ModelFacts,
    PreflightFailure,
    PreflightRequest,
)
from orchestrator.contract.handoff import read_model, write_atomic
from orchestrator.trial.device import cpu_name
from orchestrator.trial.model import load_config
from orchestrator.trial.peak import cpu_peak_flops_per_s, peak_source
from orchestrator.trial.prepare import prepare
from orchestrator.trial.shape import check_lora_targets, model_facts, weightless_model
from orchestrator.trial.unusable import Unusable

DEVICE_TABLE = "device table"
_PACKAGES = ("torch", "transformers", "peft", "deepspeed")


def find_facts(request: PreflightRequest) -> Facts:
    """Check the model against the request, prepare the data and describe the device. Raises Unusable."""
    model = _check_model(request)
    data = prepare(request.data, request.model, model.vocab_size, Path(request.data_directory))
    kind: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if request.device != "auto":
        if request.device == "cuda" and kind == "cpu":
            raise Unusable("resources.device", "cuda is asked for, and PyTorch sees no GPU here")
        kind = request.device
    if kind == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        peak, source = {}, DEVICE_TABLE
    else:
        name, memory_bytes = cpu_name(), None
        peak = cpu_peak_flops_per_s(request.precisions, request.threads_per_rank)
        source = peak_source(request.threads_per_rank)
    return Facts(
        model=model,
        data=data,
        device=kind,
        device_name=name,
        device_memory_bytes=memory_bytes,
        peak_flops_per_s=peak,
        peak_source=source,
        versions={package: version(package) for package in _PACKAGES},
    )


def _check_model(request: PreflightRequest) -> ModelFacts:
    model = weightless_model(load_config(request.model), request.model)
    facts = model_facts(model)
    check_lora_targets(model, request.lora_targets)
    longest = facts.max_position_embeddings
    if longest is not None and request.data.sequence_length > longest:
        raise Unusable(
            "data.sequence_length",
            f"{request.data.sequence_length} tokens are more than the {longest} positions of the model"
            " (max_position_embeddings)",
        )
    if request.model.weights == "pretrained":
        _check_weights(request.model)
    return facts


def _check_weights(source: ModelSource) -> None:
    if source.config is not None:
        raise Unusable(
            "model.weights", "a bare configuration has no pretrained weights; use random or name a checkpoint"
        )
    if source.path is not None and not list(Path(source.path).glob("*.safetensors")):
        raise Unusable("model.weights", f"{source.path} holds no *.safetensors; use random or name a checkpoint")


def main() -> int:
    """Read the request, write the facts or the failure. Exit codes: 0 facts, 2 the spec has to change."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.trial.preflight",
        description="Read DIR/request.json and write DIR/facts.json, or DIR/error.json when the spec has to change.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the preflight's folder")
    directory = parser.parse_args().directory
    try:
        facts = find_facts(read_model(directory / REQUEST_FILE, PreflightRequest))
    except Unusable as error:
        failure = PreflightFailure(field=error.field, message=str(error))
        write_atomic(directory / FAILURE_FILE, failure.model_dump_json(indent=1))
        print(f"{error.field}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except StateError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    write_atomic(directory / FACTS_FILE, facts.model_dump_json(indent=1))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
