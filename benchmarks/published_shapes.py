"""The shape behind a published row's model name, from the built-in catalog."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from benchmarks.published_cells import NotPriced
from orchestrator.spec.catalog import known

Task = Literal["causal_lm", "sequence_classification", "masked_lm", "seq2seq_lm"]


@dataclass(frozen=True)
class Shape:
    """`config`: a transformers config; `window_tokens`: the reach of its sliding window, if all layers have one."""

    config: dict[str, JsonValue]
    task: Task

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture."""
        return str(self.config.get("model_type", ""))

    @property
    def window_tokens(self) -> int | None:
        """None: attention reaches over the whole sequence."""
        window = self.config.get("sliding_window")
        return window if isinstance(window, int) and self.config.get("use_sliding_window", True) else None


_FINE_TUNED: dict[Task, Task] = {"masked_lm": "sequence_classification"}
"""An encoder's own task is its pretraining; published runs fine-tune it as a classifier."""

_STORED = re.compile(r"[ -]+(gptq|awq|int4|int8|bnb-4bit|4bit)\b.*$|\s*\(.*\)$|\s+int[48].*$", re.IGNORECASE)
"""Words about how weights are stored, which do not change the shape."""


def shape(model: str) -> Shape:
    """Raises NotPriced when the catalog does not know `model`."""
    for name in dict.fromkeys((model.strip(), _STORED.sub("", model.strip()))):
        entry = known(name)
        if entry is not None:
            return Shape(entry.config, _FINE_TUNED.get(entry.task, entry.task))
    raise NotPriced(f"unknown model: {model}")
