#!/usr/bin/env bash
# The GPU tests of attention under every tool of NVIDIA's compute-sanitizer:  bash scripts/sanitize.sh [pytest arguments]
#
# Needs a GPU, compute-sanitizer on PATH (it comes with the CUDA toolkit), and an environment with the test extra:
# NBKERNELS_PYTHON names its interpreter (default: python3). TOOLS chooses among the tools, JOBS how many tests run at once.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${NBKERNELS_PYTHON:-python3}"
tests=("$@")
if [ $# = 0 ]; then
    tests=(tests/test_attention.py tests/test_attention_packed.py tests/test_decode.py tests/test_paged.py tests/test_kv_cache.py)
fi
status=0
for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
    # a query that the driver refuses is no fault of a kernel: an attribute that an older driver lacks, say
    options=(--tool "$tool" --target-processes all --report-api-errors no --error-exitcode 9 --print-limit 20)
    PYTHONPATH="$PWD:$PWD/tests:${PYTHONPATH:-}" compute-sanitizer "${options[@]}" \
        "$python" -m pytest -q --numprocesses "${JOBS:-8}" -p no:cacheprovider -k "cuda and not sm_80 and not sm_90a" "${tests[@]}" \
        || { echo "$tool: failed"; status=1; }
done
exit $status
