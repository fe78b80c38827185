"""Opens the MLflow page of a sweep with a headless browser and compares it with what `brimful trials` says."""

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
NAME, OUTCOME, PHASE = "attributes.`Run Name`", "tags.`outcome`", "tags.`oom.phase`"
SPEED, METHOD, ZERO_STAGE = "metrics.`tokens_per_second`", "params.`method`", "params.`zero_stage`"
SHOWN = (NAME, OUTCOME, PHASE, SPEED, METHOD, ZERO_STAGE, "metrics.`mem/peak_gib`", "metrics.`mfu`")
NOTHING = "-"

PageRow = dict[str, str]
"""The text of a row's cells by their column."""


@contextmanager
def headless_browser(profile: Path) -> Iterator[WebDriver]:
    """Debian's Chromium with a fresh profile; skips the test without it."""
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "window-size=2600,1300", f"user-data-dir={profile}"),
    ):
        options.add_argument(f"--{switch}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@contextmanager
def served_pages(place: Workplace) -> Iterator[str]:
    """The address of the sweeps' page, served by `brimful ui`, which ends with all that it started."""
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


def check_page(browser: WebDriver, address: str, place: Workplace, sweep: str) -> None:
    """The newest sweep on the page is `sweep`: its children, outcomes, speeds and best are those of its records. Every
    launch has a row, so that a confirmed trial has several."""
    trials, best = place.json("trials", sweep), place.json("best", sweep)
    assert isinstance(trials, list)
    assert isinstance(best, dict)
    wait = WebDriverWait(browser, DEADLINE_S)
    browser.get(address)
    parent = wait.until(lambda page: _cells(page, NAME))[0]
    assert parent.text.split()[-1] == sweep
    parent.find_element(By.TAG_NAME, "button").click()
    launches = [trial for trial in trials for _ in range(max(1, trial["attempt"]))]
    wait.until(lambda page: len(_cells(page, NAME)) == 1 + len(launches))
    rows = page_rows(browser)
    children = [row for row in rows if row[OUTCOME] != NOTHING]
    assert len(children) == len(launches)
    before = ["ok" for trial in trials for _ in range(max(1, trial["attempt"]) - 1)]
    for column, of_record in {
        OUTCOME: [*before, *(trial["outcome"]["kind"] for trial in trials)],
        PHASE: [trial["outcome"]["phase"] for trial in trials if trial["outcome"]["kind"] == "oom_device"],
        METHOD: [trial["config"]["method"] for trial in launches],
        ZERO_STAGE: [str(trial["config"]["zero_stage"]) for trial in launches],
    }.items():
        assert sorted(row[column] for row in children if row[column] != NOTHING) == sorted(of_record), column
    confirmed = [row for row in children if f"{best['label']}, confirmation" in row[NAME]]
    speeds = [float(row[SPEED]) for row in confirmed]
    assert len(speeds) == best["confirmation_runs"] > 0
    assert sum(speeds) / len(speeds) == pytest.approx(best["tokens_per_second"], rel=0.01)
    _cells(browser, NAME)[0].find_element(By.TAG_NAME, "a").click()
    launched = [trial for trial in trials if trial["outcome"]["kind"] != "rejected"]
    said = f"Best of {len(launched)} trials: {best['label']}"
    wait.until(lambda page: said in page.find_element(By.TAG_NAME, "body").text)


def page_rows(page: WebDriver) -> list[PageRow]:
    """The rows of the table as they are shown, with the columns of `SHOWN`."""
    rows: dict[str, PageRow] = {}
    for column in SHOWN:
        for cell in _cells(page, column):
            index = cell.find_element(By.XPATH, "./..").get_attribute("row-index")
            rows.setdefault(str(index), {})[column] = cell.text.strip()
    return list(rows.values())


def _cells(page: WebDriver, column: str) -> list[WebElement]:
    cells = page.find_elements(By.CSS_SELECTOR, "[role=gridcell]")
    return [cell for cell in cells if cell.get_attribute("col-id") == column]
