#!/usr/bin/env bash
# Exported by brimful 0.1.0: sweep quickstart (s1), trial 4 (a label), candidate c0ffee.
# Measured 1,500 tokens/s without padding (95 % interval 1,485 to 1,515) and a peak of 700.00 MiB of 1.00 GiB allowed
#   per rank on 2 x Test CPU, 2 cores.
# Global batch 8 = micro-batch 2 x accumulation 2 x 2 ranks.
# Versions: brimful 0.1.0, torch 2.13.0, transformers 5.24.0. Other versions may run at another speed or need other
#   memory.
#
# One node: bash launch.sh [--max-steps N] [--output FOLDER]
# Several: on each of them, NNODES=2 NPROC_PER_NODE=1 RDZV_ENDPOINT=first-node:29400 bash launch.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export DS_ACCELERATOR=cpu
export MALLOC_ARENA_MAX=1
export OMP_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false
if [ -n "${RDZV_ENDPOINT:-}" ]; then
    rendezvous=(--rdzv-id "quickstart-4" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT")
else
    rendezvous=(--standalone)
fi
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-2}" "${rendezvous[@]}" train.py "$@"
