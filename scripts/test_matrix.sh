#!/usr/bin/env bash
# Lint and tests under every megatron-core release that requirements/ names, each in an environment of its
# own (scripts/env.sh), and a line for each release at the end. Arguments go to pytest:
#
#     bash scripts/test_matrix.sh -k binding
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log=$(mktemp -t augtree-matrix.XXXXXX) || exit 1
trap 'rm -f "$log"' EXIT
failed=0 lines=()
for file in requirements/megatron-core-*.txt; do
    release=${file#requirements/megatron-core-} release=${release%.txt} began=$SECONDS
    printf '\n== megatron-core %s\n' "$release"
    AUGTREE_MEGATRON=$release bash scripts/test.sh "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    # pytest's last line: "3 failed, 870 passed in 33.15s"
    counts=$(tail -n 1 "$log" | grep -Eo '[0-9]+ (passed|failed|errors?|skipped)' | paste -sd, | sed 's/,/, /g')
    lines+=("megatron-core $release: ${counts:-no test ran}, exit code $code, $((SECONDS - began)) s")
    [ "$code" -eq 0 ] || failed=1
done
printf '\n'
printf '%s\n' "${lines[@]}"
exit "$failed"
