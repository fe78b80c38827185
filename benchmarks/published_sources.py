"""What the scripts behind a published row settle beside its columns: versions, and defaults of their frameworks.

A row's own columns and notes always win. A source that is not named here has the defaults of `Conventions`: a current
transformers Trainer with peft, weights in half precision, mixed precision by autocast.
"""

import re
from dataclasses import dataclass, field, replace

from benchmarks.published_cells import Row, Versions


@dataclass(frozen=True)
class Conventions:
    """What a source's rows share.

    `half_weights`: whether mixed precision runs on weights loaded in half precision; None: where a row says `bf16` or
    `fp16` alone, not where it says `amp`. `autocasts`: `bf16` alone means autocast, else pure half precision.
    `quantised_autocasts`: runs on quantised weights are mixed whatever their row says. `casts_for_kbit`: peft's
    `prepare_model_for_kbit_training` is called on a bitsandbytes model; `casts_back`: where it is called, TRL then
    makes embeddings and head half again. `keeps_outputs`: the loop holds the model's outputs in the backward pass.
    `is_reentrant`: what checkpoints are told; None: the library's default. `unpriced`: why nothing of the source can
    be predicted.
    """

    versions: Versions = field(default_factory=Versions)
    half_weights: bool | None = None
    autocasts: bool = True
    quantised_autocasts: bool = False
    casts_for_kbit: bool = True
    casts_back: bool = False
    keeps_outputs: bool = False
    is_reentrant: bool | None = None
    lora_dropout: float = 0.0
    default_targets: tuple[str, ...] | None = None
    gpu_gb: int | None = None
    node_devices: int = 8
    unpriced: str | None = None


_FMS = Conventions(half_weights=True, quantised_autocasts=True, casts_for_kbit=False, casts_back=True, lora_dropout=0.1)
"""foundation-model-stack/fms-acceleration `scripts/benchmarks/scenarios*.yaml`: `torch_dtype` is half precision,
`lora_dropout: 0.1`. Its plugins for quantised models (`plugins/accelerated-peft`) insist on mixed precision and prepare
the model without casts; its baseline leaves that to TRL's SFTTrainer (trl 0.13.0, `sft_trainer.py`)."""

_OWN_MODEL_CODE = "its own model code is not traced"

_TABLE: tuple[tuple[str, Conventions], ...] = (
    # scripts/benchmarks/refs/requirements*.txt and refs_orca/requirements*.txt at 876e2ed
    (r"fms-acceleration.*refs/a100_80gb\.csv", replace(_FMS, versions=Versions((2, 4), (4, 48)))),
    (r"fms-acceleration.*_(liger|granite)\.csv", replace(_FMS, versions=Versions((2, 4), (4, 45)))),
    (r"fms-acceleration.*_moe\.csv", replace(_FMS, versions=Versions((2, 6), (4, 52)))),
    (r"fms-acceleration.*refs_orca/", replace(_FMS, versions=Versions((2, 4), (4, 44)))),
    (r"framework_config=", replace(_FMS, versions=Versions((2, 4), (4, 48)))),
    # method_comparison/MetaMathQA/run.py at 5d602fd: no autocast, `outputs` lives until the next forward pass
    (r"huggingface/peft.*(method_comparison|PR #3157)", Conventions(autocasts=False, keeps_outputs=True)),
    # docs/source/accelerate/{fsdp,deepspeed}.md at 5d602fd: the launch lines set use_reentrant for QLoRA alone
    (
        r"huggingface/peft.*docs/source/accelerate.*nested quant",
        Conventions(versions=Versions((2, 2), (4, 39)), half_weights=True, lora_dropout=0.1, is_reentrant=True),
    ),
    (
        r"huggingface/peft.*docs/source/accelerate",
        Conventions(versions=Versions((2, 2), (4, 39)), half_weights=True, lora_dropout=0.1, is_reentrant=False),
    ),
    # swift/llm/utils/argument.py at 6cfbc2ec: dtype bf16 sets both torch_dtype and bf16, lora_dropout_p 0.05;
    # transformers of that month (February 2024)
    (
        r"modelscope/ms-swift @6cfbc2ec",
        Conventions(
            versions=Versions((2, 1), (4, 37)),
            half_weights=True,
            casts_for_kbit=False,
            lora_dropout=0.05,
            default_targets=("q_proj", "k_proj", "v_proj"),
        ),
    ),
    (r"modelscope/ms-swift", Conventions(versions=Versions((2, 6), (4, 51)), half_weights=True, lora_dropout=0.05)),
    # the edit of 2024-04-15; src/llmtuner/model/patcher.py casts only layer norms, and only when asked
    (
        r"LLaMA-Factory|LlamaFactory",
        Conventions(versions=Versions((2, 2), (4, 39)), half_weights=True, casts_for_kbit=False),
    ),
    # examples/huggingface/training.py: torch_dtype bfloat16, bf16 through accelerate's FSDP; August 2024
    (r"linkedin/Liger-Kernel", Conventions(versions=Versions((2, 3), (4, 44)), half_weights=True)),
    # unsloth.ai/docs benchmarks of December 2024: transformers' Trainer, QLoRA with peft's preparation
    (r"unsloth", Conventions(versions=Versions((2, 5), (4, 46)), half_weights=True)),
    # training/autotuning/hf/README.md: transformers 4.12.0 loads float32; one node of 16 V100, whose size is not
    # printed: the batches that the tuner found (bert-large in float32, 93 rows of 128 tokens) need the 32 GB card
    (
        r"DeepSpeedExamples training/autotuning",
        Conventions(versions=Versions((1, 9), (4, 12)), half_weights=False, gpu_gb=32, node_devices=16),
    ),
    # finetune.py and finetune/*.sh at 2df8e8a: weights in bfloat16, bf16 flag, lora_dropout 0.05; end of 2023
    (r"QwenLM/Qwen", Conventions(versions=Versions((2, 0), (4, 32)), half_weights=True, lora_dropout=0.05)),
    # recipes: peft, pure bf16, `loss = model(**batch).loss`; fp32 rows load fp32
    (r"llama-cookbook", Conventions(versions=Versions((2, 0), (4, 30)), autocasts=False)),
    # docs perf_train_gpu_one.mdx at 0016acf: transformers 4.18, torch 1.10
    (r"perf_train_gpu_one", Conventions(versions=Versions((1, 10), (4, 18)))),
    (r"stas00/ml-engineering", Conventions(versions=Versions((2, 13), (5, 14)), half_weights=True)),
    (r"chenyaofo", Conventions(versions=Versions((2, 2), (4, 37)), half_weights=True)),
    (
        r"torchtune|torchtitan|litgpt|Megatron|NeMo|mosaicml/llm-foundry|bing_bert|OpenTau|NVIDIA-NeMo",
        Conventions(unpriced=_OWN_MODEL_CODE),
    ),
)


def conventions(row: Row) -> Conventions:
    """Those of the first line whose pattern is found in the row's source or notes."""
    text = f"{row.get('source', '')} | {row.get('notes', '')} | {row.get('model', '')}"
    return next((found for pattern, found in _TABLE if re.search(pattern, text, re.IGNORECASE)), Conventions())
