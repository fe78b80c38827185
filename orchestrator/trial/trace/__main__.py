"""`python -m orchestrator.trial.trace DIR`: read DIR/trace.json, write DIR/profile.npz or DIR/error.json."""

import argparse
import os
import sys
from pathlib import Path

from orchestrator.contract.errors import EXIT_OK, EXIT_USAGE
from orchestrator.contract.handoff import read_model, write_atomic
from orchestrator.contract.profile import PROFILE_FILE, TRACE_FAILURE_FILE, TRACE_FILE, TraceFailure, TraceRequest


def main() -> int:
    """Exit codes: 0 the profile is written, 2 the request has to change."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.trial.trace",
        description="Read each DIR/trace.json and write DIR/profile.npz, or DIR/error.json when it cannot be traced.",
    )
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="+", help="a trace's folder")
    # it serves models without data: a device would only be looked for
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    directories = parser.parse_args().directories
    return max(_trace(directory) for directory in directories)


def _trace(directory: Path) -> int:
    from orchestrator.trial.trace.profile import make_profile
    from orchestrator.trial.unusable import Unusable

    request = read_model(directory / TRACE_FILE, TraceRequest)
    try:
        profile = make_profile(request)
    except Unusable as error:
        failure = TraceFailure(field=error.field, message=str(error))
        write_atomic(directory / TRACE_FAILURE_FILE, failure.model_dump_json(indent=1))
        print(f"{error.field}: {error}", file=sys.stderr)
        return EXIT_USAGE
    part = directory / f"{PROFILE_FILE}.part"
    part.write_bytes(profile.to_bytes())
    part.replace(directory / PROFILE_FILE)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
