"""The MLflow page of a sweep as `brimful ui` shows it, in a headless browser."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from brimful_command import Workplace
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
DEADLINE_S = 60
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
limits: {device_memory: 130MiB}
measure: {min_steps: 2, max_steps: 2}
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[WebDriver]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "window-size=2600,1300", f"user-data-dir={tmp_path / 'profile'}"),
    ):
        options.add_argument(f"--{switch}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def address(place: Workplace) -> Iterator[str]:
    """The page of a real sweep in which two trials fit and two run out of memory, served by `brimful ui`."""
    spec = place.folder / "page.yaml"
    spec.write_text(SPEC)
    lines = (f"line {number} of a text about {'many ' * (number % 7)}things\n" for number in range(600))
    (place.folder / "page.txt").write_text("".join(lines))
    run = place.run("run", spec, "--pool", "local")
    assert run.returncode == 0, run.stderr
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with place.start("ui", "--port", str(port), "--no-browser") as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        assert f"http://127.0.0.1:{port}/" in first, first
        yield first.split()[-1]
        served_by = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        assert server.wait(timeout=DEADLINE_S) == 143
        assert served_by
        assert not [process for process in served_by if process.is_running()]


@pytest.mark.trains
@pytest.mark.browser
def test_a_parent_with_children_and_what_a_reviewer_needs(browser: WebDriver, address: str) -> None:
    wait = WebDriverWait(browser, DEADLINE_S)
    browser.get(address)
    parent = wait.until(lambda page: _cells(page, "attributes.`Run Name`"))[0]
    assert parent.text.split()[-1] == "page"
    parent.find_element(By.TAG_NAME, "button").click()
    wait.until(lambda page: len(_cells(page, "attributes.`Run Name`")) == 5)
    outcomes = sorted(cell.text for cell in _cells(browser, "tags.`outcome`"))
    assert outcomes == ["-", "ok", "ok", "oom_device", "oom_device"]
    phases = [cell.text for cell in _cells(browser, "tags.`oom.phase`") if cell.text != "-"]
    assert len(phases) == 2
    assert set(phases) <= {"forward", "backward"}
    speeds = [float(cell.text) for cell in _cells(browser, "metrics.`tokens_per_second`") if cell.text != "-"]
    assert len(speeds) == 2
    assert min(speeds) > 0
    for column in ("metrics.`mem/peak_gib`", "metrics.`mfu`", "params.`method`", "params.`zero_stage`"):
        assert len(_cells(browser, column)) == 5, column


def _cells(page: WebDriver, column: str) -> list[WebElement]:
    cells = page.find_elements(By.CSS_SELECTOR, "[role=gridcell]")
    return [cell for cell in cells if cell.get_attribute("col-id") == column]
