"""What a sweep makes of ends of its trials: which count, which are tried again, how MLflow shows it."""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import FakePool, FakeStrategy, candidate, new_ledger, ok, spec
from mlflow.tracking import MlflowClient
from pools.conformance import STUB, until

from faults import leaks
from orchestrator.backends.mlflow_log import MlflowLog, store_uri
from orchestrator.contract.outcome import LostNode, OomHost, Outcome
from orchestrator.contract.units import MIB
from orchestrator.spec.sweep import TrackingSection
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Launch

Figure = Callable[[str, str], None]
LIMIT_BYTES = 512 * MIB


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 512 MiB below the one that the tests run in."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    group = Path(f"/sys/fs/cgroup/memory{own}") / uuid.uuid4().hex
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a writable cgroup-v1 memory controller")
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield group
    until(lambda: (group / "cgroup.procs").read_text() == "")
    group.rmdir()


@pytest.mark.fault("B1")
def test_the_kernels_out_of_memory_ends_one_trial_once_and_no_other(
    tests_importable: None, cgroup: Path, tmp_path: Path, figure: Figure
) -> None:
    """The driver and all ranks share the limit; trial 1 asks for more than it while trial 0 runs."""
    join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
    plan = json.dumps({"0000/attempt-1": "sleep:3", "0001/attempt-1": "hog"})
    driver = [sys.executable, "-c", _DRIVER, STUB, str(tmp_path), plan]
    subprocess.run([sys.executable, "-c", join, str(cgroup / "cgroup.procs"), *driver], check=True, timeout=120)
    ledger = Ledger(tmp_path, "sweep")
    ends = [[a.outcome.kind for a in record.attempts if a.outcome] for record in ledger.read_trials()]
    assert ends == [["ok"], ["oom_host"], ["ok"]]
    hog = ledger.read_trial(1)
    assert isinstance(hog.outcome, OomHost)
    assert "oom_kill rose by" in hog.outcome.evidence
    last_sign_s = max(event.time_s for event in ledger.attempt(1, 1).read_events())
    assert hog.attempts[0].ended_s is not None
    figure("last sign of the killed rank to its outcome", f"{hog.attempts[0].ended_s - last_sign_s:.1f} s")
    leaks.assert_home_clean(tmp_path)


_DRIVER = """
import json, sys
from pathlib import Path
from fakes import FakeStrategy, candidate, new_ledger, spec
from orchestrator.backends.local_pool import LocalPool
from orchestrator.sweep.loop import Services, run_sweep

class Pool(LocalPool):
    def launch(self, launch):
        behaviour = json.loads(sys.argv[3]).get(f"{launch.directory.parent.name}/{launch.directory.name}", "ok")
        (launch.directory / "behave.json").write_text(json.dumps({"0": behaviour}))
        super().launch(launch)

of = spec()
ledger = new_ledger(Path(sys.argv[2]), of)
pool = Pool(devices=2, template_module=sys.argv[1])
with ledger.lock():
    run_sweep(of, ledger, Services(pool, FakeStrategy(candidate(size) for size in (1, 2, 3))))
pool.close()
"""


@pytest.mark.fault("B14")
def test_a_trial_that_lost_its_node_has_two_linked_runs(tmp_path: Path) -> None:
    of = spec()
    ledger = new_ledger(tmp_path, of)

    def script(launch: Launch) -> Outcome:
        is_first = launch.directory.name == "attempt-1" and launch.config.knobs.micro_batch == 1
        return LostNode(node="far", evidence="gone") if is_first else ok()

    with ledger.lock():
        log = MlflowLog(ledger, of.tracking, lambda words: None, [], close_s=60.0)
        run_sweep(of, ledger, Services(FakePool(script), FakeStrategy([candidate(1), candidate(2)]), (log,)))
        log.close()
    client = MlflowClient(store_uri(TrackingSection(), tmp_path))
    experiment = client.get_experiment_by_name("brimful")
    runs = client.search_runs([experiment.experiment_id], "tags.trial = '0'", max_results=10)
    first, second = sorted((run.data.tags for run in runs), key=lambda tags: tags["attempt"])
    assert [first["outcome"], second["outcome"]] == ["lost_node", "ok"]
    record = ledger.read_trial(0)
    assert second["retry_of"] == record.attempts[0].token
    assert "retry_of" not in first
    assert all(run.info.status != "RUNNING" for run in runs)
    leaks.assert_home_clean(tmp_path)
