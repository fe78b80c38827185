"""Whatever is done to a spec, loading it succeeds or raises SpecError with the place of every fault."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.contract.errors import SpecError
from orchestrator.spec.load import load_spec

SPEC = """\
version: 1
name: fuzzed
description: 'every section'
model:
  config: {model_type: llama, hidden_size: 64, vocab_size: 512}
  weights: random
data: {path: rows.jsonl, sequence_length: 128, packing: false}
train:
  global_batch: 16
  learning_rate: 1e-4
  precision: fp32
search:
  sampler: tpe
  seed: 3
  baseline: {method: full, zero_stage: 2}
  method: [lora, full]
  lora_rank: {min: 8, max: 64, scale: log2}
  lora_targets: [all-linear, "q_proj,v_proj", [k_proj]]
  zero_stage: [0, 2, 3]
  offload_optimizer: [none, cpu]
  reduce_bucket_size: [5e8, 1e5]
  paired:
    - {gradient_checkpointing: none, micro_batch: 1}
    - {gradient_checkpointing: full, micro_batch: 4}
objective: [tokens_per_second, {metric: peak_memory_bytes, goal: minimize}]
limits: {device_memory: 1GiB, headroom: 10MiB}
resources: {devices_per_trial: 2, nodes: 1}
measure: {max_steps: 8, max_measure_s: 2m}
budget: {trials: 10, time: 1h}
tracking: {enabled: true}
"""

WORDS = st.sampled_from([
    "", "~", "off", "no", "on", "true", "1e-4", "5e8", "-1", "0", "08", "017", "0x10", "2:30", "80Gi", ".nan", ".inf",
    "1_0", "[]", "{}", "[[]]", "{a: 1}", "null", "- x", "'", '"', "&a", "*a", "!!python/name:os", "!x", "|", ">", "%",
    "@", "`", "? x", "<<", "\t", "\x00", "\x07", "\u2028", "\ud83d", "e" * 300, "9" * 400, "1e400", "method", "x: y",
    "/dev/zero", "--- ", "...", "#", ": ", "auto", "version",
])  # fmt: skip
TOKEN = re.compile(r"[\w.+-]+|[^\w\s]")
PLACED = re.compile(r"spec\.yaml:\d+:\d+: \S")


@st.composite
def changed_specs(draw: st.DrawFn) -> bytes:
    """SPEC with some words replaced, lines repeated, moved or cut, and bytes changed."""
    text = SPEC
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["word", "line", "indent", "cut"]))
        if kind == "word":
            tokens = list(TOKEN.finditer(text))
            match = tokens[draw(st.integers(0, len(tokens) - 1))] if tokens else None
            text = text[: match.start()] + draw(WORDS) + text[match.end() :] if match else draw(WORDS)
        elif kind == "cut":
            text = text[: draw(st.integers(0, len(text)))]
        else:
            lines = text.split("\n")
            place, target = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
            lines[target : target + draw(st.integers(0, 1))] = ["  " * (kind == "indent") + lines[place]]
            text = "\n".join(lines)
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    if content and draw(st.integers(0, 9)) == 0:
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "rows.jsonl").write_text("{}\n")
    return path


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(content=changed_specs())
def test_a_changed_spec_loads_or_tells_the_place_of_each_fault(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    path = Path("spec.yaml")
    path.write_bytes(content)
    try:
        spec = load_spec(path).spec
    except SpecError as error:
        lines = str(error).split("\n")
        assert all(PLACED.match(line) for line in lines), lines
        assert all(line.isprintable() for line in lines), lines
    else:
        assert type(spec).model_validate_json(spec.model_dump_json()) == spec
