"""The MLflow page of a sweep as `brimful ui` shows it, in a headless browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from brimful_command import Workplace
from mlflow_page import check_page, headless_browser, served_pages
from selenium.webdriver.remote.webdriver import WebDriver

pytestmark = [pytest.mark.trains, pytest.mark.browser]
QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
# eight rows at once do not fit, one does
SPEC = """\
version: 1
name: page
model:
  config: {model_type: llama, vocab_size: 4096, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 256}
data: {path: page.txt, sequence_length: 256, packing: true}
train: {global_batch: 8, learning_rate: 1e-3, zero_stage: 0}
search:
  sampler: grid
  baseline: {method: full, micro_batch: 1}
  method: [full, lora]
  lora_rank: [2]
  micro_batch: [1, 8]
limits: {device_memory: 130MiB, reject_probability: 1}
measure: {min_steps: 2, max_steps: 2}
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[WebDriver]:
    with headless_browser(tmp_path / "profile") as browser:
        yield browser


def kinds(place: Workplace, sweep: str) -> list[str]:
    """The kind of each trial's outcome, sorted."""
    trials = place.json("trials", sweep)
    assert isinstance(trials, list)
    return sorted(trial["outcome"]["kind"] for trial in trials)


def test_a_parent_with_children_and_what_a_reviewer_needs(browser: WebDriver, place: Workplace) -> None:
    spec = place.folder / "page.yaml"
    spec.write_text(SPEC)
    lines = (f"line {number} of a text about {'many ' * (number % 7)}things\n" for number in range(600))
    (place.folder / "page.txt").write_text("".join(lines))
    run = place.run("run", spec, "--pool", "local")
    assert run.returncode == 0, run.stderr
    assert kinds(place, "page") == ["ok", "ok", "oom_device", "oom_device"]
    with served_pages(place) as address:
        check_page(browser, address, place, "page")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_of_the_quickstart(browser: WebDriver, tmp_path: Path) -> None:
    place = Workplace(tmp_path, deadline_s=900.0)
    run = place.run("run", QUICKSTART, "--trials", "6")
    assert run.returncode == 0, run.stderr
    assert {"ok", "oom_device"} <= set(kinds(place, "quickstart"))
    with served_pages(place) as address:
        check_page(browser, address, place, "quickstart")
