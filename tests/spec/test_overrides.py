"""Settings from the command line come after the spec, obey the same rules, and are named in faults."""

import pytest
from spec_texts import Faults, Load


def test_the_last_override_wins(load: Load) -> None:
    spec = load(overrides=("train.learning_rate=5e-5", "train.learning_rate=3e-5", "budget.trials=4")).spec
    assert spec.train.learning_rate == 3e-5
    assert spec.budget.trials == 4


def test_fixing_a_searched_knob_ends_its_search(load: Load) -> None:
    spec = load(overrides=("train.zero_stage=2",)).spec
    assert spec.search is not None
    assert spec.train.fixed == {"zero_stage": 2}
    assert set(spec.search.knobs) == {"micro_batch"}


def test_searching_a_fixed_knob_frees_it(load: Load) -> None:
    spec = load("learning_rate", "method: full\n  learning_rate", ("search.method=[lora, full]",)).spec
    assert spec.search is not None
    assert spec.train.fixed == {}
    assert spec.search.knobs["method"] == ("lora", "full")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("resources.devices_per_trial=two", "must be a whole number, not 'two'"),
        ("train.micro_batch=08", "08 has a leading zero, which some readers take as octal; write 8, or quote it"),
        ("search.zero_stag=[1]", "unknown key; did you mean zero_stage?"),
        ("search.offload_param=[off]", "search.offload_param[0]: 'off' is not one of none, cpu; write none"),
        ("serch.zero_stage=[1]", "serch: unknown section; did you mean search?"),
        ("trials", "is not of the form key=value; write e.g. budget.trials=20"),
        ("=3", "is not of the form key=value; write e.g. budget.trials=20"),
        ("name.first=x", "name is not a mapping in the spec; override it as a whole"),
        ("budget.time=[1", "not valid YAML: "),
        ("data.path=none.jsonl", "no file or folder 'none.jsonl' in "),
    ],
)
def test_a_fault_names_its_override(faults: Faults, override: str, message: str) -> None:
    lines = faults(overrides=(override,))
    assert len(lines) == 1
    assert lines[0].startswith(f"override {override}: {message}")


def test_faults_of_overrides_follow_those_of_the_file(faults: Faults) -> None:
    lines = faults("16", "x", ("budget.trials=0",))
    assert [line.split(": ")[0] for line in lines] == ["spec.yaml:7:17", "override budget.trials=0"]
