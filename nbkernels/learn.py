"""The command ``nbkernels learn``: the lessons of a checkout are listed, run and opened, and exercises checked.

The lessons are files under scripts/lessons, beside the package; they are no part of an installed wheel. What the learner has done
is kept with the package's other files (``launch.compile.cache_folder``), in learn.json.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from nbkernels.launch.compile import cache_folder

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "lessons"


def add_learn_arguments(parser):
    """The arguments of ``learn``."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help="nothing: list the lessons; N: run lesson N; open N; check N: check exercise N",
    )
    parser.add_argument("--hint", action="store_true", help="with check: the next hint in place of checking")
    parser.add_argument("--file", metavar="ANSWER", help="with check: an answer in another file")
    parser.add_argument("--page", metavar="FOLDER", help="with N: where the page and its pictures are written")


def learn_command(options):
    """List, run, open or check. Returns the exit status."""
    if not FOLDER.is_dir():
        raise FileNotFoundError(
            "the lessons are files of the repository and not of the installed package: clone it, and run this from there after "
            "pip install -e ."
        )
    what = options.what
    if not what:
        return _list()
    verb = what[0] if what[0] in ("run", "open", "check") else "run"
    rest = what[1:] if what[0] == verb else what
    if len(rest) != 1 or not rest[0].isdigit() or int(rest[0]) not in lessons():
        raise ValueError(f"learn {' '.join(what)}: wanted N, open N or check N, with N from 1 to {max(lessons())}")
    number = int(rest[0])
    for given, name, of in (
        (options.hint, "--hint", "check"),
        (options.file, "--file", "check"),
        (options.page, "--page", "run"),
    ):
        if given and verb != of:
            raise ValueError(f"{name}: wanted with learn {'check N' if of == 'check' else 'N'} only")
    if options.file and not Path(options.file).is_file():
        raise FileNotFoundError(f"--file: {options.file} is not a file")
    if verb == "check":
        extra = ["--hint"] if options.hint else []
        extra += ["--file", options.file] if options.file else []
        return subprocess.call([sys.executable, FOLDER / "exercises" / "check.py", str(number), *extra])
    if verb == "open":
        return _open(number)
    extra = ["--page", options.page] if options.page else []
    status = subprocess.call([sys.executable, lessons()[number], *extra])
    if status == 0:
        state = read_state()
        write_state({**state, "run": sorted({*state["run"], number})})
    return status


def lessons():
    """number -> path."""
    return {int(path.name[:2]): path for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}


def read_state():
    """What the learner has done: {"run": [numbers], "solved": [numbers], "hints": {number: how many were given}}."""
    try:
        kept = json.loads((cache_folder() / "learn.json").read_text())
    except (OSError, ValueError):
        kept = {}
    return {"run": [], "solved": [], "hints": {}, **(kept if isinstance(kept, dict) else {})}


def write_state(state):
    """Keep what the learner has done; where that cannot be kept it is forgotten."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        (cache_folder() / "learn.json").write_text(json.dumps(state))
    except OSError:
        return


def _list():
    from rich.console import Console
    from rich.table import Table

    state = read_state()
    table = Table.grid(padding=(0, 2))
    for number, path in lessons().items():
        title = re.search(r"^# # (.*)$", path.read_text(), re.MULTILINE)[1]
        done = [word for word, key in (("run", "run"), ("solved", "solved")) if number in state[key]]
        table.add_row(str(number), title, ", ".join(done))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "nbkernels learn 1 runs a lesson, learn open 1 shows its page, learn check 1 checks exercise 1 (--hint helps)"
    )
    return 0


def _open(number):
    """Open a lesson's page: the one of its last run here, else the checked-in one."""
    import webbrowser

    name = f"{lessons()[number].stem}.md"
    candidates = [cache_folder() / "lessons" / name, FOLDER / "pages" / name, lessons()[number]]
    page = next(path for path in candidates if path.exists())
    print(page)
    print(f"the lesson: {lessons()[number]}")
    exercise = FOLDER / "exercises" / lessons()[number].name
    if exercise.exists():
        print(f"its exercise: {exercise}")
    if sys.stdout.isatty():
        webbrowser.open(page.as_uri())
    return 0
