"""The emulator finds faults: the kept report of planted_faults.py is that of today's list, and a sample of it is run again."""

import json
import subprocess
import sys
from zlib import crc32

from planted_faults import FAULTS, HERE, REPORT

SAMPLE = 9  # one fault in so many


def report():
    return json.loads(REPORT.read_text())


def test_at_least_95_in_100_are_found():
    outcomes = report()
    assert len(outcomes) >= 60
    survivors = [o for o in outcomes if o["found"] not in ("check", "comparison")]
    assert len(survivors) <= 0.05 * len(outcomes), survivors
    assert all(o["found"] == "survived" and o["said"] != "no reason is known" for o in survivors), survivors


def test_the_report_is_that_of_the_list():
    listed = [{"name": f.name, "change": [f.old.strip(), f.new.strip()]} for f in FAULTS]
    assert [{k: o[k] for k in ("name", "change")} for o in report()] == listed, "run python tests/planted_faults.py"
    assert len({f.name for f in FAULTS}) == len(FAULTS)


def test_a_sample_is_found_again():
    found = {o["name"] for o in report() if o["found"] in ("check", "comparison")}
    names = [f.name for f in FAULTS if f.name in found and crc32(f.name.encode()) % SAMPLE == 0]
    assert names
    done = subprocess.run([sys.executable, HERE / "planted_faults.py", *names], capture_output=True, text=True)
    assert f"{len(names)} of {len(names)} found" in done.stdout, done.stdout + done.stderr
