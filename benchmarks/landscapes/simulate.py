"""Simulated landscapes of GPU clusters: what Brimful predicts of each configuration, and what a made-up machine does.

    python -m benchmarks.landscapes.simulate FOLDER [--seed 1] [--only NAME ...] [--cache .brimful/cache]

Nothing in these tables is measured. The prediction is Brimful's own bill and clock on the traced model; the truth is
the same work priced in another way, with non-idealities that the prediction does not know (`truth`): dips at single
micro-batches, saturation and fall-off, thrashing near the limit, overlap, shared PCIe switches, cliffs between nodes,
a biased bill, traps, noise. Equal seeds give equal tables.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.landscapes.clusters import CLUSTERS, Cluster
from benchmarks.landscapes.priors import Priced, precision_of, price
from benchmarks.landscapes.table import write_landscape
from benchmarks.landscapes.truth import Truth
from orchestrator.contract.units import GIB


def simulate(
    cluster: Cluster, seed: int, priced: Sequence[Priced], weights: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts and rows of the table."""
    limit_gib = cluster.limit_gib or cluster.device.usable_memory_bytes / GIB
    truth = Truth(cluster, seed, priced, limit_gib)
    device_gib, host_gib = truth.device_gib(), truth.host_gib()
    tokens_per_s = truth.tokens_per_s(device_gib)
    rows = []
    for number, each in enumerate(priced):
        kind = "gpu" if device_gib[number] > limit_gib else "host" if host_gib[number] > cluster.host_gib else ""
        rows.append(
            {
                **asdict(each.configuration),
                "feasible": int(not kind),
                "oom_kind": kind,
                "tokens_per_s": f"{tokens_per_s[number]:.2f}",
                "peak_gib": f"{device_gib[number]:.4f}",
                "host_gib": f"{host_gib[number]:.3f}",
                "prior_tokens_per_s": f"{each.tokens_per_s:.2f}",
                "prior_peak_gib": f"{each.device_gib:.4f}",
                "prior_host_gib": f"{each.host_gib:.3f}",
            }
        )
    facts = {
        "name": cluster.name,
        "kind": "simulated",
        "model": cluster.model,
        "hardware": f"{cluster.nodes}x{cluster.devices_per_node} {cluster.device_key}",
        "precision": precision_of(cluster),
        "seq": cluster.sequence_tokens,
        "global_sequences": cluster.global_sequences,
        "mem_limit_gib": round(limit_gib, 4),
        "host_limit_gib": float(cluster.host_gib),
        "noise": round(truth.noise, 4),
        "n_gpus": cluster.ranks,
        "params": weights,
        "seed": seed,
        "knobs": list(asdict(priced[0].configuration)),
    }
    return facts, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="clusters whose name holds one of these")
    parser.add_argument("--cache", type=Path, default=Path(".brimful/cache"), help="folder of traces")
    chosen = parser.parse_args(arguments)
    for cluster in CLUSTERS:
        if chosen.only and not any(part in cluster.name for part in chosen.only):
            continue
        priced, weights = price(cluster, chosen.cache)
        facts, rows = simulate(cluster, chosen.seed, priced, weights)
        fitting = sum(row["feasible"] for row in rows)
        if not fitting:
            print(f"{cluster.name}: with seed {chosen.seed} nothing fits; not written", file=sys.stderr)
            continue
        path = write_landscape(chosen.folder, facts, rows)
        print(f"{path}: {len(rows)} configurations, {fitting} of them fit", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
