"""PyTorch's types by their names in a trace's request."""

import torch

from orchestrator.contract.profile import Dtype

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
