#!/usr/bin/env bash
# The lessons, from nothing:  bash scripts/learn.sh            lists them
#                             bash scripts/learn.sh 1          runs the first, and says where its page and pictures are
#                             bash scripts/learn.sh check 1    checks your answer to its exercise (--hint for a hint)
#
# Makes an environment once: the compiler alone without a GPU, with the CUDA wheels where an NVIDIA driver is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

extras="learn"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    extras="cu13,learn"
fi
ensure_environment "$cache/environments/learn" "$extras"
exec "$PYTHON" -m nbkernels.cli learn "$@"
