"""A small valid spec, and the types of the fixtures that change and load it."""

from collections.abc import Callable

from orchestrator.spec.load import LoadedSpec

VALID = """\
version: 1
name: small
model:
  config: {model_type: llama, hidden_size: 64, vocab_size: 512, rope_theta: 10000.0}
data: {path: rows.jsonl, sequence_length: 128}
train:
  global_batch: 16
  learning_rate: 1e-4
search:
  zero_stage: [0, 2]
  micro_batch: [1, 2]
"""

Load = Callable[..., LoadedSpec]
Faults = Callable[..., list[str]]
