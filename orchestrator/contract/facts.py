"""What the preflight finds out once per sweep, on a weightless model and the real data, and what it is asked.

`python -m orchestrator.trial.preflight DIR` reads `DIR/request.json` and writes `DIR/facts.json`, or `DIR/error.json`
with a `PreflightFailure` and exit code 2.
"""

from typing import Literal

from pydantic import Field

from orchestrator.contract.config import Frozen, ModelSource, Precision

REQUEST_FILE = "request.json"
FACTS_FILE = "facts.json"
FAILURE_FILE = "error.json"


class DataRequest(Frozen):
    """Raw training data as the spec names it. Exactly one of `path` (absolute) and `id` (a hub data set)."""

    path: str | None = None
    id: str | None = None
    split: str = "train"
    tokenizer: str | None = None
    """A folder or hub id; None: the model's own tokenizer, or one trained from the data when the model has none."""
    sequence_length: int = Field(ge=2)
    packing: bool = False
    max_rows: int | None = Field(default=None, ge=1)
    eval_rows: int = Field(default=0, ge=0)
    """Rows that are held out from training."""


class PreflightRequest(Frozen):
    """`lora_targets` lists each set of module names that some candidate adapts, to be checked against the model."""

    model: ModelSource
    data: DataRequest
    data_directory: str
    """Where the prepared rows go (absolute)."""
    lora_targets: tuple[tuple[str, ...], ...] = ()
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = Field(default=1, ge=1)


class PreflightFailure(Frozen):
    """`field` is the dotted place in the spec that has to change, e.g. `search.lora_targets`."""

    field: str
    message: str


class LinearLayer(Frozen):
    """`count` linear layers of one name and shape. `name` is the last part of their module path, e.g. `q_proj`."""

    name: str
    in_features: int
    out_features: int
    count: int
    is_output_head: bool = False
    active_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of tokens that pass through each of them: experts per token over experts in a mixture, else 1."""


class ModelFacts(Frozen):
    """A model's shape, read from the real transformers model built without weights. Tied weights count once."""

    model_type: str
    total_parameters: int
    linear_layers: tuple[LinearLayer, ...]
    adaptable: tuple[str, ...]
    """Names that `lora_targets` accepts; `all-linear` means all of them."""
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_position_embeddings: int | None = None
    sliding_window: int | None = None


class DataFacts(Frozen):
    """What the data turned out to be. Lengths are in tokens, after truncation to `sequence_length`, before padding;
    rows that are held out count in `eval_rows` and `eval_tokens` alone."""

    directory: str
    digest: str
    format: Literal["alpaca", "conversations", "messages", "text"]
    rows: int
    tokens: int
    longest_row_tokens: int
    mean_row_tokens: float
    median_row_tokens: float
    truncated_rows: int
    eval_rows: int = 0
    eval_tokens: int = 0
    vocab_size: int
    pad_token_id: int
    tokenizer: str
    """Where the tokenizer came from: a path, an id, or `trained from the data`."""


class Facts(Frozen):
    """All findings of one preflight."""

    model: ModelFacts
    data: DataFacts
    device: Literal["cpu", "cuda"]
    device_name: str
    device_memory_bytes: int | None = None
    """Capacity of one device; None on CPU, where only the spec's limit bounds it."""
    peak_flops_per_s: dict[Precision, float]
    """Per device: measured by a short matrix product on CPU, the data sheet's dense figure on known GPUs."""
    peak_source: str
    """Where `peak_flops_per_s` comes from, for the reader."""
    versions: dict[str, str]
    """Installed versions of torch, transformers, peft and deepspeed."""
