import sqlite3
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fakes import FakePool, FakeStrategy, candidate, config, new_ledger, ok, oom, over_limit, spec, sweep_record
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from orchestrator.backends.mlflow_log import MlflowLog, store_uri
from orchestrator.backends.mlflow_runs import sweep_content
from orchestrator.backends.mlflow_server import preflight, ui_command
from orchestrator.backends.mlflow_status import status_of
from orchestrator.contract.errors import TrackingRefusedError, UsageError
from orchestrator.contract.outcome import Cancelled, Crashed, Hang, LostNode, OomHost, Outcome, Phase, Preempted
from orchestrator.contract.record import AttemptRecord, SweepState, TrialRecord
from orchestrator.spec.sweep import BudgetSection, SweepSpec, TrackingSection
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Interrupt, Services, run_sweep
from orchestrator.sweep.messages import StopCause
from orchestrator.sweep.ports import Launch
from orchestrator.sweep.state import Efficiency

ENDS: dict[int, Outcome] = {
    1: ok(tokens_per_second=100.0),
    2: oom(),
    3: ok(tokens_per_second=300.0),
    4: Crashed(phase=Phase.INIT, rank=0, error="ValueError: bad\ntraceback", exit_code=1),
    5: ok(tokens_per_second=200.0),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all tests: making MLflow's database takes seconds."""
    return tmp_path_factory.mktemp("home")


def client_of(home: Path) -> MlflowClient:
    return MlflowClient(store_uri(TrackingSection(), home))


def runs_of(client: MlflowClient, name: str) -> list[Run]:
    experiment = client.get_experiment_by_name("brimful")
    return list(client.search_runs([experiment.experiment_id], f"tags.`sweep.name` = '{name}'", max_results=1000))


def end(launch: Launch) -> Outcome | None:
    return ENDS[launch.config.knobs.micro_batch]


def run(of: SweepSpec, ledger: Ledger, pool: FakePool, interrupt: Interrupt | None = None) -> list[str]:
    warnings: list[str] = []
    strategy = FakeStrategy([candidate(mb, is_baseline=mb == 1) for mb in range(1, 6)], ledger.read_trials())
    with ledger.lock():
        log = MlflowLog(ledger, of.tracking, warnings.append, ledger.read_trials(), close_s=60.0)
        services = Services(
            pool=pool,
            strategy=strategy,
            logs=(log,),
            efficiency=lambda config, measured: Efficiency(float("nan"), 0.5),
            interrupt=interrupt or Interrupt(),
        )
        run_sweep(of, ledger, services)
        report = ledger.folder / "report.md"
        report.write_text("# report")
        log.attach(report)
        log.close()
    return warnings


def test_a_sweep_and_its_trials_as_runs(home: Path) -> None:
    of = spec(name="whole")
    ledger = new_ledger(home, of)
    assert run(of, ledger, FakePool(end)) == []

    client = client_of(home)
    runs = runs_of(client, "whole")
    (parent,) = [each for each in runs if each.data.tags["brimful.role"] == "sweep"]
    children = {int(each.data.tags["trial"]): each for each in runs if each.data.tags["brimful.role"] == "attempt"}
    assert len(children) == 5
    assert {child.data.tags["mlflow.parentRunId"] for child in children.values()} == {parent.info.run_id}

    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "whole"
    totals = parent.data.metrics
    assert (totals["n_trials"], totals["n_feasible"], totals["n_oom"], totals["n_failed"]) == (5, 3, 1, 1)
    assert (totals["best/tokens_per_second"], totals["speedup_vs_baseline"]) == (300.0, 3.0)
    assert "trial 2" in parent.data.tags["mlflow.note.content"]
    history = client.get_metric_history(parent.info.run_id, "best_so_far")
    assert [(point.step, point.value) for point in history] == [(1, 100), (2, 100), (3, 300), (4, 300), (5, 300)]
    assert "report.md" in {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert parent.inputs.dataset_inputs[0].dataset.digest == "d" * 12

    best, out_of_memory, crashed = children[2], children[1], children[3]
    assert best.info.status == "FINISHED"
    assert best.info.run_name == "t0002 mb3 rNone"
    assert best.data.params["micro_batch"] == "3"
    assert best.data.metrics["knob/micro_batch"] == 3
    assert best.data.metrics["tokens_per_second"] == 300.0
    assert {file.path for file in client.list_artifacts(best.info.run_id)} == {
        "config.json",
        "outcome.json",
        "ds_config.json",
    }
    assert out_of_memory.info.status == "FAILED"
    assert out_of_memory.data.tags["outcome"] == "oom_device"
    assert out_of_memory.data.tags["oom.phase"] == "backward"
    assert "tokens_per_second" not in out_of_memory.data.metrics
    assert (crashed.info.status, crashed.data.tags["error"]) == ("FAILED", "ValueError: bad")
    for child in children.values():
        assert child.info.end_time >= child.info.start_time


def test_a_spec_without_a_search_names_the_sampler_that_proposes() -> None:
    assert sweep_content(sweep_record(spec()), []).params["sampler"] == "guided"


def test_a_number_that_is_not_finite_is_no_metric(home: Path) -> None:
    """field-cases H1: the run of the test above had a NaN for its mfu."""
    (best,) = [each for each in runs_of(client_of(home), "whole") if each.data.tags.get("trial") == "2"]
    assert "mfu" not in best.data.metrics
    assert best.data.metrics["hfu"] == 0.5
    assert best.data.tags["not_finite"] == "mfu"


def test_catching_up_again_changes_nothing(home: Path) -> None:
    """reliability D7, also when the file that remembers run ids is lost."""

    def rows() -> list[int]:
        with sqlite3.connect(home / "mlflow.db") as database:
            tables = ("runs", "params", "metrics", "latest_metrics", "tags", "experiments")
            return [database.execute(f"select count(*) from {table}").fetchone()[0] for table in tables]

    ledger = Ledger(home, "whole")
    before = rows()
    for is_journal_lost in (False, True):
        if is_journal_lost:
            (ledger.folder / "mlflow.jsonl").unlink()
        log = MlflowLog(ledger, TrackingSection(), pytest.fail, ledger.read_trials(), close_s=60.0)
        log.sweep_changed(ledger.read_sweep())
        log.close()
        assert rows() == before


def test_no_run_is_left_running_when_the_sweep_is_stopped(home: Path) -> None:
    """field-cases H2."""
    of = spec(name="stopped", budget=BudgetSection(trials=5))
    interrupt = Interrupt()

    def press(pool: FakePool) -> None:
        if len(pool.launched) == 3:
            interrupt.cause = StopCause.INTERRUPT

    ledger = new_ledger(home, of)
    run(
        of,
        ledger,
        FakePool(lambda launch: None if launch.config.knobs.micro_batch == 3 else end(launch), on_wait=press),
        interrupt,
    )
    runs = runs_of(client_of(home), "stopped")
    assert sorted(each.info.status for each in runs) == ["FAILED", "FINISHED", "KILLED", "KILLED"]

    assert run(of, ledger, FakePool(end)) == []
    runs = runs_of(client_of(home), "stopped")
    statuses = sorted(each.info.status for each in runs)
    assert statuses == ["FAILED", "FAILED", "FINISHED", "FINISHED", "FINISHED", "FINISHED", "KILLED"]
    assert sum(each.data.tags["brimful.role"] == "sweep" for each in runs) == 1


def test_runs_of_a_dead_driver_are_closed_on_resume(home: Path) -> None:
    of = spec(name="killed", budget=BudgetSection(trials=1))
    ledger = new_ledger(home, of)
    built = config(micro_batch=1)
    attempt = AttemptRecord(attempt=1, token="dead", dispatched_s=time.time())
    record = TrialRecord(trial=0, candidate=built.candidate, label="mb1", config=built, attempts=(attempt,))
    ledger.write_trial(record)
    log = MlflowLog(ledger, of.tracking, pytest.fail, [record], close_s=60.0)
    log.sweep_changed(ledger.read_sweep())
    log.close()
    assert {each.info.status for each in runs_of(client_of(home), "killed")} == {"RUNNING"}

    run(of, ledger, FakePool(end))
    runs = {each.data.tags.get("attempt"): each.info.status for each in runs_of(client_of(home), "killed")}
    assert runs == {None: "FINISHED", "1": "KILLED", "2": "FINISHED"}


def test_the_experiment_is_made_once_by_drivers_that_start_together(home: Path) -> None:
    """field-cases H5."""
    ledgers = [new_ledger(home, spec(name=f"together{number}")) for number in range(4)]
    tracking = TrackingSection(experiment="shared")
    logs = [MlflowLog(ledger, tracking, pytest.fail, close_s=60.0) for ledger in ledgers]
    for log, ledger in zip(logs, ledgers, strict=True):
        log.sweep_changed(ledger.read_sweep().model_copy(update={"state": SweepState.FINISHED}))
    for log in logs:
        log.close()
    experiment = client_of(home).get_experiment_by_name("shared")
    assert len(client_of(home).search_runs([experiment.experiment_id])) == 4


def test_a_server_that_is_down_costs_one_warning_and_no_time(home: Path) -> None:
    of = spec(name="down", tracking=TrackingSection(uri="http://127.0.0.1:9"))
    ledger = new_ledger(home, of)
    warnings: list[str] = []
    log = MlflowLog(ledger, of.tracking, warnings.append, close_s=0.0)
    log.sweep_changed(ledger.read_sweep())
    for trial in range(5):
        built = config(micro_batch=trial + 1)
        attempt = AttemptRecord(attempt=1, token=f"d{trial}", dispatched_s=1.0, ended_s=2.0, outcome=ok())
        log.trial_changed(TrialRecord(trial=trial, candidate="c", label="l", config=built, attempts=(attempt,)))
    log.close()
    assert any("brimful sync down" in warning for warning in warnings)
    assert sum("cannot be reached" in warning for warning in warnings) <= 1


class Refuses(BaseHTTPRequestHandler):
    """A tracking server that knows nobody."""

    def do_GET(self) -> None:
        self._refuse()

    def do_POST(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"You are not authenticated.")

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def refusing_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://user:secret@127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_refused_credentials_end_the_sweep_before_it_starts(refusing_server: str) -> None:
    with pytest.raises(TrackingRefusedError, match=r"127\.0\.0\.1 refuses the credentials") as refused:
        preflight(TrackingSection(uri=refusing_server), pytest.fail)
    assert "secret" not in str(refused.value)
    assert refused.value.exit_code == 5


def test_a_silent_server_is_worth_one_warning_at_the_start() -> None:
    warnings: list[str] = []
    preflight(TrackingSection(uri="http://127.0.0.1:9"), warnings.append)
    assert len(warnings) == 1


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "ftp://host/x"])
def test_a_store_that_cannot_be_used_is_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="give a server"):
        preflight(TrackingSection(uri=uri), pytest.fail)


def test_the_pages_are_served_on_loopback_behind_the_host_check(tmp_path: Path) -> None:
    command = ui_command(TrackingSection(), tmp_path, port=5055)
    options = dict(zip(command.arguments[4::2], command.arguments[5::2], strict=True))
    assert options["--host"] == "127.0.0.1"
    assert options["--allowed-hosts"] == "127.0.0.1:5055,localhost:5055"
    assert options["--backend-store-uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert "--disable-security-middleware" not in command.arguments
    assert command.url == "http://127.0.0.1:5055"


def test_long_values_are_cut_with_a_mark(home: Path) -> None:
    of = spec(name="long", budget=BudgetSection(trials=1))
    ledger = new_ledger(home, of)
    error = Crashed(phase=Phase.INIT, rank=0, error="E" * 9000)
    run(of, ledger, FakePool(lambda launch: error))
    (child,) = [each for each in runs_of(client_of(home), "long") if "trial" in each.data.tags]
    assert len(child.data.tags["error"]) == 8000
    assert child.data.tags["error"].endswith("[cut]")


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (over_limit(), "FINISHED"),
        (OomHost(phase=Phase.INIT, evidence="cgroup oom_kill rose by 1"), "FAILED"),
        (Hang(phase=Phase.FORWARD, rank=1, silent_s=300.0), "FAILED"),
        (Preempted(), "KILLED"),
        (LostNode(node="n1"), "KILLED"),
        (Cancelled(), "KILLED"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_every_outcome_closes_its_run(outcome: Outcome, status: str) -> None:
    assert status_of(outcome) == status
