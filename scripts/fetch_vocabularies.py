"""Bring published tokenisation vectors into the user's cache folder: vocabularies, texts, and the ids that they must give.

They are in the source distribution of llama-cpp-python (MIT), of which only those files are kept (75 MB). Does nothing
where they are there. The download goes through pip, so that the user's own index settings hold.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from nbkernels.launch.compile import cache_folder

PACKAGE = "llama-cpp-python==0.3.36"
WANTED = re.compile(r"[^/]+/vendor/llama\.cpp/models/(ggml-vocab-[\w.-]+\.gguf(\.inp|\.out)?)")


def fetch():
    """The folder of the vectors, downloaded where it is missing. SystemExit with the reason where they can't be had."""
    target = cache_folder() / "vocabularies"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {PACKAGE}'s source (77 MB, once) for its vocabularies", file=sys.stderr)
    # beside the target, so that the last step is a rename within one file system
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        folder = Path(folder)
        options = ["--no-deps", "--no-binary", "llama-cpp-python", "--disable-pip-version-check", "-d", folder]
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        finished = subprocess.run(command, stdout=sys.stderr, check=False)
        sources = list(folder.glob("*.tar.gz"))
        if finished.returncode or not sources:
            sys.exit(f"fetch_vocabularies: pip could not download {PACKAGE}; are you online?")
        partial = folder / "vocabularies"
        partial.mkdir()
        with tarfile.open(sources[0]) as archive:
            for member in archive:
                named = WANTED.fullmatch(member.name)
                if named and member.isfile():
                    with open(partial / named[1], "wb") as destination:
                        shutil.copyfileobj(archive.extractfile(member), destination)
        if not any(partial.glob("*.inp")):
            sys.exit(f"fetch_vocabularies: {sources[0].name} holds no vectors")
        os.replace(partial, target)
    return target


if __name__ == "__main__":
    print(fetch())
