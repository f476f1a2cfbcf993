"""The lessons: each runs, draws what the emulator counted, and its page is the checked-in one; the exercises and their check."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from lesson_mistakes import MISTAKES

from nbkernels.emulator.counters import Counters, Counts
from nbkernels.learn import learn_command

ROOT = Path(__file__).parent.parent
LESSONS = ROOT / "scripts" / "lessons"
if not LESSONS.is_dir():
    pytest.skip("the lessons stand beside the package in a checkout", allow_module_level=True)
sys.path[:0] = [str(LESSONS), str(LESSONS / "exercises")]

import check  # noqa: E402
import lesson  # noqa: E402
import pictures  # noqa: E402

FILES = lesson.files()
EXERCISES = sorted(check.tasks())


# ---- lessons ------------------------------------------------------------------------------------------------------------


def structure(page):
    """A page without what is measured: every number is one #, so that pages of two compilers are alike."""
    text = re.sub(r"\d[\d.,e+-]*%?", "#", page)
    return re.sub(r"[ -]{2,}", " ", re.sub(r", # bytes spilled|\((threads|blocks|registers|shared memory)\)", "", text))


def drawn(svg, kind):
    """How many shapes of a kind a picture holds."""
    return len(re.findall(rf'class="{kind}"', svg))


@pytest.fixture(scope="module", params=sorted(FILES))
def performed(request, tmp_path_factory):
    """A lesson that has been run: (number, its Session, the folder of its page)."""
    folder = tmp_path_factory.mktemp("page")
    return request.param, lesson.perform(FILES[request.param], folder, quiet=True, gpu=False), folder


def test_a_lesson_runs_and_its_page_is_the_one_that_is_checked_in(performed):
    number, session, folder = performed
    name = f"{FILES[number].stem}.md"
    page = (folder / name).read_text()
    kept = LESSONS / "pages" / name
    assert kept.exists() and structure(kept.read_text()) == structure(page), "python scripts/lessons/make_pages.py"
    for file in re.findall(r"\]\((\S+\.svg)\)", page):
        assert (kept.parent / file).exists(), file
    assert len(session.steps) >= 3 and session.pictures
    assert any(step.title.startswith("nbk.") for step in session.steps), "it ends in a kernel of the package"


def test_pictures_show_what_the_emulator_counts(performed):
    _, session, _ = performed
    for file, svg in session.pictures:
        ElementTree.fromstring(svg)
        if getattr(svg, "access", None) is None:
            continue
        lanes, offsets, size = svg.access
        counts = Counts()
        claims = dict(re.findall(r'data-(\w+)="(\d+)"', svg.splitlines()[0]))
        if "passes" in claims:
            Counters._count_shared(counts, lanes, offsets, size)
            assert int(claims["passes"]) == counts.shared_passes, file
            stacks = {}
            for bank, word in re.findall(r'class="word" data-bank="(\d+)" data-word="(\d+)"', svg):
                stacks.setdefault(bank, set()).add(word)
            if size <= 4:
                assert max(map(len, stacks.values())) == counts.shared_passes, file
        else:
            Counters._count_global(counts, lanes, offsets, size, "read")
            assert int(claims["sectors"]) == drawn(svg, "sector") == counts.sectors, file


# thread of element (row, column), by the PTX ISA's formulas for m16n8k16 and for wgmma's accumulator
FRAGMENTS = {
    "09_tensor_cores_a.svg": (16 * 16, lambda row, column: row % 8 * 4 + column % 8 // 2),
    "09_tensor_cores_b.svg": (8 * 16, lambda row, column: row * 4 + column % 8 // 2),
    "09_tensor_cores_d.svg": (16 * 8, lambda row, column: row % 8 * 4 + column // 2),
    "12_wgmma_and_bulk_copies_fragment.svg": (
        64 * 16,
        lambda row, column: row // 16 * 32 + row % 8 * 4 + column % 8 // 2,
    ),
}


def test_pictures_of_fragments_and_bars_show_what_they_say(performed):
    _, session, _ = performed
    for file, svg in session.pictures:
        if file in FRAGMENTS:
            elements, owner = FRAGMENTS[file]
            boxes = re.findall(r'class="owned" data-row="(\d+)" data-column="(\d+)" data-thread="(\d+)"', svg)
            assert len(boxes) == elements
            assert all(int(thread) == owner(int(row), int(column)) for row, column, thread in boxes), file
        drawn_bars = re.findall(r'width="([\d.]+)"[^>]*class="bar"[^>]*data-value="(\d+)"', svg)
        longest = max((int(value) for _, value in drawn_bars), default=1)
        for width, value in drawn_bars:
            assert float(width) == pytest.approx(max(1, 360 * int(value) / longest), abs=0.1), file
        for label, value in re.findall(r'data-label="([^"]+)" data-value="(\d+)"', svg):
            step = next((s for s in session.steps if s.title == label), None)
            if step and "sectors of global memory" in svg:
                assert int(value) == step.sectors, (file, label)


@pytest.mark.parametrize(("width", "passes"), [(32, 32), (33, 1), (34, 2), (36, 4)])
def test_a_bank_map_agrees_with_the_emulator_on_every_access(width, passes):
    transposing = lesson.definitions(3)
    launch = transposing.transposing(32, 32)
    done = lesson.run(transposing.tiled_kernel, (width,), launch)
    reads = [a for a in done.accesses if a.space == "shared" and a.mode == "read"]
    drawn_passes = {int(re.search(r'data-passes="(\d+)"', pictures.bank_map([a], ""))[1]) for a in reads}
    warps = sum(len(set(a.warps.tolist())) for a in reads)
    assert drawn_passes == {passes} and sum(a.passes for a in reads) == passes * warps


def test_a_step_that_is_wrong_is_an_error():
    adding = lesson.definitions(1)
    launch = adding.adding(4, 256, 1000)
    launch.want["z"] = launch.want["z"] + 1
    with pytest.raises(AssertionError, match="relative error"):
        lesson.step("wrong", adding.add_kernel, lambda: launch)


def test_a_lesson_is_a_program(tmp_path):
    done = subprocess.run(
        [sys.executable, FILES[1], "--page", tmp_path, "--no-gpu"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "sectors of 32 bytes" in done.stdout and list(tmp_path.glob("*.svg"))


def test_times_of_the_lesson_and_of_the_package_stand_side_by_side(monkeypatch, capsys):
    """What a lesson does where a GPU is, with the emulator in the GPU's place and times that are given."""
    real = lesson.nbk.device
    times = iter([30.0, 20.0])

    def timed(call):
        call()
        return next(times)

    monkeypatch.setattr(lesson.nbk, "device", lambda kind, arch=lesson.ARCH: real("emulator", arch=arch))
    monkeypatch.setattr(lesson, "microseconds", timed)
    monkeypatch.setattr(lesson, "_copy_speed", lambda: 1e9)
    session = lesson.Session(gpu=False)
    session.gpu = lesson.resolve("emulator", arch=lesson.ARCH)
    monkeypatch.setattr(lesson, "_session", session)
    shuffles = lesson.definitions(4)
    size = (8, 256)
    launch = shuffles.softmax_launch(4, 128)
    own = lesson.step("own", shuffles.warp_a_row_kernel, launch, small=size, large=size)
    right = lambda rows, columns: shuffles.softmax(lesson.normal(rows, columns))  # noqa: E731
    lesson.operation("nbk.softmax", shuffles.package_softmax, right, small=size, large=size, beside=own)
    said = capsys.readouterr().out
    assert "30.0 µs" in said and "the lesson's own, 'own': 30.0 µs, 1.50 times as long" in said
    lesson.compare()
    assert "of a copy's speed" in capsys.readouterr().out


# the lessons of which a kernel does what an operation of the package does
BESIDE = (4, 5, 6, 7, 8, 10, 11, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("number", sorted(FILES))
def test_a_lesson_times_its_steps_on_a_gpu(number, tmp_path):
    """And the package's operation; ``pytest tests/test_lessons.py -m gpu -s`` shows the figures."""
    session = lesson.perform(FILES[number], tmp_path, gpu=True)
    page = (tmp_path / f"{FILES[number].stem}.md").read_text()
    skipped = number == 12 and session.gpu.arch != "sm_90a"
    assert ("times as long" in page) == (number in BESIDE and not skipped)
    timed = [step for step in session.steps if step.microseconds is not None]
    assert all(step.microseconds > 0 and step.share > 0 for step in timed)
    if number != 13 and not skipped:  # lesson 13 times a graph against single launches
        assert any(step.title.startswith("nbk.") for step in timed)
    else:
        assert "as a graph" in page or skipped


# ---- the command --------------------------------------------------------------------------------------------------------


def learn(*arguments):
    """``nbkernels learn …`` -> (status, what it printed)."""
    done = subprocess.run(
        [sys.executable, "-m", "nbkernels.cli", "learn", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr


def test_learn_lists_checks_hints_and_remembers(tmp_path, monkeypatch):
    monkeypatch.setenv("NBKERNELS_CACHE", str(tmp_path))
    status, said = learn()
    assert status == 0 and all(lesson.title(path) in said for path in FILES.values())
    status, said = learn("check", "1")
    assert status == 1 and "a race between" in said
    hints = [learn("check", "1", "--hint")[1] for _ in range(2)]
    assert "hint 1 of" in hints[0] and "hint 2 of" in hints[1]
    status, said = learn("check", "1", "--file", str(check.path_of(1, solution=True)))
    assert status == 0 and "right" in said
    assert "solved" in learn()[1]
    assert learn("open", "1")[1].strip().splitlines()[0].endswith("01_threads_and_a_grid.md")


@pytest.mark.parametrize("arguments", [("99",), ("check",), ("open", "x")])
def test_learn_says_what_it_takes(arguments):
    status, said = learn(*arguments)
    assert status == 2 and "wanted N, open N or check N" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("1", "--hint"), "--hint: wanted with learn check N only"),
        (("check", "1", "--page", "x"), "--page: wanted with learn N only"),
        (("check", "1", "--file", "/nowhere.py"), "--file: /nowhere.py is not a file"),
    ],
)
def test_learn_says_what_an_option_is_for(arguments, said):
    status, err = learn(*arguments)
    assert status == 2 and said in err and err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    status, said = learn("1", "--page", str(tmp_path / "file" / "pages"))
    assert status == 1 and "--page FOLDER" in said and "Traceback" not in said


def test_learn_elsewhere_says_where_the_lessons_are(monkeypatch):
    monkeypatch.setattr("nbkernels.learn.FOLDER", Path("/nowhere"))
    with pytest.raises(FileNotFoundError, match="clone it"):
        learn_command(None)


# ---- exercises ----------------------------------------------------------------------------------------------------------


def answer(number, tmp_path, changes=()):
    """A file with the solution of an exercise, changed."""
    solution = check.path_of(number, solution=True)
    text = solution.read_text()
    for old, new in changes:
        assert old in text, f"{solution.name} has no {old!r}"
        text = text.replace(old, new)
    path = tmp_path / solution.name
    path.write_text(text)
    return path


@pytest.mark.parametrize("number", EXERCISES)
def test_an_exercise_as_handed_out_fails_as_promised_and_its_solution_passes(number):
    said = check.check(number)
    assert said is not None and check.tasks()[number].promise in said
    assert check.check(number, check.path_of(number, solution=True)) is None


@pytest.mark.parametrize("number", EXERCISES)
def test_common_wrong_answers_are_named(number, tmp_path):
    assert len(MISTAKES[number]) >= 10
    wrong = []
    for old, new, message in MISTAKES[number]:
        said = check.check(number, answer(number, tmp_path, [(old, new)]))
        if said is None or message not in said:
            wrong.append(f"{new!r}: wanted {message!r}, got {said!r}")
    assert not wrong, "\n".join(wrong)
