#!/usr/bin/env bash
# Text from a real model with one command:  bash scripts/demo.sh "The capital of France is"
#
# Makes an environment, fetches SmolLM2-135M-Instruct (93 MB) into your cache folder, and generates: on the GPU where an NVIDIA
# driver is there, else on the CPU. What follows the prompt goes to scripts/generate.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# the CUDA wheels (850 MB) are for machines that have a driver
extras="llm"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
    extras="cu13,llm"
fi
ensure_environment "$cache/environments/demo" "$extras"
"$PYTHON" "$repository/scripts/fetch_model.py" >/dev/null
[ $# -gt 0 ] || set -- "The capital of France is"
exec "$PYTHON" "$repository/scripts/generate.py" "$@"
