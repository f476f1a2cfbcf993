#!/usr/bin/env bash
# Lint and test, from nothing:  bash scripts/test.sh [pytest arguments]
#
# Makes an environment with everything the tests need (about 1 GB, once). Tests that need a GPU run where there is one and are
# reported as skipped elsewhere. NBKERNELS_PYTHON names an interpreter to use in place of that environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ -n "${NBKERNELS_PYTHON:-}" ]; then
    PYTHON="$NBKERNELS_PYTHON"
else
    ensure_environment "$cache/environments/test" "cu13,llm,test"
fi
cd "$repository"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# the golden tests read the demo's model; without a network they are skipped and say so
"$PYTHON" scripts/fetch_model.py >/dev/null || echo "the model could not be fetched: its tests will be skipped" >&2
"$PYTHON" scripts/fetch_vocabularies.py >/dev/null || echo "no tokenisation vectors: their tests will be skipped" >&2
# a worker a core; NumPy's own threads would only fight them
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
exec "$PYTHON" -m pytest --numprocesses auto "$@"
