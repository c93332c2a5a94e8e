#!/usr/bin/env bash
# The demo: a small model learns by GRPO to read long prompts, on two CPU ranks; then ring context parallelism
# replays its first steps and has to agree. A few minutes. Results go to demo_out/, or to the folder given.
#
#     bash scripts/demo.sh [FOLDER]
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../demo_out}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh
began=$SECONDS
two_ranks() {
    torchrun --standalone --nproc-per-node 2 -m "$@" --out "$out"
}

two_ranks examples.grpo.train
two_ranks examples.grpo.verify

echo
echo "What was proven, in $((SECONDS - began)) s:"
python -m examples.grpo.report --out "$out"
