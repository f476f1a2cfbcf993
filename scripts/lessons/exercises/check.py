"""Check an answer to an exercise: run it on the emulator with all checks, and say what is wrong in the learner's terms.

    python scripts/lessons/exercises/check.py 3            check exercises/03_….py (or: nbkernels learn check 3)
    python scripts/lessons/exercises/check.py 3 --hint     one hint more each time it is asked for
    python scripts/lessons/exercises/check.py 3 --file F   check another file

What is looked at, in this order: does it compile; does it do what no kernel may (touch memory beyond an array, race, deadlock,
read what nothing wrote); are the values right; is it as economical as the exercise asks. The first thing found is said.
"""

import argparse
import hashlib
import inspect
import re
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import lesson  # noqa: E402  it stands in the folder above

from nbkernels.emulator import Deadlock, EmulatorError, MemoryFault, RaceError, UninitialisedRead  # noqa: E402  # noqa: E402
from nbkernels.learn import read_state, write_state  # noqa: E402

WARP = lesson.WARP


def tasks():
    """number -> Task of each exercise."""
    import tasks as module

    return module.TASKS


def path_of(number, solution=False):
    """The file of an exercise, or of its solution."""
    folder = FOLDER / "solutions" if solution else FOLDER
    return next(folder.glob(f"{number:02}_*.py"))


def check(number, path=None):
    """None where the answer in a file is right, else what is wrong with it first, in words."""
    path = Path(path or path_of(number))
    task = tasks()[number]
    text = path.read_text()
    try:
        factory = _load(path, text)
    except Exception as error:
        return f"the file cannot be read: {type(error).__name__}: {error}"
    if factory is None:
        return f"no function in {path.name} ends in _kernel"
    checker = Checker(task, factory, text, path)
    for case in task.cases:
        found = checker.check_case(case)
        if found:
            return found
    return None


def _load(path, text):
    """The kernel factory of an answer. The module's name follows its text, so that a changed answer is compiled anew."""
    name = f"answer_{path.stem}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    module = lesson.module_of(path, name)
    exec(compile(text, str(path), "exec"), module.__dict__)
    found = [
        v for k, v in vars(module).items() if k.endswith("_kernel") and inspect.isfunction(v) and v.__module__ == name
    ]
    return found[-1] if found else None


class Checker:
    """Looks at one answer."""

    def __init__(self, task, factory, text, path):
        self.task, self.factory, self.text, self.path = task, factory, text, path
        self.lines = text.splitlines()

    def line(self, number):
        """A source line as it is quoted."""
        shown = self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""
        return f"line {number} (`{shown}`)"

    def check_case(self, case):
        """What is wrong with the answer on one case, or None."""
        constants, launch = case()
        try:
            for _ in range(self.task.launches):
                done = lesson.run(self.factory, constants, launch, self.task.arch)
                for name in launch.keep if self.task.launches > 1 else ():
                    launch.arguments[name] = done.results[name]
        except EmulatorError as error:
            return self.explain(error, launch, constants)
        except TypeError as error:
            return f"the kernel's parameters: {error}"
        except Exception as error:
            return self.explain_compiler(error)
        return self.compare(done, launch) or self.rules(done, launch, constants)

    # ---- what the compiler says -----------------------------------------------------------------------------------------

    def explain_compiler(self, error):
        """The last places and reasons of Numba's message, which is long."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        file = re.escape(self.path.name)
        place = re.findall(rf'{file}", line (\d+)', text) or re.findall(rf"{file} \((\d+)\)", text)
        reasons = [
            line.strip()
            for line in text.splitlines()
            if re.search(r"not defined|No implementation|Cannot unify|cannot|Unknown|has no|Invalid|must be", line)
        ]
        reasons += re.findall(r">>> (.*)", text)[:1]
        reason = (
            " ".join(reasons[:1] + reasons[-1:] if len(reasons) > 1 else reasons)
            if reasons
            else text.strip().splitlines()[0]
            if text.strip()
            else type(error).__name__
        )
        where = f"{self.line(int(place[-1]))}: " if place else ""
        return f"it does not compile: {where}{reason}"

    # ---- what the emulator says -----------------------------------------------------------------------------------------

    def explain(self, error, launch, constants):
        """An error of the emulator in the learner's terms."""
        text = str(error)
        places = re.findall(r":(\d+), PTX", text)
        here = self.line(int(places[0])) if places else "the kernel"
        threads = re.findall(r"block \(?(\d+), (\d+), (\d+)\)?, thread \(?(\d+), (\d+), (\d+)\)?", text)
        who = [self.who(t, launch) for t in threads]
        what = self.place(text, error, launch, constants)
        if isinstance(error, RaceError):
            return self.explain_race(text, threads, launch, what, places, here)
        if isinstance(error, UninitialisedRead):
            return f"{here}: {who[0]} reads {what}, which no thread has written"
        if isinstance(error, MemoryFault):
            verb = "writes" if " writes " in text or ": writes" in text else "reads"
            if "no mbarrier" in text:
                return f"{here}: {who[0]} uses an mbarrier that nothing has initialised"
            if "multiple of" in text:
                return f"{here}: {who[0]} uses an address that is not aligned: {text.rpartition(': ')[2]}"
            return f"{here}: {who[0]} {verb} {what}, outside the array; does every thread stay inside?"
        if isinstance(error, Deadlock):
            waits = [line.strip() for line in text.splitlines()[1:]]
            place = r"\((?:\S*/)?([^/\s()]+:\d+), PTX line \d+: [^()]*\)"
            shown = "; ".join(re.sub(place, r"(\1)", line) for line in waits[:3])
            return (
                "deadlock: no thread can go on, since some wait for others that never come "
                f"(is a barrier or a shuffle inside a branch or behind a return?): {shown}"
            )
        return lesson.in_short(error)

    def explain_race(self, text, threads, launch, what, places, here):
        """Two threads without an order."""
        first = self.who(threads[0], launch)
        if "same instruction" in text:
            other = re.search(r"where thread \(?([\d, ]+)\)? of block \(?([\d, ]+)", text)
            second = self.who((*other[2].split(","), *other[1].split(",")), launch)
            return f"a race: {first} and {second} both write {what}, different values, in {here}"
        if len(threads) < 2:
            return f"{here}: {lesson.in_short(RaceError(text))}"
        second = self.line(int(places[1])) if len(places) > 1 else "the same line"
        names = sorted(self.thread_number(t[3:], launch) for t in threads[:2])
        same_block = threads[0][:3] == threads[1][:3]
        who = f"threads {names[0]} and {names[1]}" if same_block else f"{first} and {self.who(threads[1], launch)}"
        if "has not been waited for" in text:
            return (
                f"{here} touches {what} while a copy to it is still under way, issued in {second}: "
                "wait for the copy (and let the block meet at a barrier) before using it"
            )
        advice = "is a barrier missing between them?" if same_block else "each element should be one thread's"
        return f"a race between {who} on {what}: {here} and {second}, and nothing orders the two; {advice}"

    @staticmethod
    def thread_number(parts, launch):
        """A thread's number, or its (x, y) where the block has two axes."""
        x, y = (int(v) for v in parts[:2])
        return x if isinstance(launch.block, int) or len(launch.block) == 1 else f"({x}, {y})"

    def who(self, found, launch):
        """ "thread 35", with the block where there are several."""
        thread = f"thread {self.thread_number(found[3:], launch)}"
        grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)
        if int(np.prod(grid)) == 1:
            return thread
        block = int(found[0]) if len(grid) == 1 else f"({int(found[0])}, {int(found[1])})"
        return f"{thread} of block {block}"

    def place(self, text, error, launch, constants):
        """The element that an address stands for: x[17], tile[3, 5]."""
        shared = re.search(r"shared address (0x[0-9a-f]+)", text)
        if shared:
            address = int(shared[1], 16)
            known = {at: name for at, name in error.shared_places.items() if at <= address}
            if not known:
                return "shared memory before the first array"
            start = max(known)
            return self.shared_element(known[start], address - start, constants)
        inside = re.search(r"\(byte (\d+) of (\w+)\)", text)
        if inside and isinstance(launch.arguments.get(inside[2]), np.ndarray):
            array = launch.arguments[inside[2]]
            return f"{inside[2]}[{_index(int(inside[1]) // array.itemsize, array.shape)}]"
        beyond = re.search(r"(\d+) bytes (behind|before) the (?:end|start|beginning) of (\w+) \((\d+) bytes\)", text)
        if beyond and isinstance(launch.arguments.get(beyond[3]), np.ndarray):
            array = launch.arguments[beyond[3]]
            distance = int(beyond[1]) // array.itemsize
            index = array.size + distance if beyond[2] == "behind" else -distance
            return f"{beyond[3]}[{index}] of {array.size} elements"
        return "memory of no array"

    def shared_element(self, name, offset, constants):
        """An element of a shared array, by the shape and type its declaration gives."""
        declared = rf"\b{name} = cuda\.shared\.array\((.*?),\s*(\w+)(?:, alignment=\d+)?\)\s*(?:#.*)?$"
        found = re.search(declared, self.text, re.MULTILINE)
        if not found:
            return name
        scope = dict(inspect.getclosurevars(self.factory(*constants).function).globals)
        scope |= inspect.getclosurevars(self.factory(*constants).function).nonlocals
        try:
            shape = eval(found[1], scope)
            shape = shape if isinstance(shape, tuple) else (shape,)
            size = np.dtype(found[2]).itemsize
        except Exception:
            return name
        return f"{name}[{_index(offset // size, shape)}]"

    # ---- what came out --------------------------------------------------------------------------------------------------

    def compare(self, done, launch):
        """What is wrong with the values, or None."""
        if lesson.error_of(done.results, launch.want) <= launch.tolerance:
            return None
        for name, want in launch.want.items():
            got, want = np.asarray(done.results[name]), np.asarray(want)
            if name in launch.keep:
                continue
            missing = _unwritten(got) & ~_unwritten(want.astype(got.dtype))
            if missing.any():
                first = _index(int(np.argmax(missing.ravel())), got.shape)
                return (
                    f"{name}[{first}] is never written ({int(missing.sum())} of {got.size} elements of {name} are not)"
                )
        for message, lookalike in self.task.lookalikes:
            with np.errstate(all="ignore"):
                values = lookalike(launch)
            if values is None:
                continue
            if _alike(done.results, {**launch.want, **values}, 10 * launch.tolerance):
                return message
        named = self.task.diagnose and self.task.diagnose(done.results, launch)
        if named:
            return named
        for name, want in launch.want.items():
            found = _first_difference(name, np.asarray(done.results[name]), np.asarray(want), launch)
            if found:
                return found
        return "the values are not exact enough"

    # ---- how it was done ------------------------------------------------------------------------------------------------

    def rules(self, done, launch, constants):
        """Which rule of the exercise an answer that is right breaks, or None."""
        for rule in self.task.rules:
            found = rule(self, done, launch, constants)
            if found:
                return found
        return None


def _index(flat, shape):
    if len(shape) == 1 or flat >= int(np.prod(shape)):
        return str(flat)
    return ", ".join(str(int(i)) for i in np.unravel_index(flat, shape))


def _unwritten(values):
    """Elements whose bits are all set, as they are before the kernel runs."""
    flat = np.ascontiguousarray(values)
    return (flat.view(np.uint8).reshape(*flat.shape, flat.itemsize) == 0xFF).all(axis=-1)


def _alike(got, values, tolerance):
    """Whether results are what a mistake gives: NaN and infinities in the same places, the rest within the tolerance."""
    for name, value in values.items():
        a, b = got[name].astype(np.float64), np.asarray(value).astype(np.float64)
        finite = np.isfinite(a)
        if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return False
        if not lesson.error_of({name: a[finite]}, {name: b[finite]}) <= tolerance:
            return False
    return True


def _first_difference(name, got, want, launch):
    a, b = got.astype(np.float64), want.astype(np.float64)
    scale = max(float(np.abs(b[np.isfinite(b)]).max(initial=0)), 1e-30)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(a - b) <= 100 * launch.tolerance * scale)
    if not wrong.any():
        return None
    first = int(np.argmax(wrong.ravel()))
    text = (
        f"wrong values: {name}[{_index(first, got.shape)}] is {a.ravel()[first]:.6g}, it should be {b.ravel()[first]:.6g}; "
        f"{int(wrong.sum())} of {got.size} differ"
    )
    with np.errstate(all="ignore"):
        ratio = a[np.isfinite(b) & (np.abs(b) > 1e-6 * scale)] / b[np.isfinite(b) & (np.abs(b) > 1e-6 * scale)]
    if np.isnan(a.ravel()[first]):
        text += " (NaN: an infinity less itself, or zero by zero)"
    elif ratio.size > 4 and np.isfinite(ratio).all() and np.ptp(ratio) <= 1e-4 * abs(ratio.mean()):
        text += f" (all are {ratio.mean():.4g} times what they should be)"
    return text


# ---- rules that exercises name ------------------------------------------------------------------------------------------


def coalesced(checker, done, launch, constants, factor=1.3):
    """No load or store takes many more sectors than its bytes need."""
    worst = None
    for (_, number), counts in done.report.by_line.items():
        if counts.sectors > factor * counts.sectors_needed and counts.sectors - counts.sectors_needed > 8:
            excess = counts.sectors / counts.sectors_needed
            worst = max(worst or (0, 0), (excess, number))
    if worst is None:
        return None
    access = next(a for a in done.accesses if a.line == worst[1] and a.space == "global")
    mine = access.warps == access.warps[0]
    sectors = len({int(o) // 32 for o in access.offsets[mine]})
    needed = -(-len(set(access.offsets[mine].tolist())) * access.size // 32)
    return f"uncoalesced: in {checker.line(worst[1])} a warp touches {sectors} sectors where {needed} are needed"


def no_conflicts(checker, done, launch, constants):
    """No access of shared memory waits for a bank."""
    for (_, number), counts in sorted(done.report.by_line.items(), key=lambda entry: entry[0][1]):
        if counts.shared_passes > counts.shared_passes_needed:
            times = counts.shared_passes / counts.shared_passes_needed
            return (
                f"bank conflicts: {checker.line(number)} takes {counts.shared_passes} passes where "
                f"{counts.shared_passes_needed} are needed, {times:.3g} times as many"
            )
    return None


def reads_once(*names):
    """A rule: each of these arrays is read once."""

    def rule(checker, done, launch, constants):
        for name in names:
            total = sum(a.size * a.threads.size for a in done.accesses if a.array == name and a.mode == "read")
            times = total / launch.arguments[name].nbytes
            if times > 1.05:
                return f"{name} is read {times:.3g} times; once is enough if what is read stays in registers"
        return None

    return rule


def writes_once(*names):
    """A rule: each element of these arrays is written once."""

    def rule(checker, done, launch, constants):
        for name in names:
            total = sum(a.size * a.threads.size for a in done.accesses if a.array == name and a.mode != "read")
            times = total / launch.arguments[name].nbytes
            if times > 1.05:
                return f"{name} is written {times:.3g} times over; let one thread write each element"
        return None

    return rule


def without_shared(checker, done, launch, constants):
    """A rule: shuffles do it, no shared memory."""
    if any(a.space == "shared" for a in done.accesses):
        return "shared memory is used, where shuffles would do"
    return None


def in_registers(checker, done, launch, constants):
    """A rule: no local array lies in memory."""
    text = lesson.ptx_of(checker.factory, constants, checker.task.arch)
    if "ld.local" in text or "st.local" in text:
        return (
            "a local array lies in memory, not in registers: some index of it is not known when the kernel is compiled"
        )
    return None


def at_most_warps(limit, advice):
    """A rule: not more warp instructions than this many times the solution's."""

    def rule(checker, done, launch, constants):
        count = done.report.total.warp_instructions
        most = limit(launch)
        return f"{count} warp instructions, where {most} are plenty: {advice}" if count > most else None

    return rule


# ---- the command --------------------------------------------------------------------------------------------------------


def hint(number):
    """The next hint of an exercise, in words."""
    state = read_state()
    hints = tasks()[number].hints
    given = state["hints"].get(str(number), 0)
    state["hints"][str(number)] = min(given + 1, len(hints))
    write_state(state)
    at = min(given, len(hints) - 1)
    last = "" if at + 1 < len(hints) else f"\n(that was the last; the solution is {path_of(number, solution=True)})"
    return f"hint {at + 1} of {len(hints)}: {hints[at]}{last}"


def main(arguments=None):
    """The command: 0 where the answer is right, 1 where it is not."""
    parser = argparse.ArgumentParser(description="check an answer to an exercise, on an emulated GPU")
    parser.add_argument("number", type=int, choices=sorted(tasks()))
    parser.add_argument("--file", help="the answer, where it is not in the exercise's own file")
    parser.add_argument("--hint", action="store_true", help="give the next hint in place of checking")
    options = parser.parse_args(arguments)
    if options.hint:
        print(hint(options.number))
        return 0
    wrong = check(options.number, options.file)
    if wrong:
        print(f"exercise {options.number}: not yet. {wrong}")
        print(f"for a hint: nbkernels learn check {options.number} --hint")
        return 1
    state = read_state()
    state["solved"] = sorted({*state["solved"], options.number})
    write_state(state)
    print(f"exercise {options.number}: right, on all {len(tasks()[options.number].cases)} cases, with all checks.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
