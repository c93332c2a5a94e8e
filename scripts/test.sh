#!/usr/bin/env bash
# Lint and tests, in the environment of scripts/env.sh. Arguments go to pytest:
#
#     bash scripts/test.sh -k groups
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh
ruff check .
python -m pytest -q --durations=20 tests "$@"
