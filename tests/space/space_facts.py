"""Specs and preflight findings for tests of the space."""

from orchestrator.contract.config import Precision
from orchestrator.contract.facts import DataFacts, Facts, ModelFacts
from orchestrator.spec.model import shape_of
from orchestrator.spec.sweep import SweepSpec

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def facts(model: ModelFacts | None = None, on_cuda: bool = False) -> Facts:
    """Findings of a preflight on a small Llama."""
    data = DataFacts(
        directory="/prepared",
        digest="0123456789ab",
        format="text",
        rows=100,
        tokens=5000,
        longest_row_tokens=128,
        mean_row_tokens=50.0,
        median_row_tokens=40.0,
        truncated_rows=0,
        vocab_size=512,
        pad_token_id=0,
        tokenizer="trained from the data",
    )
    return Facts(
        model=model or shape_of(MODEL),
        data=data,
        device="cuda" if on_cuda else "cpu",
        device_name="test device",
        peak_flops_per_s={Precision.FP32: 1e12},
        peak_source="given",
        versions={},
    )


def spec(
    search: dict[str, object] | None,
    fixed: dict[str, object] | None = None,
    global_batch: int = 16,
    devices: int = 1,
    **around: object,
) -> SweepSpec:
    """A spec that searches the knobs in `search` (None: no search section); `around` goes beside them."""
    section = None if search is None else {"knobs": search, **around}
    return SweepSpec.model_validate(
        {
            "version": 1,
            "name": "small",
            "model": {"config": MODEL},
            "data": {"path": "/rows.jsonl", "sequence_length": 128},
            "train": {"global_batch": global_batch, "learning_rate": 1e-4, "fixed": fixed or {}},
            "search": section,
            "resources": {"devices_per_trial": devices},
        }
    )
