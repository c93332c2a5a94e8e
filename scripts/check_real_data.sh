#!/usr/bin/env bash
# Every group of the real files at its full length, on 2 and 4 ranks: log-probs of augtree within 1e-4 of
# ring's, in bounded memory. Not part of test.sh. The files are in $AUGTREE_DATA (default ../shared/data, from
# the root). Arguments go to check_real_data.py, for instance:
#
#     bash scripts/check_real_data.sh --longest 2
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. scripts/env.sh || exit 1

data=${AUGTREE_DATA:-../shared/data}
files=("$data"/{tau_airline,gsm8k_solutions,kv_retrieval_75}.jsonl.gz)
failed=0
for ranks in 2 4; do
    torchrun --standalone --nproc-per-node "$ranks" scripts/check_real_data.py --data "${files[@]}" "$@" ||
        failed=$((failed + 1))
done
if [ "$failed" -gt 0 ]; then
    echo "check_real_data: FAILED on $failed of 2 numbers of ranks after $SECONDS s"
    exit 1
fi
echo "check_real_data: log-probs of augtree and ring agree on 2 and 4 ranks; $SECONDS s"
