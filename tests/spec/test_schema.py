"""The published JSON Schema is that of the models, and agrees with the loader about real specs."""

import json
from pathlib import Path

import jsonschema
import pytest
from spec_texts import VALID

from orchestrator.spec.document import parse_document
from orchestrator.spec.places import Places
from orchestrator.spec.schema import SCHEMA_ID, spec_schema

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    published = json.loads((ROOT / "docs" / SCHEMA_ID).read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def _value(text: str) -> object:
    return parse_document(text, Places("spec.yaml")).value


def test_the_published_schema_is_in_step() -> None:
    published = (ROOT / "docs" / SCHEMA_ID).read_text()
    assert json.loads(published) == spec_schema(), "run: python -m orchestrator.spec.schema > docs/sweep-v1.schema.json"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_valid(validator: jsonschema.Draft202012Validator, path: Path) -> None:
    assert [error.message for error in validator.iter_errors(_value(path.read_text()))] == []


@pytest.mark.parametrize("goal", ["max", "min", "maximize", "minimize"])
def test_goals_may_be_short(validator: jsonschema.Draft202012Validator, goal: str) -> None:
    assert validator.is_valid(_value(f"{VALID}objective: {{metric: mfu, goal: {goal}}}\n"))
    assert not validator.is_valid(_value(f"{VALID}objective: {{metric: mfu, goal: {goal}imum}}\n"))


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("16", "two", "$.train.global_batch"),
        ("[0, 2]", "[0, 4]", "$.search.zero_stage"),
        ("[0, 2]", "2", "$.search.zero_stage"),
        ("name: small", "name: a b", "$.name"),
        ("  learning_rate: 1e-4\n", "", "$.train"),
        ("zero_stage", "zero", "$.search"),
        ("search:", "objective: {goal: up}\nsearch:", "$.objective"),
    ],
)
def test_a_wrong_value_is_seen(validator: jsonschema.Draft202012Validator, old: str, new: str, place: str) -> None:
    validator_errors = list(validator.iter_errors(_value(VALID.replace(old, new, 1))))
    places = {error.json_path for error in validator_errors}
    places |= {inner.json_path for error in validator_errors for inner in error.context or ()}
    assert any(found.startswith(place) for found in places), places
