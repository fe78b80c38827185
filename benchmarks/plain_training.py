"""A plain DeepSpeed training script, as a user of DeepSpeed's autotuner has one: nothing of Brimful in it.

    deepspeed plain_training.py --deepspeed_config ds_config.json --settings settings.json [--steps 200 --result FILE]

`--deepspeed_config` names a file, or is its content in base64, which is how the autotuner passes it. `settings.json`:
`model` (a transformers config), `rows` (a folder with tokens.bin, int32, and offsets.bin, int64), `pad_token_id`,
`learning_rate`, `weight_decay`, `seed`, `memory_limit_bytes` for each rank, `threads`, `preload` (modules that are
imported before the limit counts, as DeepSpeed imports them in its calls), and `zero_defaults` (values of
`zero_optimization` by stage, where the configuration has none). The first LONGEST_STEPS steps take the longest rows, so
that a lack of memory shows at once; they and WARM_UP_STEPS more are not timed.
"""

import argparse
import base64
import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import HfDeepSpeedConfig

LONGEST_STEPS = 2
WARM_UP_STEPS = 1
IGNORED_LABEL = -100
# an operator for inference; training on CPUs would only wait for its compiler
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def limit_memory(limit_bytes: int | None) -> None:
    """Let this process take `limit_bytes` of private address space beyond what its imports took; then malloc fails."""
    if limit_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + limit_bytes, hard))


def status_bytes(name: str) -> int:
    """One of the Vm lines of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def read_deepspeed(text: str, zero_defaults: dict[str, dict[str, int]]) -> dict[str, Any]:
    """DeepSpeed's configuration from a file, or from base64, with what it leaves out for its stage."""
    document = Path(text).read_text() if text.endswith(".json") else base64.urlsafe_b64decode(text).decode()
    config: dict[str, Any] = json.loads(document)
    zero = config["zero_optimization"]
    config["zero_optimization"] = {**zero_defaults.get(str(zero["stage"]), {}), **zero}
    return config


class Rows:
    """Prepared rows in seeded order, the longest ones first."""

    def __init__(self, folder: Path, seed: int, pad_token_id: int) -> None:
        self.tokens = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
        self.offsets = np.fromfile(folder / "offsets.bin", dtype=np.int64)
        self.lengths = np.diff(self.offsets)
        self.order = np.random.default_rng(seed).permutation(len(self.lengths))
        self.longest = np.argsort(-self.lengths, kind="stable")
        self.pad_token_id = pad_token_id

    def micro_batches(self, step: int, micro_batch: int, accumulation: int, world_size: int) -> list[list[list[int]]]:
        """Indices of rows by rank, of each of its micro-batches."""
        if step < LONGEST_STEPS:
            return [[[int(row) for row in np.resize(self.longest, micro_batch)]] * accumulation] * world_size
        count = micro_batch * accumulation * world_size
        start = (step - LONGEST_STEPS) * count
        taken = [int(row) for row in np.take(self.order, range(start, start + count), mode="wrap")]
        groups = [taken[first : first + micro_batch] for first in range(0, count, micro_batch)]
        return [groups[rank::world_size] for rank in range(world_size)]

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """The rows padded on the right to the longest of them."""
        shape = (len(indices), int(self.lengths[indices].max()))
        ids = torch.full(shape, self.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
        for position, index in enumerate(indices):
            row = torch.from_numpy(self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64))
            ids[position, : len(row)] = row
            mask[position, : len(row)] = 1
            labels[position, : len(row)] = row
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def build_engine(settings: dict[str, Any], config: dict[str, Any]) -> Any:
    """The model with random weights and AdamW, wrapped by DeepSpeed; created in shards under ZeRO-3."""
    torch.manual_seed(settings["seed"])
    # transformers holds only a weak reference, and asks it whether to shard
    sharded = HfDeepSpeedConfig(config) if config.get("zero_optimization", {}).get("stage") == 3 else None
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["model"]), dtype=torch.float32)
    model.init_weights()
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"], fused=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    del sharded
    return engine


def train(engine: Any, rows: Rows, steps: int) -> dict[str, float]:
    """Run `steps` timed steps after those that are not. Returns tokens of all ranks, without padding, and seconds."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    micro_batch, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    first = LONGEST_STEPS + WARM_UP_STEPS
    tokens, start_s = 0, 0.0
    for step in range(first + steps):
        if step == first:
            torch.distributed.barrier()
            start_s = time.perf_counter()
        by_rank = rows.micro_batches(step, micro_batch, accumulation, world_size)
        for indices in by_rank[rank]:
            engine.backward(engine(**rows.batch(indices)).loss)
            engine.step()
        if step >= first:
            tokens += sum(int(rows.lengths[indices].sum()) for groups in by_rank for indices in groups)
    torch.distributed.barrier()
    return {"tokens": tokens, "seconds": time.perf_counter() - start_s, "steps": steps}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings.read_text())
    torch.set_num_threads(settings["threads"])
    for name in settings["preload"]:
        importlib.import_module(name)
    limit_memory(settings["memory_limit_bytes"])
    start_bytes = status_bytes("VmSize")
    deepspeed.init_distributed(dist_backend="gloo")
    rows = Rows(Path(settings["rows"]), settings["seed"], settings["pad_token_id"])
    engine = build_engine(settings, read_deepspeed(arguments.deepspeed_config, settings["zero_defaults"]))
    result = train(engine, rows, arguments.steps)
    result["peak_memory_bytes"] = status_bytes("VmPeak") - start_bytes
    if arguments.result is not None and torch.distributed.get_rank() == 0:
        arguments.result.write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    # threads of the training libraries now and then abort the end of the interpreter, which would fail a finished run
    sys.stdout.flush()
    os._exit(0)
