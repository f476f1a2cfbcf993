"""Measured choices between plans: kept on disk for a GPU, its driver and a kernel's source, and looked up at each launch.

A kernel file lists candidates, Plans that give the same bits as the heuristic's and differ in speed. Its ``run`` asks ``choose``
which to take: the one that was measured to be fastest for such a call on this GPU, else the heuristic's. ``profiling.tune``
measures. On the emulator, and where nothing is kept, the heuristic holds.

One file a GPU and driver. It is written anew and renamed into its place by one process at a time, so that a reader finds a whole
one, and of two that write at once neither loses what the other kept. What is damaged or of other sources counts as not there.
"""

import hashlib
import json
import os
import re
import tempfile
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from nbkernels.launch.compile import cache_folder, source_digest
from nbkernels.launch.device import driver_version

_forced = ContextVar("nbkernels_forced_plan", default=None)
_asked = ContextVar("nbkernels_asked_plans", default=None)


def described(plan):
    """A Plan as text that stays the same from one process to another."""
    constants = ", ".join(str(constant) for constant in plan.constants)
    return f"{plan.factory.__name__}({constants}) grid {plan.grid} block {plan.block} shared {plan.shared_bytes}"


def choose(call, heuristic, candidates, device):
    """The Plan to launch for a call on a Device.

    call: what was asked for, as text that with the heuristic's Plan says all that a choice may depend on. candidates(): Plans
    that could be taken instead, with the same bits.
    """
    asked, forced = _asked.get(), _forced.get()
    if asked is not None:
        asked.setdefault((call, heuristic), candidates())
    if forced is not None:
        return forced.get((call, heuristic), heuristic)
    if device.kind != "cuda":
        return heuristic
    kept = _kept(device.name)
    if not kept:
        return heuristic
    entry = kept.get(_key(call, heuristic))
    if entry is None or entry.get("sources") != source_digest(heuristic.factory.__module__):
        return heuristic
    return next((plan for plan in candidates() if described(plan) == entry.get("plan")), heuristic)


@contextmanager
def asked():
    """Yields a dict that fills with {(call, heuristic): candidates} of the choices that are made inside, in this thread."""
    token = _asked.set({})
    try:
        yield _asked.get()
    finally:
        _asked.reset(token)


@contextmanager
def forced(choices):
    """Take other Plans inside, in this thread: {(call, heuristic): Plan}; the heuristic's where there is none."""
    token = _forced.set(choices)
    try:
        yield
    finally:
        _forced.reset(token)


# ---- kept on disk --------------------------------------------------------------------------------------------------------


def results_path(gpu):
    """The file of a GPU's choices, by its name and the driver's version."""
    name = re.sub(r"\W+", "-", gpu.lower()).strip("-")
    major, minor = driver_version()
    return cache_folder() / "tuning" / f"{name}-cuda-{major}.{minor}.json"


def keep(gpu, call, heuristic, plan, figures):
    """Keep a choice on disk: that for such a call ``plan`` is the fastest; figures: a dict that says by how much.

    OSError where the cache folder cannot be written.
    """
    path = results_path(gpu)
    entry = {**figures, "plan": described(plan), "sources": source_digest(heuristic.factory.__module__)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        choices = read(path)
        choices[_key(call, heuristic)] = entry
        _write(path, choices)
    _kept.cache_clear()


def read(path):
    """The choices in a file; none where it is not there or damaged."""
    try:
        content = json.loads(Path(path).read_text())
        choices = content["choices"]
        whole = content["sha256"] == _digest(choices) and all(type(entry) is dict for entry in choices.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return choices if whole else {}


@cache
def _kept(gpu):
    return read(results_path(gpu))


def _key(call, heuristic):
    return f"{call} | {described(heuristic)}"


def _digest(choices):
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()


def _write(path, choices):
    content = json.dumps({"sha256": _digest(choices), "choices": choices}, indent=1, sort_keys=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


@contextmanager
def _locked(path):
    """One process at a time is inside, for one path. Where the system has no such lock the file is whole all the same."""
    try:
        import fcntl
    except ImportError:  # not a Unix system: of two that write at once one may lose its choice
        yield
        return
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file gives it back
