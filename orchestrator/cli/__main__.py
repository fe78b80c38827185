"""`python -m orchestrator.cli` is `brimful`."""

from orchestrator.cli import main

main()
