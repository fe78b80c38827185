"""The verbs of the command line: names, options and help. Each hands over to the module that does the work."""

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import (
    DEFAULT_HOME,
    DEFAULT_NODE_TIMEOUT,
    Address,
    AllowRemoteCode,
    AsJson,
    Home,
    Name,
    NodeTimeout,
    OptionalName,
    Overrides,
    Quiet,
    Spec,
)
from orchestrator.cli.outside import OutsideCommand
from orchestrator.contract.units import parse_duration

app = typer.Typer(
    name="brimful",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Finds the fastest LLM fine-tuning configuration that fits in memory, over a whole cluster.",
    epilog=(
        "Exit codes: 0 done, with a configuration that fits; 1 failed; 2 wrong usage or spec; 3 nothing fits; "
        "4 stopped by `brimful stop`; 5 cluster or tracking server unreachable; 130 Ctrl-C; 143 SIGTERM."
    ),
)

PoolName = Annotated[
    str | None, typer.Option("--pool", metavar="ray|local", help="Run trials on Ray (default) or without it, here.")
]
TrackingUri = Annotated[str | None, typer.Option(help="An MLflow server instead of the store under the home folder.")]
NoTracking = Annotated[bool, typer.Option("--no-tracking", help="Do without MLflow.")]
NoPredictions = Annotated[
    bool, typer.Option("--no-predictions", help="Do without predictions: nothing is traced, nothing rejected.")
]


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"brimful {version('brimful')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(  # smell: typer makes an option of each parameter
    spec: Spec,
    overrides: Overrides = None,
    home: Home = DEFAULT_HOME,
    pool: PoolName = None,
    address: Address = None,
    node_timeout: NodeTimeout = DEFAULT_NODE_TIMEOUT,
    new: Annotated[bool, typer.Option("--new", help="Archive a sweep of this name and start afresh.")] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Keep the trials of this name, go on with this spec.")
    ] = False,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
    trials: Annotated[int | None, typer.Option(min=1, help="Budget: this many trials.")] = None,
    time: Annotated[str | None, typer.Option(help="Budget: this long, e.g. 10m or 2h.")] = None,
    allow_remote_code: AllowRemoteCode = False,
    no_predictions: NoPredictions = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a sweep to its end. The same command again resumes it."""
    from orchestrator.cli.driving import RunRequest, run_spec

    words = [*(overrides or [])]
    words += [f"budget.trials={trials}"] if trials is not None else []
    words += [f"budget.time={time}"] if time is not None else []
    words += [f"tracking.uri={tracking_uri}"] if tracking_uri is not None else []
    words += ["tracking.enabled=false"] if no_tracking else []
    waits_s = parse_duration(node_timeout)
    request = RunRequest(home, pool, address, allow_remote_code, as_json, quiet, not no_predictions, waits_s)
    raise typer.Exit(run_spec(spec, tuple(words), request, new=new, extend=extend))


@app.command(cls=OutsideCommand)
def resume(  # smell: typer makes an option of each parameter
    name: Name,
    home: Home = DEFAULT_HOME,
    pool: PoolName = None,
    address: Address = None,
    node_timeout: NodeTimeout = DEFAULT_NODE_TIMEOUT,
    allow_remote_code: AllowRemoteCode = False,
    no_predictions: NoPredictions = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a sweep from its stored spec: finished trials stay, interrupted ones run again."""
    from orchestrator.cli.driving import RunRequest, resume_sweep

    waits_s = parse_duration(node_timeout)
    request = RunRequest(home, pool, address, allow_remote_code, as_json, quiet, not no_predictions, waits_s)
    raise typer.Exit(resume_sweep(name, request))


@app.command()
def submit(  # smell: typer makes an option of each parameter
    spec: Spec,
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option(envvar=["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"], help="The cluster's Ray dashboard.")
    ] = "http://127.0.0.1:8265",
    remote_home: Annotated[
        str, typer.Option(envvar="BRIMFUL_REMOTE_HOME", help="The home in the cluster, where all nodes see it.")
    ] = "~/.brimful",
    remote_python: Annotated[str, typer.Option(help="What runs Brimful in the cluster.")] = "python",
    working_dir: Annotated[Path | None, typer.Option(help="A folder to send along whole.")] = None,
    no_files: Annotated[
        bool, typer.Option("--no-files", help="The cluster sees the paths that the spec names; send the spec alone.")
    ] = False,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable there; no secrets.")] = None,
    submission_id: Annotated[str | None, typer.Option(help="The job's id instead of one that Ray makes.")] = None,
    entrypoint_num_cpus: Annotated[float | None, typer.Option(min=0, help="CPUs that the driver holds.")] = None,
    entrypoint_resources: Annotated[str | None, typer.Option(help="JSON of resources that the driver holds.")] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="End as soon as it is sent.")] = False,
    headers: Annotated[str | None, typer.Option(help="JSON of HTTP headers for the dashboard.")] = None,
    verify: Annotated[str, typer.Option(help="Check the certificate: true, false or a CA file.")] = "true",
    insecure: Annotated[bool, typer.Option("--insecure", help="No warning of a token in clear text.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Archive a sweep of this name and start afresh.")] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Keep the trials of this name, go on with this spec.")
    ] = False,
    no_predictions: NoPredictions = False,
    allow_remote_code: AllowRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Run a sweep inside a cluster, from anywhere; it goes on when this command ends."""
    from orchestrator.cli.remote import Remote, parse_headers, parse_verify
    from orchestrator.cli.submit import Submission, submit_spec

    flags = {
        "--new": new,
        "--extend": extend,
        "--no-predictions": no_predictions,
        "--allow-remote-code": allow_remote_code,
    }
    words = tuple(flag for flag, is_set in flags.items() if is_set)
    remote = Remote(address, remote_home, remote_python, insecure, parse_headers(headers), parse_verify(verify))
    submission = Submission(
        words, tuple(env or ()), not no_wait, as_json, allow_remote_code, working_dir, submission_id,
        entrypoint_num_cpus, entrypoint_resources, not no_files,
    )  # fmt: skip
    raise typer.Exit(submit_spec(spec, tuple(overrides or ()), remote, submission))


@app.command()
def plan(
    spec: Spec,
    overrides: Overrides = None,
    home: Home = DEFAULT_HOME,
    pool: PoolName = None,
    allow_remote_code: AllowRemoteCode = False,
    no_predictions: NoPredictions = False,
    as_json: AsJson = False,
) -> None:
    """Say what `run` would try, reject and leave out, with predicted memory, speed and cost. Starts no trial."""
    from orchestrator.cli.planning import PlanRequest, plan_spec

    plan_spec(spec, tuple(overrides or ()), PlanRequest(home, pool, allow_remote_code, not no_predictions), as_json)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def estimate(context: typer.Context) -> None:
    """Predict one run's memory and speed without a device, and say what would make it fit."""
    from orchestrator.cli.estimate_options import run as run_estimate

    run_estimate(context.args)


@app.command()
def validate(
    spec: Spec,
    overrides: Overrides = None,
    home: Home = DEFAULT_HOME,  # every verb takes it
    allow_remote_code: AllowRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Check a spec by itself: no model, no data, no cluster."""
    from orchestrator.cli.planning import validate_spec

    validate_spec(spec, tuple(overrides or ()), allow_remote_code, as_json)


@app.command(cls=OutsideCommand)
def status(
    name: OptionalName = None,
    home: Home = DEFAULT_HOME,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the sweep is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where a sweep stands: state, trials done, how many fit or ran out, the best, time left."""
    if watch:
        if name is None or as_json:
            raise typer.BadParameter("--watch goes with the name of one sweep and without --json")
        from orchestrator.cli.watching import watch_status

        return watch_status(name, home)
    from orchestrator.cli.reading import show_status

    show_status(name, home, as_json)


@app.command("list", cls=OutsideCommand)
def list_sweeps(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """All sweeps, a line each."""
    from orchestrator.cli.reading import show_status

    show_status(None, home, as_json)


@app.command(cls=OutsideCommand)
def trials(name: Name, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Every trial of a sweep with its configuration and what became of it."""
    from orchestrator.cli.reading import show_trials

    show_trials(name, home, as_json)


@app.command(cls=OutsideCommand)
def best(name: Name, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """The fastest trial that fits. Exit code 3 when none does."""
    from orchestrator.cli.reading import show_best

    raise typer.Exit(show_best(name, home, as_json))


@app.command(cls=OutsideCommand)
def logs(  # smell: typer makes an option of each parameter
    name: Name,
    trial: Annotated[int | None, typer.Argument(metavar="[TRIAL]", help="Without it the latest trial.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which rank of the trial.")] = 0,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; without it the last.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the trial ends.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """What a rank of a trial printed."""
    from orchestrator.cli.rank_logs import LogRequest, show_log

    show_log(LogRequest(name, trial, rank, attempt, tail, follow), home, as_json)


@app.command(cls=OutsideCommand)
def stop(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the driver has ended.")] = True,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Ask the running driver to stop. What runs is cancelled; `resume` runs it again."""
    from orchestrator.cli.ending import stop_sweep

    stop_sweep(name, home, wait, as_json)


@app.command(cls=OutsideCommand)
def report(
    name: Name,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a file: .md, .html or .json.")] = None,
    format: Annotated[
        str | None, typer.Option(metavar="terminal|markdown|html|json", help="Without it from the file's name.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """The whole report of a sweep."""
    from orchestrator.cli.reporting import show_report

    show_report(name, home, output, format, as_json)


@app.command(cls=OutsideCommand)
def export(
    name: Name,
    trial: Annotated[int | None, typer.Option(help="This trial instead of the best.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; without it NAME-trial-N here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files in an existing folder.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Write what it takes to train with the winner outside Brimful: configs, a script and its launch line."""
    from orchestrator.cli.reporting import export_trial

    export_trial(name, home, trial, output, force, as_json)


@app.command()
def sync(name: Name, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Bring MLflow up to date with a sweep's records."""
    from orchestrator.cli.tracking import sync_sweep

    sync_sweep(name, home, as_json)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Open the results in MLflow, on this machine only."""
    from orchestrator.cli.tracking import serve_ui

    raise typer.Exit(serve_ui(home, port, browser, as_json))


@app.command()
def doctor(
    home: Home = DEFAULT_HOME,
    address: Address = None,
    tracking_uri: TrackingUri = None,
    pool: PoolName = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, Ray, tracking and the home folder. Exit code 1 when something blocks a run."""
    from orchestrator.cli.doctor import examine

    raise typer.Exit(examine(home, address, tracking_uri, pool, as_json))


clusters = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Cluster profiles: write, list and show them.")
app.add_typer(clusters, name="cluster")


@clusters.command()
def inspect(
    address: Address = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile to this file.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The profile's name; without it from the file, else `cluster`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    home: Home = DEFAULT_HOME,  # every verb takes it
    as_json: AsJson = False,
) -> None:
    """Write the profile of a running Ray cluster, or without --address of this machine."""
    from orchestrator.cli.clusters import InspectRequest, inspect_cluster

    inspect_cluster(InspectRequest(address, output, name, force), as_json)


@clusters.command("list")
def list_clusters(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the profiles are.")] = Path("clusters"),
    home: Home = DEFAULT_HOME,  # every verb takes it
    as_json: AsJson = False,
) -> None:
    """The profiles of a folder, a line each."""
    from orchestrator.cli.clusters import show_profiles

    show_profiles(folder, as_json)


@clusters.command()
def show(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="The profile's YAML file.")],
    home: Home = DEFAULT_HOME,  # every verb takes it
    as_json: AsJson = False,
) -> None:
    """What a profile says: devices, memory as built and as one can have it, links, price, and how it comes up."""
    from orchestrator.cli.clusters import show_profile

    show_profile(profile, as_json)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where the spec goes.")] = Path("sweep.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    home: Home = DEFAULT_HOME,  # every verb takes it
    as_json: AsJson = False,
) -> None:
    """Write a commented example spec."""
    from orchestrator.cli.example import write_example

    write_example(file, force, as_json)


@app.command(cls=OutsideCommand)
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Remove a sweep's folder and say what that frees."""
    from orchestrator.cli.ending import delete_sweep

    delete_sweep(name, home, yes, as_json)
