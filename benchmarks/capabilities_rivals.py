"""Other estimators on one configuration: those that are installed, and those in an environment of their own.

Each function returns what the tool says of the device's peak, in bytes, or why it cannot say. Every tool runs in a
process of its own. llm-analysis 0.2.2 and fitcheck-llm 0.3.1 are no dependencies of anything here:

    python -m venv RIVALS && RIVALS/bin/pip install --no-deps llm-analysis==0.2.2 fitcheck-llm==0.3.1
    RIVALS/bin/pip install fire click rich huggingface-hub
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Answer:
    """`device_bytes` is None where the tool has no figure for the configuration; `words` say what it counts or why."""

    device_bytes: int | None
    words: str


LLAMA_2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip

_DEEPSPEED = """
import json, sys
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
stage, ranks, trained = json.loads(sys.argv[1])
if stage == 3:
    host, device, layer = zero3(6738415616, 131072000, ranks, 1, False, False, True)
else:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2
    host, device = zero2(6738415616, ranks, 1, False)
print(json.dumps(int(device)))
"""

_ACCELERATE = """
import json, sys, torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoConfig, AutoModel
config = json.loads(sys.argv[1])
with torch.device("meta"):
    model = AutoModel.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
total, _ = calculate_maximum_sizes(model)
print(json.dumps(int(max(estimate_training_usage(total, "bfloat16").values()))))
"""

_MEM_TRACKER = """
import json, sys, torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM
config, method, tokens = json.loads(sys.argv[1])
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.bfloat16, attn_implementation="eager"
    )
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if method == "lora":
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    inputs = torch.empty((1, tokens), dtype=torch.int64)
    # a mask that is whole already: making one reads values, which meta tensors do not have
    mask = torch.empty((1, 1, tokens, tokens), dtype=torch.bfloat16)
    with tracker:
        for _ in range(2):
            model(input_ids=inputs, labels=inputs, attention_mask=mask, position_ids=inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
peaks = tracker.get_tracker_snapshot("peak")
print(json.dumps(int(max(sum(v for k, v in kinds.items() if str(k).endswith("Total")) for kinds in peaks.values()))))
"""

_LLM_ANALYSIS = """
import json, sys
from llm_analysis.analysis import train
stage, ranks, tokens = json.loads(sys.argv[1])
found = train(model_name="NousResearch_Llama-2-7b-hf", gpu_name="a100-sxm-80gb", dtype_name="w16a16e16",
              log_level="ERROR", batch_size_per_gpu=1, gradient_accumulation_steps=1, seq_len=tokens,
              activation_recomputation=2, ds_zero=stage, dp_size=ranks, tp_size=1, pp_size=1, total_num_gpus=ranks,
              flops_efficiency=0.5, total_num_tokens=1e9)
used = [found[name] for name in sorted(found) if name.startswith("(weight+op_state+grad+act)_memory_per_gpu")]
print(json.dumps(int(max(used)) if used else None))
"""

_FITCHECK = """
import json, sys
from fitcheck import TrainingConfig, estimate, get_gpu
from fitcheck.config_parser import ModelConfig
quantization, tokens = json.loads(sys.argv[1])
model = ModelConfig("llama-2-7b", 6738415616, 4096, 32, 32, 32, 11008, 32000, 128, False)
training = TrainingConfig(
    precision="bf16", quantization=quantization, double_quant=quantization != "none", batch_size=1, seq_len=tokens,
    lora_rank=16, lora_targets=["q_proj", "v_proj"], grad_checkpoint=True, flash_attn=True,
)
report = estimate(model, training, get_gpu("a100-80"))
print(json.dumps(int(report.total_mib * 2**20)))
"""


def deepspeed_states(stage: int, ranks: int) -> Answer:
    """`estimate_zero{2,3}_model_states_mem_needs` of the installed DeepSpeed, full training."""
    return _ask(sys.executable, _DEEPSPEED, [stage, ranks, None], "model states only")


def accelerate_estimate() -> Answer:
    """What `accelerate estimate-memory` prints for bf16 training, of a config instead of a name of the hub."""
    return _ask(
        sys.executable, _ACCELERATE, LLAMA_2_7B, "the largest of model, gradients and optimizer; no activations"
    )


def mem_tracker(method: str, tokens: int) -> Answer:
    """torch.distributed's MemTracker around two steps on meta tensors, AdamW foreach."""
    return _ask(sys.executable, _MEM_TRACKER, [LLAMA_2_7B, method, tokens], "one device, eager attention")


def llm_analysis(python: Path | None, stage: int, ranks: int, tokens: int) -> Answer:
    """llm-analysis' training analysis with full recomputation."""
    return _foreign(python, _LLM_ANALYSIS, [stage, ranks, tokens], "full training, a lower bound by its README")


def fitcheck(python: Path | None, quantization: str, tokens: int) -> Answer:
    """fitcheck-llm's total, LoRA of rank 16 on query and value."""
    return _foreign(python, _FITCHECK, [quantization, tokens], "one device")


def _foreign(python: Path | None, code: str, arguments: object, words: str) -> Answer:
    if python is None:
        return Answer(None, "not run: --rivals-python names no environment")
    return _ask(str(python), code, arguments, words)


def _ask(python: str, code: str, arguments: object, words: str) -> Answer:
    try:
        done = subprocess.run(
            [python, "-c", code, json.dumps(arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env={"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer in {TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Answer(None, f"fails: {lines[-1] if lines else f'exit code {done.returncode}'}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Answer(found, words) if isinstance(found, int) else Answer(None, "no figure")
