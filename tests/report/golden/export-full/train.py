# Exported by brimful 0.1.0: sweep quickstart (s1), trial 4 (a label), candidate c0ffee.
# Measured 1,500 tokens/s without padding (95 % interval 1,485 to 1,515) and a peak of 700.00 MiB of 1.00 GiB allowed per rank on 1 x Test CPU, 2 cores.
# Global batch 8 = micro-batch 2 x accumulation 4 x 1 ranks.
# Versions: brimful 0.1.0, torch 2.13.0, transformers 5.24.0. Other versions may run at another speed or need other memory.
"""Trains with the measured configuration: transformers' Trainer, DeepSpeed and PEFT, from the files beside this one.

data/ holds the prepared rows: tokens.bin (int32 token ids, row after row), offsets.bin (int64, where each row starts,
and the end) and data.json. Every token is a label; a micro-batch is padded on the right to its longest row.
"""

import argparse
import importlib
import json
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

HERE = Path(__file__).resolve().parent
# an operator for inference; training on CPUs would only wait for its compiler
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
UNMEASURED_STEPS = 1
"""Steps after the longest rows that warm up and do not count."""


def read(name):
    return json.loads((HERE / name).read_text())


class Rows(torch.utils.data.Dataset):
    """The prepared rows in the order in which they are trained on."""

    def __init__(self, seed, sequence_length, packing):
        self.tokens = np.memmap(HERE / "data" / "tokens.bin", dtype=np.int32, mode="r")
        self.offsets = np.fromfile(HERE / "data" / "offsets.bin", dtype=np.int64)
        if packing:
            row_tokens = min(sequence_length, len(self.tokens))
            self.offsets = np.arange(len(self.tokens) // row_tokens + 1) * row_tokens
        self.lengths = np.diff(self.offsets)
        self.order = np.random.default_rng(seed).permutation(len(self.lengths))

    def put_longest_first(self, micro_batch, rows):
        """Begin with `rows` of the longest rows, so that a lack of memory shows in the first step.

        Every micro-batch is the longest one; where rows differ in length it holds a shorter one too, since attention
        with padding can need more memory than without.
        """
        longest = np.argsort(-self.lengths, kind="stable")
        batch = np.resize(longest, micro_batch)
        shorter = longest[self.lengths[longest] < self.lengths[longest[0]]]
        if micro_batch > 1 and len(shorter) and len(set(self.lengths[batch])) == 1:
            batch[-1] = shorter[0]
        self.order = np.concatenate([np.resize(batch, rows), self.order])

    def repeat_to(self, rows):
        """Go over the rows again until there are `rows` of them."""
        self.order = np.resize(self.order, max(rows, len(self.order)))

    def __len__(self):
        return len(self.order)

    def __getitem__(self, position):
        row = self.order[position]
        return torch.from_numpy(self.tokens[self.offsets[row] : self.offsets[row + 1]].astype(np.int64))


def collate(pad_token_id):
    def pad(rows):
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), pad_token_id)
        mask = torch.zeros((len(rows), longest), dtype=torch.int64)
        labels = torch.full((len(rows), longest), -100)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
            labels[index, : len(row)] = row
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return pad


def build_model(arguments):
    settings = read("model.json")
    kwargs = settings["kwargs"]
    source = settings["path"] or settings["id"]
    if settings["weights"] == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(source, revision=settings["revision"], **kwargs)
    else:
        if settings["config"] is not None:
            config = AutoConfig.for_model(**settings["config"])
        else:
            trust = kwargs["trust_remote_code"]
            config = AutoConfig.from_pretrained(source, revision=settings["revision"], trust_remote_code=trust)
        model = AutoModelForCausalLM.from_config(config, **kwargs)
    model.config.use_cache = False
    has_adapters = (HERE / "adapter_config.json").exists()
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
        if has_adapters:
            model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig.from_pretrained(str(HERE))) if has_adapters else model


def build_optimizer(model):
    settings = read("optimizer.json")
    module, _, name = settings.pop("class").rpartition(".")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return getattr(importlib.import_module(module), name)(parameters, **settings)


class StepTimes(TrainerCallback):
    """Duration of every optimizer step, in seconds."""

    def __init__(self):
        self.step_s = []

    def on_step_begin(self, args, state, control, **kwargs):
        synchronize()
        self.start_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.step_s.append(time.perf_counter() - self.start_s)


def synchronize():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def status_bytes(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024


def peak_bytes(start_bytes):
    """Reserved bytes on the GPU, or the growth of the address space on a CPU: what Brimful calls peak memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    return status_bytes("VmPeak") - start_bytes


def measured(times, rows, first, global_batch, start_bytes):
    """What this run reached, over all ranks, after `first` steps."""
    tokens = sum(
        int(rows.lengths[rows.order[step * global_batch : (step + 1) * global_batch]].sum())
        for step in range(first, len(times.step_s))
    )
    peaks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(peaks, peak_bytes(start_bytes))
    return {
        "tokens_per_second": tokens / sum(times.step_s[first:]) if len(times.step_s) > first else None,
        "measured_steps": max(0, len(times.step_s) - first),
        "peak_memory_bytes": max(peaks),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=-1, help="optimizer steps; without it one pass over the data")
    parser.add_argument("--longest-first", type=int, default=2, help="steps on the longest rows at the start")
    parser.add_argument("--output", default="output", help="folder for the trained model")
    parser.add_argument("--no-save", action="store_true", help="do not save the model")
    options = parser.parse_args()
    start_bytes = status_bytes("VmSize")

    arguments = read("training_arguments.json")
    arguments |= {"deepspeed": str(HERE / arguments["deepspeed"]), "output_dir": options.output}
    # the arguments come before the model: under ZeRO-3 they tell transformers to create it in shards
    arguments = TrainingArguments(**arguments, max_steps=options.max_steps, disable_tqdm=True)
    rows_per_rank = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    global_batch = read("ds_config.json")["train_batch_size"]
    if rows_per_rank * arguments.world_size != global_batch:
        raise SystemExit(f"these files are for {global_batch // rows_per_rank} ranks, not {arguments.world_size}")
    # ZeRO-3 shards the model while it is built, among the ranks that DeepSpeed knows by then
    deepspeed.init_distributed()
    set_seed(arguments.seed)
    model = build_model(arguments)

    data = read("data/data.json")
    rows = Rows(arguments.seed, data["sequence_length"], data["packing"])
    rows.put_longest_first(arguments.per_device_train_batch_size, options.longest_first * global_batch)
    rows.repeat_to(options.max_steps * global_batch)

    times = StepTimes()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=collate(data["pad_token_id"]),
        optimizers=(build_optimizer(model), None),
        callbacks=[times],
    )
    trainer.train()
    first = options.longest_first + UNMEASURED_STEPS
    result = measured(times, rows, first, global_batch, start_bytes)
    if trainer.is_world_process_zero():
        print(json.dumps(result), flush=True)
    if not options.no_save:
        trainer.save_model()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
