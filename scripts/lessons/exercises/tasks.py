"""What each exercise asks: cases to run an answer on, what common mistakes give, what an answer must not waste, and hints.

A *lookalike* is the result of a mistake: where an answer gives that, the mistake is named in place of a wrong number.
"""

from dataclasses import dataclass

import check as rules
import numpy as np
from lesson import ARCH, Launch, normal


@dataclass
class Task:
    """One exercise.

    cases: functions that give (constants, Launch). lookalikes: (message, function of the Launch that gives what the mistake
    gives, by name, or None where it does not apply). rules: see ``check``. launches: how often the kernel is launched in a
    row. promise: part of the message that the exercise as it is handed out gets.
    """

    cases: list
    hints: list
    promise: str
    lookalikes: tuple = ()
    rules: tuple = ()
    launches: int = 1
    arch: str = ARCH


def f64(array):
    """An array in float64."""
    return np.asarray(array).astype(np.float64)


# ---- 1: threads and a grid ----------------------------------------------------------------------------------------------


def axpy(n):
    """A case of exercise 1."""

    def case():
        a, x, y = np.float32(1.5), normal(n), normal(n, seed=1)
        arguments = {"a": a, "x": x, "y": y, "n": n}
        return (), Launch(-(-n // 256), 256, arguments, want={"y": a * x + y}, keep=("y",))

    return case


def _axpy_but(change):
    def values(launch):
        a, x, y = (launch.arguments[name] for name in "axy")
        return {"y": change(f64(a), f64(x), f64(y), launch.want["y"])}

    return values


def _last_missing(a, x, y, want):
    return np.concatenate([want[:-1], y[-1:]])


TASK_1 = Task(
    cases=[axpy(1000), axpy(256), axpy(3)],
    hints=[
        "Each block begins where the one before it ended. How many elements come before block 2, if a block has 256 threads?",
        "cuda.blockIdx.x is the block's number, cuda.blockDim.x how many threads a block has.",
        "1000 elements and 256 threads a block make four blocks, 1024 threads. What should thread 1000 do?",
    ],
    promise="a race between",
    lookalikes=(
        ("x is missing its factor: this is x + y", _axpy_but(lambda a, x, y, want: x + y)),
        ("what y held is lost: this is a·x", _axpy_but(lambda a, x, y, want: a * x)),
        ("the factor belongs to x, this is a·(x + y)", _axpy_but(lambda a, x, y, want: a * (x + y))),
        ("the factor belongs to x, this is x + a·y", _axpy_but(lambda a, x, y, want: x + a * y)),
        ("this is a·x - y", _axpy_but(lambda a, x, y, want: a * x - y)),
        ("the last element is left as it was: look at the condition", _axpy_but(_last_missing)),
        ("y is as it was: does any thread write?", _axpy_but(lambda a, x, y, want: y)),
    ),
    rules=(rules.coalesced, rules.writes_once("y")),
)

# ---- 2: coalescing ------------------------------------------------------------------------------------------------------


def scale_rows(rows, columns):
    """A case of exercise 2."""

    def case():
        x, s = normal(rows, columns), normal(rows, seed=1)
        arguments = {"x": x, "s": s, "y": x, "rows": rows, "columns": columns}
        return (), Launch(rows, 128, arguments, want={"y": s[:, None] * x})

    return case


def _scaled_by(factor):
    def values(launch):
        x, s = f64(launch.arguments["x"]), f64(launch.arguments["s"])
        scales = factor(s, *x.shape)
        return None if scales is None else {"y": scales * x}

    return values


def _column_scale(s, rows, columns):
    return s[None, :columns] if columns <= rows else None


TASK_2 = Task(
    cases=[scale_rows(256, 192), scale_rows(8, 300), scale_rows(5, 31)],
    hints=[
        "In one instruction the threads of a warp should be in one row, at neighbouring columns.",
        "The row is the block's number. Where does a thread begin, and how far apart are its columns?",
        "for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x)",
    ],
    promise="uncoalesced",
    lookalikes=(
        ("the factor is squared: multiply once", _scaled_by(lambda s, r, c: s[:, None] ** 2)),
        ("this is x as it was: the factor is missing", _scaled_by(lambda s, r, c: np.ones(1))),
        ("every row has the first row's factor: s[row], not s[0]", _scaled_by(lambda s, r, c: s[0])),
        ("the factor goes by column: it is s[row], not s[column]", _scaled_by(_column_scale)),
        ("this is x + s, not x · s", lambda launch: {"y": launch.arguments["x"] + launch.arguments["s"][:, None]}),
        ("this is x / s, not x · s", _scaled_by(lambda s, r, c: 1 / s[:, None])),
        ("rows are mixed up: this is the rows upside down", lambda launch: {"y": launch.want["y"][::-1]}),
    ),
    rules=(rules.coalesced, rules.writes_once("y")),
)

# ---- 3: shared memory ---------------------------------------------------------------------------------------------------


def transpose(rows, columns):
    """A case of exercise 3."""

    def case():
        x = normal(rows, columns)
        arguments = {"x": x, "y": x.T.copy(), "rows": rows, "columns": columns}
        return (), Launch((columns // 32, rows // 32), 256, arguments, want={"y": x.T})

    return case


def _tiles(change):
    def values(launch):
        x = launch.arguments["x"]
        y = np.empty_like(launch.arguments["y"])
        for r in range(0, x.shape[0], 32):
            for c in range(0, x.shape[1], 32):
                y[c : c + 32, r : r + 32] = change(x[r : r + 32, c : c + 32])
        return {"y": y}

    return values


TASK_3 = Task(
    cases=[transpose(32, 32), transpose(64, 96)],
    hints=[
        "Which thread wrote tile[3, 5], and which reads it? What makes the one wait for the other?",
        "cuda.syncthreads() waits until every thread of the block has come.",
        "Word w of shared memory is in bank w % 32. In which bank is tile[lane, r] with rows of 32 words? Of 33?",
    ],
    promise="a race between",
    lookalikes=(
        ("the tiles are in their places, but not transposed inside: read the tile's column", _tiles(lambda t: t)),
        ("the tiles are turned upside down", _tiles(lambda t: t.T[::-1])),
        ("the tiles are mirrored", _tiles(lambda t: t.T[:, ::-1])),
    ),
    rules=(rules.coalesced, rules.no_conflicts, rules.writes_once("y")),
)

# ---- 4: warp shuffles ---------------------------------------------------------------------------------------------------


def normalise(rows, columns):
    """A case of exercise 4."""

    def case():
        x = normal(rows, columns)
        arguments = {"x": x, "y": x, "rows": rows, "columns": columns}
        want = x / np.sqrt((f64(x) ** 2).sum(axis=1, keepdims=True))
        return (), Launch(-(-rows // 4), 128, arguments, want={"y": want})

    return case


def _divided(by):
    def values(launch):
        x = f64(launch.arguments["x"])
        return {"y": x / by(x)}

    return values


def _lane_sums(x, groups):
    """The sum of squares in each lane, where lanes that agree modulo ``groups`` are added."""
    lanes = np.arange(x.shape[1]) % 32
    total = np.zeros_like(x)
    for lane in range(32):
        mine = lanes % groups == lane % groups
        total[:, lanes == lane] = (x[:, mine] ** 2).sum(axis=1, keepdims=True)
    return np.sqrt(total)


def _lower_half(x):
    """Lanes 0 to 15 have the whole sum, the others their own."""
    whole = np.sqrt((x**2).sum(axis=1, keepdims=True))
    return np.where(np.arange(x.shape[1]) % 32 < 16, whole, _lane_sums(x, 32))


_SOME = "only some lanes are added up: {} of the five shuffles (16, 8, 4, 2, 1) are missing or the wrong way"

TASK_4 = Task(
    cases=[normalise(8, 128), normalise(5, 200)],
    hints=[
        "After a shuffle at distance 16 each lane holds the sum of two lanes. How many shuffles until it is 32?",
        "Distances 16, 8, 4, 2, 1, each added to the running total.",
        "for stage in range(5): total += ptx.shfl_bfly(total, uint32(16 >> stage))",
    ],
    promise="only some lanes are added up",
    lookalikes=(
        (
            "each lane divides by the length of its own numbers: nothing is added over the lanes",
            _divided(lambda x: _lane_sums(x, 32)),
        ),
        (_SOME.format("four"), _divided(lambda x: _lane_sums(x, 16))),
        (_SOME.format("three"), _divided(lambda x: _lane_sums(x, 8))),
        (_SOME.format("two"), _divided(lambda x: _lane_sums(x, 4))),
        (_SOME.format("one"), _divided(lambda x: _lane_sums(x, 2))),
        ("the square root is missing", _divided(lambda x: (x**2).sum(axis=1, keepdims=True))),
        (
            "this divides by the root mean square: the length has no mean in it",
            _divided(lambda x: np.sqrt((x**2).mean(axis=1, keepdims=True))),
        ),
        ("numbers are added up, not their squares", _divided(lambda x: np.sqrt(x.sum(axis=1, keepdims=True)))),
        ("magnitudes are added up, not squares", _divided(lambda x: np.sqrt(np.abs(x).sum(axis=1, keepdims=True)))),
        (
            "the largest lane's sum is taken: add, do not compare",
            _divided(lambda x: _lane_sums(x, 32).max(axis=1, keepdims=True)),
        ),
        (
            "this is x times the length: divide",
            lambda launch: {"y": f64(launch.arguments["x"]) ** 2 / launch.want["y"]},
        ),
        (
            "sums are too large: a shuffle's result counts twice",
            _divided(lambda x: np.sqrt(2 * (x**2).sum(axis=1, keepdims=True))),
        ),
    ),
    rules=(rules.coalesced, rules.without_shared, rules.writes_once("y")),
)
TASK_4.lookalikes += (
    ("lanes 16 to 31 are left out: a shuffle inside a branch is for those inside", _divided(_lower_half)),
    ("the distance stays 16: it must halve each time", _divided(lambda x: 4 * _lane_sums(x, 16))),
)

TASKS = {1: TASK_1, 2: TASK_2, 3: TASK_3, 4: TASK_4}
