"""The figures of `benchmarks.against_deepspeed` and the page made of them."""

import statistics
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from benchmarks.autotuner_run import AutotunerResult, Experiment
from benchmarks.paired import mean_interval

WALL_TARGET = 1 / 10
THROUGHPUT_TARGET = 1.0
_LONGEST_ERROR = 90

_CONDITIONS = """\
## What is equal, and what the autotuner needed to run at all

- Equal: model, weights' seed, prepared rows and their order, global batch, learning rate, AdamW in fp32, gradient
  clipping, ranks, one thread a rank, malloc settings, and the limit (RLIMIT_DATA above what the imports took). Both
  train on the longest rows first, so that a lack of memory shows at once.
- The space is the ZeRO stages and the micro-batches. With `fast: false` the autotuner goes on to bucket sizes in a
  stage that looks better than the stages before it; Brimful's bucket sizes are fixed.
- The autotuner gets the micro-batches as a list, and all else of its settings are its defaults. Without a list it
  searches up to 1024 by itself, takes the machine's whole memory for the limit, and lets the global batch vary.
- The rows are prepared before the autotuner's clock starts; Brimful prepares them in its own time, in an empty home.
- Needed: the package `tabulate`; `DS_ACCELERATOR=cpu`, and `LOCAL_SIZE` for the number of CPU devices; a valid
  `MLFLOW_RUN_ID`, since mlflow is importable (made before the clock starts); and commands named `pdsh`, `ssh`, `pkill`
  and `killall` that do nothing, first on the PATH, since after every experiment it has processes killed by pattern.
- The size was chosen with this comparison in mind: the model is tiny and the list of micro-batches long. An experiment
  costs the autotuner its start, whatever the model, and its experiments grow with the list, Brimful's launches hardly;
  with half the list its time would be about half, and Brimful's would not. Long steps would narrow the gap in the
  same way. That is reckoned: no other size was run to its end.
- The script imports what DeepSpeed would import in its calls before the limit counts, as Brimful's trials do.
- The script fills in the bucket sizes that a configuration leaves out (hidden size squared, as transformers' `auto`):
  the autotuner drops the user's own where it searches the micro-batch, and a bucket of DeepSpeed's default of 5e8
  elements takes 2 GB, more than the limit, so that its stages 1 to 3 would all fail.
- The autotuner scores an experiment by rows, not tokens, over the time of forward, backward and optimizer step, each
  taken once a step and multiplied by the accumulation (`_autotuning_exit` in DeepSpeed's engine.py)."""


@dataclass(frozen=True)
class BrimfulResult:
    """From `brimful run` in an empty home to its exit."""

    pool: str
    wall_s: float
    trials: int
    confirmations: int
    """Launches that measure the best again; not counted in `trials`."""
    failed: int
    """Launched trials that did not run to their end, nearly always for want of memory."""
    not_launched: int
    """Candidates that were predicted not to fit."""
    label: str


@dataclass(frozen=True)
class Pair:
    """Both winners, turn by turn, by the neutral script: tokens/s without padding over all ranks. None: it failed."""

    autotuner: float | None
    brimful: float | None


@dataclass(frozen=True)
class Ratio:
    """Brimful's throughput over the autotuner's: the mean over pairs and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    of_medians: float


def ratio(pairs: tuple[Pair, ...]) -> Ratio | None:
    """None with fewer than two pairs in which both winners trained."""
    both = [(pair.autotuner, pair.brimful) for pair in pairs if pair.autotuner is not None and pair.brimful is not None]
    if len(both) < 2:
        return None
    ratios = [brimful / autotuner for autotuner, brimful in both]
    medians = [statistics.median(side) for side in zip(*both, strict=True)]
    return Ratio(*mean_interval(ratios), medians[1] / medians[0])


@dataclass(frozen=True)
class Comparison:
    """One run of the benchmark."""

    machine: str
    versions: dict[str, str]
    date: str
    space: str
    ranks: int
    limit: str
    steps: int
    autotuner: AutotunerResult
    brimful: tuple[BrimfulResult, ...]
    """The first is the default pool, whose winner the pairs are of."""
    pairs: tuple[Pair, ...]

    @property
    def wall_ratio(self) -> float:
        """Brimful's wall time over the autotuner's."""
        return self.brimful[0].wall_s / self.autotuner.wall_s

    def document(self) -> dict[str, JsonValue]:
        """All figures as JSON, the targets beside them."""
        found = ratio(self.pairs)
        return {
            **asdict(self),
            "wall_ratio": self.wall_ratio,
            "wall_target": WALL_TARGET,
            "throughput_ratio": None if found is None else asdict(found),
            "throughput_target": THROUGHPUT_TARGET,
        }


def page(result: Comparison, command: str) -> str:
    """The page for docs/measurements."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        "# Brimful beside DeepSpeed's autotuner",
        "",
        f"`{command}` on {result.machine}; {versions}; {result.date}.",
        f"{result.space}; {result.ranks} CPU ranks, at most {result.limit} each.",
        "",
        *_searches(result),
        "",
        "Not launched: predicted not to fit. Failed: launched, and no figure, nearly always for want of memory.",
        f"From the command to the end of the process, start-up counted, Brimful took {result.wall_ratio:.3f} of the"
        f" autotuner's wall time (target: at most {WALL_TARGET:.1f}, {_met(result.wall_ratio <= WALL_TARGET)}).",
        "",
        "## Both winners by one neutral script",
        "",
        *_turns(result),
        "",
        "## What the autotuner ran",
        "",
        _buckets(result.autotuner.experiments),
        "",
        *_experiments(result.autotuner.experiments),
        "",
        _CONDITIONS,
    ]
    return "\n".join(lines) + "\n"


def _searches(result: Comparison) -> list[str]:
    tuner = result.autotuner
    failed = sum(each.error is not None for each in tuner.experiments)
    return [
        "| | wall time, s | launches | of them to confirm | of them failed | not launched | winner |",
        "|---|---|---|---|---|---|---|",
        f"| DeepSpeed's autotuner | {tuner.wall_s:.1f} | {tuner.launches} | 0 | {failed} | 0 | {tuner.label} |",
        *(
            f"| Brimful, `--pool {side.pool}` | {side.wall_s:.1f} | {side.trials + side.confirmations} |"
            f" {side.confirmations} | {side.failed} | {side.not_launched} | {side.label} |"
            for side in result.brimful
        ),
    ]


def _turns(result: Comparison) -> list[str]:
    found = ratio(result.pairs)
    lines = [
        f"{result.steps} timed optimizer steps a turn, both winners in turns; tokens/s without padding over all ranks.",
        "",
        "| pair | autotuner's winner | Brimful's winner | ratio |",
        "|---|---|---|---|",
    ]
    for number, pair in enumerate(result.pairs, 1):
        rival, ours = pair.autotuner, pair.brimful
        quotient = "none" if rival is None or ours is None else f"{ours / rival:.3f}"
        lines.append(f"| {number} | {_rate(rival)} | {_rate(ours)} | {quotient} |")
    if found is None:
        return [*lines, "", "Fewer than two pairs ran on both sides: there is no ratio."]
    verdict = _met(found.of_medians >= THROUGHPUT_TARGET)
    text = (
        f"Brimful's winner reaches {found.of_medians:.3f} times the autotuner's (medians; target: at least"
        f" {THROUGHPUT_TARGET:.1f}, {verdict}); mean ratio {found.mean:.3f}, 95 % interval over pairs {found.low:.3f}"
        f" to {found.high:.3f}."
    )
    return [*lines, "", text]


def _buckets(experiments: tuple[Experiment, ...]) -> str:
    varied = [each for each in experiments if each.varies_buckets]
    return (
        f"The metric is its own. {len(varied)} of its {len(experiments)} experiments vary bucket sizes; they took"
        f" {sum(each.duration_s for each in varied):.0f} of the {sum(each.duration_s for each in experiments):.0f} s of"
        " all, the autotuner's waiting left out."
    )


def _experiments(experiments: tuple[Experiment, ...]) -> list[str]:
    return [
        "| experiment | ZeRO stage | micro-batch | metric, samples/s | duration, s | why not |",
        "|---|---|---|---|---|---|",
        *(
            f"| {each.name} | {each.zero_stage} | {each.micro_batch} | {_metric(each)} | {each.duration_s:.1f} |"
            f" {_short(each.error)} |"
            for each in experiments
        ),
    ]


def _rate(tokens_per_second: float | None) -> str:
    return "failed" if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def _metric(experiment: Experiment) -> str:
    return "none" if experiment.metric is None else f"{experiment.metric:.2f}"


def _short(error: str | None) -> str:
    return "" if error is None else error.replace("|", "/")[:_LONGEST_ERROR]


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"
