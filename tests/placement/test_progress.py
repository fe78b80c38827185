"""Where ranks are, from what they write."""

from pathlib import Path

from orchestrator.contract.outcome import Phase
from orchestrator.contract.rank import Event
from orchestrator.placement.progress import Progress


def test_what_a_rank_writes_before_its_host_tells_of_it_counts(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    progress = Progress(events)
    progress.begin(0, now_s=1.0)
    lines = (Event(event="phase", time_s=0.0, rank=rank, phase=Phase.FORWARD) for rank in (0, 1))
    events.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    progress.read(now_s=2.0)
    assert progress.phase(1) is Phase.START
    progress.begin(1, now_s=3.0)
    assert progress.phase(1) is Phase.FORWARD
    assert (progress.ranks[0].last_s, progress.ranks[1].last_s) == (2.0, 3.0)
