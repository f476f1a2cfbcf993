# Sourced by demo.sh, learn.sh and test.sh: makes a virtual environment with this package and some extras, once.
#
#   ensure_environment FOLDER EXTRAS    sets PYTHON to its interpreter
#
# The environment is kept in FOLDER, with a stamp that names what it was made from; it is made again when that changes.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cache="${NBKERNELS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/nbkernels}"

fail() {
    echo "error: $*" >&2
    exit 1
}

# The first Python of version 3.11 to 3.13 on the PATH.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 was found on the PATH: install one and try again"
}

ensure_environment() {
    local folder="$1" extras="$2" base stamp
    base="$(find_python)" || exit 1
    stamp="$("$base" - "$repository" "$extras" <<'PY'
import hashlib, pathlib, sys
repository, extras = sys.argv[1:]
content = pathlib.Path(repository, "pyproject.toml").read_bytes()
print(hashlib.sha256(content + extras.encode() + sys.version.encode() + repository.encode()).hexdigest())
PY
)" || fail "$base does not run"
    PYTHON="$folder/bin/python"
    if [ -x "$PYTHON" ] && [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    echo "making an environment in $folder (once)" >&2
    rm -rf "$folder"
    mkdir -p "$(dirname "$folder")" || fail "export NBKERNELS_CACHE=/a/folder/that/can/be/written and try again"
    "$base" -m venv "$folder" >&2 || fail "python -m venv failed: on Debian and Ubuntu, apt install python3-venv"
    "$PYTHON" -m pip install --disable-pip-version-check --progress-bar on -e "$repository[$extras]" >&2 ||
        fail "pip could not install the package: see above; are you online?"
    echo "$stamp" >"$folder/stamp"
}
