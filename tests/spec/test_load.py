"""Every fault of a spec is one line with its place and its mend; what is valid keeps its meaning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spec_texts import VALID, Faults, Load

from orchestrator.contract.config import QualitySettings
from orchestrator.contract.errors import SpecError
from orchestrator.spec.load import load_spec
from orchestrator.spec.sweep import Objective, Sampler

WORDS = [
    ("1e-4", "off", "8:18: train.learning_rate: must be a number, not 'off'"),
    ("1e-4", "0", "8:18: train.learning_rate: must be greater than 0, not 0"),
    ("1e-4", ".nan", "8:18: train.learning_rate: .nan is not a finite number; write a finite one, or quote it when "
     "text is meant"),
    ("1e-4", "1e999", "8:18: train.learning_rate: 1e999 is too large for a number; write a smaller one"),
    ("1e-4", "'1e-4'", "8:18: train.learning_rate: must be a number, not '1e-4'"),
    ("16", "017", "7:17: train.global_batch: 017 has a leading zero, which some readers take as octal; write 17, or "
     "quote it"),
    ("16", "0x10", "7:17: train.global_batch: 0x10 is not a decimal number; write 16"),
    ("16", "1_6", "7:17: train.global_batch: 1_6 has underscores; write 16"),
    ("16", "two", "7:17: train.global_batch: must be a whole number, not 'two'"),
    ("16", "1.5", "7:17: train.global_batch: must be a whole number, not 1.5"),
    ("16", "true", "7:17: train.global_batch: must be a whole number, not true"),
    ("16", "~", "7:17: train.global_batch: must be a whole number, not nothing; give a value or leave the key out"),
    ("16", "[16]", "7:17: train.global_batch: must be a whole number, not a list"),
    ("16", "!!python/object:os.system x", "7:17: train.global_batch: the tag tag:yaml.org,2002:python/object:os.system "
     "is not accepted; write the plain value"),
    ("[1, 2]", "[1, 2, 08]", "11:23: search.micro_batch[2]: 08 has a leading zero, which some readers take as octal; "
     "write 8, or quote it"),
    ("[1, 2]", "[1, 1]", "11:20: search.micro_batch[1]: 1 stands twice among the choices; keep one"),
    ("[1, 2]", "[]", "11:16: search.micro_batch: has no choices; list at least one"),
    ("[1, 2]", "[0, 1]", "11:17: search.micro_batch[0]: must be at least 1, not 0"),
    ("[1, 2]", "2", "11:16: search.micro_batch: must be a list of choices such as [2], or {min: .., max: ..}"),
    ("[1, 2]", "{min: '1', max: '64'}", "11:22: search.micro_batch.min: must be a whole number, not '1'"),
    ("[1, 2]", "{min: 8, max: 2}", "11:22: search.micro_batch.min: min 8 is greater than max 2; swap them"),
    ("[1, 2]", "{min: 1, maxi: 2}", "11:31: search.micro_batch.maxi: unknown key of a range; did you mean max?"),
    ("[0, 2]", "[0, 4]", "10:19: search.zero_stage[1]: 4 is not one of 0, 1, 2, 3; write one of them"),
    ("zero_stage: [0, 2]", "offload_optimizer: [none, cpu, off]", "10:34: search.offload_optimizer[2]: 'off' is not "
     "one of none, cpu; write none"),
    ("zero_stage: [0, 2]", "offload_optimizer: [false]", "10:23: search.offload_optimizer[0]: false is not one of "
     "none, cpu; write none"),
    ("zero_stage: [0, 2]", "overlap_comm: [yes]", "10:18: search.overlap_comm[0]: must be true or false, not the word "
     "'yes'"),
    ("zero_stage: [0, 2]", "attention: off", "10:14: search.attention: 'off' is not one of eager, sdpa; write one of "
     "them"),
    ("zero_stage: [0, 2]", "zero_stag: [0, 2]", "10:3: search.zero_stag: unknown key; did you mean zero_stage?"),
    ("zero_stage: [0, 2]", "lora_targets: [[q_proj, '']]", "10:27: search.lora_targets[0][1]: must be the name of a "
     "linear layer, not ''"),
    ("zero_stage: [0, 2]", "baseline: {zero: 2}", "10:14: search.baseline.zero: unknown knob; did you mean "
     "zero_stage?"),
    ("zero_stage: [0, 2]", "sampler: bayes", "10:12: search.sampler: 'bayes' is not one of guided, tpe, gp, "
     "random, grid; write one of them"),
    ("learning_rate: 1e-4", "learning_rate: 1e-4\n  micro_batch: 4", "12:3: search.micro_batch: stands in train and in "
     "search; keep train.micro_batch to fix it or search.micro_batch to search it"),
    ("learning_rate: 1e-4", "learning_rate: 1e-4\n  method: [lora]", "9:11: train.method: is fixed here, so it takes "
     "one value; move choices to search.method"),
    ("  learning_rate: 1e-4\n", "", "6:1: train.learning_rate: is missing; add learning_rate: 1e-4"),
    ("sequence_length: 128", "sequence_length: 128, packing: no", "5:57: data.packing: must be true or false, not the "
     "word 'no'"),
    ("sequence_length: 128", "seq_length: 128", "5:26: data.seq_length: unknown key; did you mean sequence_length?"),
    ("rows.jsonl", "rows.json", "5:14: data.path: no file or folder 'rows.json' in "),
    ("name: small", "name: 2024", "2:7: name: must be text, not 2024; quote it: '2024'"),
    ("name: small", "name: a/b", "2:7: name: 'a/b' is not a name; write letters, digits, '.', '_' and '-', at most 63, "
     "beginning with a letter or digit"),
    ("version: 1", "version: one", "1:10: version: must be 1; write version: 1"),
    ("model_type: llama", "model_type: llama, model_type: gpt2", "4:31: model.config.model_type: this key stands "
     "already in line 4; keep one of the two"),
    ("hidden_size: 64", "<<: {a: 1}", "4:31: model.config: merge keys (<<) are not accepted; write the keys out"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"), WORDS, ids=[message.split(": ")[1] + "=" + new[:20] for _, new, message in WORDS]
)
def test_a_wrong_value_gives_its_place_and_mend(faults: Faults, old: str, new: str, message: str) -> None:
    lines = faults(old, new)
    assert any(line.startswith(f"spec.yaml:{message}") for line in lines), lines


SECTIONS = [
    ("limits: {device_memory: 80Q}", "'80Q' is not a size; write it like 24GiB, 512MiB or 80GB"),
    ("limits: {device_memory: 1GiB, headroom: 2GiB}", "headroom is all of device_memory or more"),
    ("budget: {time: 2:30}", "2:30 is read as a base-60 number by some readers; write 150s or 2m30s, or quote it"),
    ("budget: {time: 1:02:30}", "write 3750s or 1h2m30s"),
    ("budget: {time: soon}", "'soon' is not a duration; write it like 90s, 10m or 1h30m"),
    ("budget: {trials: -1}", "must be at least 1, not -1"),
    ("measure: {max_measure_s: long}", "'long' is not a duration"),
    ("measure: {min_steps: 30}", "measure.min_steps: min_steps 30 is greater than max_steps 20; swap them"),
    ("resources: {devices_per_trial: 3}", "train.global_batch: 16 is not divisible by devices_per_trial 3"),
    ("resources: {devices_per_trial: 4, nodes: 3}", "devices_per_trial 4 is not divisible by nodes 3"),
    (
        "resources: {devices_per_trial: two}",
        "must be a whole number, not 'two'; to search it, a list such as [1, 2, 4]",
    ),
    ("resources: {devices_per_trial: [1, 0]}", "devices_per_trial: must list whole numbers of at least 1, not 0"),
    ("resources: {devices_per_trial: [2, 2]}", "devices_per_trial: must list different numbers, at least one"),
    ("resources: {nodes: 0}", "resources.nodes: must be at least 1, not 0"),
    (
        "resources: {devices_per_trial: [3, 5]}",
        "train.global_batch: 16 is not divisible by devices_per_trial 3, 5; write a multiple of one",
    ),
    ("resources: {devices_per_trial: [3, 4], nodes: [5]}", "devices_per_trial 3, 4 is not divisible by nodes 5"),
    ("resources: {device: a100}", "resources.device: 'a100' is not auto, cpu, cuda or a key of the device table; "),
    ("objective: speed", "'speed' is not one of tokens_per_second, peak_memory_bytes"),
    ("objective: [mfu, mfu]", "objective[1]: mfu stands twice; keep one"),
    ("objective: eval_loss", "objective[0]: eval_loss is not measured; add measure.quality, e.g. measure: {quality: "),
    ("objective: [mfu, eval_loss]", "objective[1]: eval_loss is not measured; add measure.quality"),
    ("measure: {quality: {}}", "measure.quality.train_tokens: is missing; add train_tokens: 20000, after"),
    ("measure: {quality: {train_tokens: 9, eval_row: 2}}", "unknown key; did you mean eval_rows?"),
    ("measure: {quality: {train_tokens: 1.5}}", "measure.quality.train_tokens: must be a whole number, not 1.5"),
    ("measure: {quality: {train_tokens: 20k}}", "train_tokens: must be a whole number, not '20k'; write 20e3"),
    ("measure: {quality: true}", "must be a mapping of keys to values, not true; write quality: {train_tokens: 20000"),
    ("measure: {confirm: none}", "measure.confirm: must be a mapping of keys to values, not 'none'; write confirm: {"),
    ("limits: {eval_loss_within: 2.5%}", "eval_loss_within: must be a number, not '2.5%'; write 0.025"),
    ("measure: {quality: {train_tokens: 9, eval_rows: 0}}", "measure.quality.eval_rows: must be at least 1, not 0"),
    ("measure: {quality: {train_tokens: 9}}\nlimits: {eval_loss_within: 2}", "must be at most 1, not 2"),
    (
        "measure: {quality: {train_tokens: 9}}\nlimits: {eval_loss_within: 0.02}",
        "limits.eval_loss_within: compares with the baseline, and there is none; add search.baseline",
    ),
    (
        "budget: {money: 5}",
        "budget.money: what a device-hour costs is not known; add resources: {price_per_device_hour",
    ),
    ("budget: {money: 5 USD}", "budget.money: must be a number, not '5 USD'"),
    ("resources: {price_per_device_hour: 0}", "resources.price_per_device_hour: must be greater than 0, not 0"),
    ("resources: {price_per_device_hour: my.yaml}", "no cluster profile 'my.yaml'; write a number, or the path of a"),
    ("resources: {price_per_device_hour: rows.jsonl}", "is no cluster profile: "),
    (
        "resources: {price_per_device_hour: 1, currency: $}",
        "'$' is not a currency; write its three capital letters, like USD",
    ),
    ("serach: {}", "serach: unknown section; did you mean search?"),
    ("search: {zero_stage: [1]}", "search: this key stands already in line 9; keep one of the two"),
    ("tracking: {enabled: on}", "must be true or false, not the word 'on'"),
]


@pytest.mark.parametrize(("section", "message"), SECTIONS, ids=[section for section, _ in SECTIONS])
def test_a_wrong_section_gives_its_place_and_mend(faults: Faults, section: str, message: str) -> None:
    lines = faults("", f"{section}\n")
    assert len(lines) == 1
    assert message in lines[0]
    line = 7 if "train.global_batch" in message else 12 + section.count("\n")
    assert lines[0].startswith(f"spec.yaml:{line}:")


def test_a_loss_that_is_not_measured_bounds_nothing(faults: Faults) -> None:
    (line,) = faults("search:", "limits: {eval_loss_within: 0.02}\nsearch:\n  baseline: {zero_stage: 2}")
    assert line.startswith(
        "spec.yaml:9:28: limits.eval_loss_within: the eval loss is not measured; add measure.quality"
    )


def test_the_quality_settings_are_read(load: Load) -> None:
    text = "search:\n  baseline: {zero_stage: 2}"
    more = "limits: {eval_loss_within: 0.02}\nmeasure: {quality: {train_tokens: 2e4}}\nobjective: [mfu, eval_loss]\n"
    spec = load("search:", more + text).spec
    assert spec.measure.quality == QualitySettings(train_tokens=20000, eval_rows=32)
    assert spec.limits.eval_loss_within == 0.02
    assert spec.objective[1] == Objective(metric="eval_loss", goal="minimize")


def test_all_faults_are_told_at_once_in_the_order_of_the_file(faults: Faults) -> None:
    lines = faults("16\n  learning_rate: 1e-4", "x\n  learning_rate: y\n  lr: 3\nlimits: {headroom: z}")
    assert [line.split(": ")[1] for line in lines] == [
        "train.global_batch",
        "train.learning_rate",
        "train.lr",
        "limits.headroom",
    ]


def test_numbers_and_words_keep_their_meaning(load: Load) -> None:
    loaded = load(
        "  zero_stage: [0, 2]",
        "  sampler: gp\n  reduce_bucket_size: [5e8, 1e5]\n  offload_param: [none, cpu]\n"
        "  lora_rank: {min: 8, max: 64, scale: log2}\n  sub_group_size: {min: 10, max: 30, step: 10}\n"
        "  lora_targets: [all-linear, 'v_proj, q_proj', [k_proj]]\n  overlap_comm: [true, false]",
    )
    search = loaded.spec.search
    assert search is not None
    assert search.sampler is Sampler.GP
    assert search.knobs == {
        "reduce_bucket_size": (500_000_000, 100_000),
        "offload_param": ("none", "cpu"),
        "lora_rank": (8, 16, 32, 64),
        "sub_group_size": (10, 20, 30),
        "lora_targets": ("all-linear", ("q_proj", "v_proj"), ("k_proj",)),
        "overlap_comm": (True, False),
        "micro_batch": (1, 2),
    }
    assert all(type(choice) is int for choice in search.knobs["reduce_bucket_size"])
    assert loaded.spec.train.learning_rate == 0.0001
    assert loaded.spec.model.config is not None
    assert type(loaded.spec.model.config["rope_theta"]) is float


def test_sizes_and_durations_are_bytes_and_seconds(load: Load) -> None:
    spec = load(
        "", "limits: {device_memory: 80Gi, headroom: 512MiB}\nbudget: {time: 1h30m}\nmeasure: {max_measure_s: 2m}"
    ).spec
    assert spec.limits.device_memory == 80 * 2**30
    assert spec.limits.headroom == 512 * 2**20
    assert spec.budget.time == 5400.0
    assert spec.measure.max_measure_s == 120.0


@pytest.mark.parametrize(
    ("written", "objective"),
    [
        ("peak_memory_bytes", (Objective(metric="peak_memory_bytes", goal="minimize"),)),
        ("{metric: mfu}", (Objective(metric="mfu", goal="maximize"),)),
        ("{metric: step_s, goal: min}", (Objective(metric="step_s", goal="minimize"),)),
        ("{goal: max}", (Objective(),)),
        (
            "[tokens_per_second, {metric: step_s, goal: minimize}]",
            (Objective(), Objective(metric="step_s", goal="minimize")),
        ),
    ],
)
def test_an_objective_may_be_a_name_a_mapping_or_a_list(
    load: Load, written: str, objective: tuple[Objective, ...]
) -> None:
    assert load("", f"objective: {written}\n").spec.objective == objective


def test_paths_mean_the_folder_of_the_spec_then_the_working_folder(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rows.jsonl").write_text("{}\n")
    (elsewhere / "other.jsonl").write_text("{}\n")
    monkeypatch.chdir(elsewhere)
    assert load().spec.data.path == str(tmp_path / "rows.jsonl")
    assert load(overrides=("data.path=rows.jsonl",)).spec.data.path == str(elsewhere / "rows.jsonl")
    assert load("rows.jsonl", "other.jsonl").spec.data.path == str(elsewhere / "other.jsonl")


def test_a_tokenizer_is_a_folder_or_a_hub_id(load: Load, faults: Faults, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    assert load("128}", "128, tokenizer: words}").spec.data.tokenizer == str(tmp_path / "words")
    assert load("tokenizer: words", "tokenizer: org/name").spec.data.tokenizer == "org/name"
    assert "no file or folder './none'" in faults("tokenizer: org/name", "tokenizer: ./none")[0]


def test_the_code_of_a_model_runs_only_when_the_command_line_agrees(load: Load, faults: Faults) -> None:
    lines = faults("model:\n", "model:\n  trust_remote_code: true\n")
    assert lines == [
        "spec.yaml:4:22: model.trust_remote_code: runs code that comes with the model; pass --allow-remote-code too, "
        "or write false"
    ]
    assert load(remote=True).spec.model.trust_remote_code


def test_a_model_has_one_source(faults: Faults) -> None:
    lines = faults("model:\n", "model:\n  id: org/name\n")
    assert lines == [
        "spec.yaml:4:3: model: needs exactly one of config, path, id, and config and id are given; keep one"
    ]


def test_a_newer_version_says_what_is_needed(faults: Faults) -> None:
    lines = faults("version: 1", "version: 2\nunheard: of")
    assert len(lines) == 1
    assert "version 2 is newer than version 1, the newest that brimful" in lines[0]
    assert "upgrade brimful to a release that reads version 2" in lines[0]


def test_paired_knobs_stand_nowhere_else(faults: Faults) -> None:
    entry = "  paired: [{micro_batch: 1, lora_rank: 8}, {micro_batch: 2}, {lora_rank: 8, attention: sdpa}]\n"
    lines = faults("search:\n", f"search:\n{entry}")
    assert lines == [
        "spec.yaml:10:44: search.paired[1]: pairs fewer than two knobs; write at least two, or search the knob by "
        "itself"
    ]
    lines = faults(", {micro_batch: 2}", "")
    assert [line.split(": ")[1] for line in lines] == [
        "search.paired[0].micro_batch",
        "search.paired[1].lora_rank",
    ]


BROKEN = {
    "empty": (b"", ":1:1: is empty; begin with the spec that `brimful init` writes"),
    "a list": (b"- 1\n", ":1:1: is not a mapping of sections"),
    "binary": (b"\x7fELF\x00\x01", ":1:1: is a binary file"),
    "utf-16": ("version: 1".encode("utf-16"), ":1:1: is written in UTF-16; save it as UTF-8"),
    "latin-1": (b"version: 1\nname: caf\xe9\n", ":2:10: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    "a tab": (b"version: 1\nmodel:\n\tid: x\n", ":3:1: not valid YAML: "),
    "a control character": (b"version: 1\nname: a\x07b\n", ":2:"),
    "a cut end": (b"version: 1\nmodel: {config: {a: 1\n", ":3:1: not valid YAML: "),
    "two documents": (b"version: 1\n---\nversion: 1\n", ":2:1: a second document begins; keep one document a file"),
    "a deep nest": (b"model: " + b"[" * 500, ":1:"),
    "a large file": (b"# " + b"x" * 1_000_001, ":1:1: is larger than 1000000 bytes"),
    "an alias of nothing": (b"model: *none\n", ":1:8: model: the alias *none names nothing before it"),
    "an alias of itself": (b"model: &a [*a]\n", ":1:12: model[0]: the alias *a names nothing before it"),
    "a list as key": (b"? [a]\n: 1\n", ":1:3: a key that is a list"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).split("\n")[0].startswith(f"{path}{message}")


def test_a_byte_order_mark_is_no_fault(spec_file: Path) -> None:
    spec_file.write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load_spec(spec_file).spec.name == "small"


def test_aliases_are_expanded_only_within_bounds(spec_file: Path) -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 9)]
    spec_file.write_text("\n".join(lines))
    with pytest.raises(SpecError, match="more than 50000 values once aliases are expanded"):
        load_spec(spec_file)


def test_an_alias_of_a_value_stands_for_it(load: Load) -> None:
    spec = load("[0, 2]", "&few [1, 2]").spec
    assert spec.search is not None
    assert spec.search.knobs["zero_stage"] == (1, 2)
    again = load("micro_batch: [1, 2]", "micro_batch: *few").spec
    assert again.search is not None
    assert again.search.knobs["micro_batch"] == (1, 2)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, message in [
        (tmp_path / "fifo", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path, "is a directory"),
        (tmp_path / "none.yaml", "cannot be read (No such file or directory)"),
    ]:
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        assert str(caught.value) == f"{path}:1:1: {message}; give the path of a YAML file"


def test_a_place_can_be_asked_for_later(load: Load, spec_file: Path) -> None:
    loaded = load(overrides=("search.lora_rank=[8]",))
    assert loaded.locate("search.zero_stage") == f"{spec_file}:10:15: search.zero_stage"
    assert loaded.locate("search.lora_targets") == f"{spec_file}:10:3: search.lora_targets"
    assert loaded.locate("search.lora_rank") == "override search.lora_rank=[8]: search.lora_rank"


def test_loading_a_spec_imports_no_training_or_service_library() -> None:
    heavy = {"torch", "transformers", "peft", "deepspeed", "ray", "optuna", "mlflow", "datasets", "numpy"}
    code = (
        f"import sys, orchestrator.spec.load, orchestrator.space.candidates; print(sorted({heavy} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


CLUSTERS = Path(__file__).parents[2] / "clusters"


def test_the_price_may_be_that_of_a_cluster_profile(load: Load) -> None:
    text = f"budget: {{money: 20}}\nresources: {{price_per_device_hour: {CLUSTERS / '1xh200.yaml'}}}\n"
    spec = load("", text).spec
    assert (spec.resources.price_per_device_hour, spec.resources.currency, spec.budget.money) == (4.5, "USD", 20)


def test_a_profile_without_a_price_or_of_another_currency_is_refused(faults: Faults) -> None:
    without = f"resources: {{price_per_device_hour: {CLUSTERS / '1x24gb.yaml'}}}\n"
    assert "states no price_per_device_hour; add it there, or write a number here" in faults("", without)[0]
    other = (f"resources.price_per_device_hour={CLUSTERS / '1xh200.yaml'}", "resources.currency=EUR")
    assert "is in USD, resources.currency is EUR; write the price as a number" in faults("", "", other)[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.planned_tokens=2B"],
            "'2B' is not a number of tokens; write it like 2e9, or planned_epochs for passes",
        ),
        (["train.planned_epochs=3 days"], "'3 days' is not a number of passes over the data; write it like 3, or"),
        (["train.planned_tokens=0"], "must be greater than 0, not 0"),
        (["train.planned_tokens=5", "train.planned_epochs=1"], "both say how long the training is; keep one"),
        (["data.max_rows=5", "train.planned_epochs=1"], "data.max_rows leaves rows out, so the length of an epoch"),
        (["search.stop_below_gain=0.3%"], "search.stop_below_gain=0.3%: must be a number, not '0.3%'"),
        (["search.stop_below_gain=1"], "must be less than 1, not 1"),
    ],
)
def test_a_wrong_plan_or_stop_gives_its_mend(faults: Faults, overrides: list[str], message: str) -> None:
    lines = faults("", "", tuple(overrides))
    assert len(lines) == 1
    assert message in lines[0]


def test_a_planned_length_is_a_count(load: Load) -> None:
    assert load(overrides=("train.planned_tokens=2e9",)).spec.train.planned_tokens == 2_000_000_000
    assert load(overrides=("train.planned_epochs=1.5",)).spec.train.planned_epochs == 1.5
