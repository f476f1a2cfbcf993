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
    gives, by name, or None where it does not apply). diagnose: a function of results and Launch that may name a mistake.
    rules: see ``check``. launches: how often the kernel is launched in a row. promise: part of the message that the exercise as
    it is handed out gets.
    """

    cases: list
    hints: list
    promise: str
    lookalikes: tuple = ()
    diagnose: object = None
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

# ---- 5: online softmax --------------------------------------------------------------------------------------------------


def log_sum(rows, columns, shift):
    """A case of exercise 5: numbers around ``shift``."""

    def case():
        x = normal(rows, columns) * 8 + np.float32(shift)
        wide = f64(x)
        top = wide.max(axis=1)
        want = top + np.log2(np.exp2(wide - top[:, None]).sum(axis=1))
        arguments = {"x": x, "y": np.zeros(rows, np.float32), "columns": columns}
        return (), Launch(rows, 32, arguments, want={"y": want})

    return case


def _lane_walk(x, shrink):
    """(top, total) of each lane [rows, 32] after its walk. shrink: what a growing maximum does to the sum so far."""
    rows = len(x)
    top, total = np.full((rows, 32), -1e30), np.zeros((rows, 32))
    for c in range(0, x.shape[1], 32):
        value = f64(x[:, c : c + 32])
        lanes = value.shape[1]
        higher = np.maximum(top[:, :lanes], value)
        total[:, :lanes] = total[:, :lanes] * shrink(top[:, :lanes] - higher) + np.exp2(value - higher)
        top[:, :lanes] = higher
    return top, total


def _no_shrink(difference):
    return 1.0


def _log_sum_but(finish, shrink=np.exp2):
    def values(launch):
        top, total = _lane_walk(launch.arguments["x"], shrink)
        return {"y": finish(top, total, top.max(axis=1))}

    return values


def _merged(top, total, row):
    return (total * np.exp2(top - row[:, None])).sum(axis=1)


def _overflow(launch):
    with np.errstate(over="ignore"):
        return {"y": np.log2(np.exp2(launch.arguments["x"]).sum(axis=1))}


def _half_row(launch):
    x = f64(launch.arguments["x"])
    x = x[:, np.arange(x.shape[1]) // 32 % 2 == 0]
    return {"y": np.log2(np.exp2(x - x.max(axis=1, keepdims=True)).sum(axis=1)) + x.max(axis=1)}


_UNCORRECTED = "the sum so far is not brought to the new maximum: multiply it by 2^(old maximum - new)"

TASK_5 = Task(
    cases=[log_sum(4, 256, 0), log_sum(4, 200, 300), log_sum(4, 100, -300)],
    hints=[
        "The sum holds powers relative to the old maximum. By what factor are they too large, once the maximum has grown?",
        "2^(x - higher) = 2^(x - top) · 2^(top - higher), for each power in the sum.",
        "The lanes' sums are relative to the lanes' maxima: before they are added, bring each to row_top in the same way.",
    ],
    promise="the sum so far is not brought to the new maximum",
    lookalikes=(
        (_UNCORRECTED, _log_sum_but(lambda t, s, row: row + np.log2(s.sum(axis=1)), _no_shrink)),
        (_UNCORRECTED, _log_sum_but(lambda t, s, row: row + np.log2(_merged(t, s, row)), _no_shrink)),
        (
            "the lanes' sums are added as they are: bring each to the row's maximum first",
            _log_sum_but(lambda t, s, row: row + np.log2(s.sum(axis=1))),
        ),
        (
            "lane 0's maximum stands for the row's: the lanes' maxima must be compared",
            _log_sum_but(lambda t, s, row: t[:, 0] + np.log2(s.sum(axis=1))),
        ),
        ("the logarithm is missing", _log_sum_but(lambda t, s, row: row + _merged(t, s, row))),
        (
            "the maximum is missing from the result: log2 of the sum is relative to it",
            _log_sum_but(lambda t, s, row: np.log2(_merged(t, s, row))),
        ),
        ("the maximum alone is no sum", _log_sum_but(lambda t, s, row: row)),
        (
            "only lane 0's numbers are summed: add over the warp",
            _log_sum_but(lambda t, s, row: row + np.log2((s * np.exp2(t - row[:, None]))[:, 0])),
        ),
        (
            "2^x overflows: powers must be taken relative to the maximum",
            lambda launch: _overflow(launch) if np.isposinf(_overflow(launch)["y"]).any() else None,
        ),
        (
            "the sum vanishes: the maximum must start below every number, not at 0",
            lambda launch: {"y": np.full(len(launch.arguments["x"]), -np.inf)},
        ),
        (
            "the correction is upside down: 2^(old maximum - new) is at most 1",
            _log_sum_but(lambda t, s, row: row + np.log2(_merged(t, s, row)), lambda d: np.exp2(-d)),
        ),
        ("every other group of 32 columns is left out", _half_row),
    ),
    rules=(rules.coalesced, rules.reads_once("x"), rules.writes_once("y")),
)

# ---- 6: layer norm ------------------------------------------------------------------------------------------------------

EPS = 0.1


def rms_norm(rows, columns):
    """A case of exercise 6."""

    def case():
        x, residual, weight = normal(rows, columns), normal(rows, columns, seed=1), normal(columns, seed=2)
        added = x + residual
        want = f64(added) / np.sqrt((f64(added) ** 2).mean(axis=1, keepdims=True) + EPS) * weight
        arguments = {"x": x, "residual": residual, "weight": weight, "added": x, "y": x}
        return (columns,), Launch(rows // 4, 128, arguments, want={"added": added, "y": want})

    return case


def _norm_but(change):
    def values(launch):
        x, residual, weight = (f64(launch.arguments[name]) for name in ("x", "residual", "weight"))
        return {"y": change(x, x + residual, weight)}

    return values


def _mean_square(a):
    return (a**2).mean(axis=1, keepdims=True)


TASK_6 = Task(
    cases=[rms_norm(8, 128), rms_norm(4, 256)],
    hints=[
        "Each lane has the sum of its own squares. What is the mean over the row?",
        "ptx.warp_sum(total) / float32(columns) is the mean of the squares.",
        "EPS is added to the mean, inside the root: ptx.rsqrt(mean + float32(EPS)).",
    ],
    promise="nothing is divided",
    lookalikes=(
        ("nothing is divided: this is added · weight", _norm_but(lambda x, a, w: a * w)),
        ("EPS is missing from the root", _norm_but(lambda x, a, w: a / np.sqrt(_mean_square(a)) * w)),
        (
            "EPS belongs inside the root, not behind it",
            _norm_but(lambda x, a, w: a / (np.sqrt(_mean_square(a)) + EPS) * w),
        ),
        (
            "this divides by the sum of squares' root: the mean over the columns is missing",
            _norm_but(lambda x, a, w: a / np.sqrt((a**2).sum(axis=1, keepdims=True) + EPS) * w),
        ),
        (
            "the root is missing: this divides by the mean square",
            _norm_but(lambda x, a, w: a / (_mean_square(a) + EPS) * w),
        ),
        ("the weight is missing", _norm_but(lambda x, a, w: a / np.sqrt(_mean_square(a) + EPS))),
        (
            "x is normalised, not x + residual",
            _norm_but(lambda x, a, w: x / np.sqrt(_mean_square(x) + EPS) * w),
        ),
        (
            "the residual is not added: this is all of x alone",
            lambda launch: {
                "added": launch.arguments["x"],
                **_norm_but(lambda x, a, w: x / np.sqrt(_mean_square(x) + EPS) * w)(launch),
            },
        ),
        (
            "squares are of x alone: they must be of x + residual",
            _norm_but(lambda x, a, w: a / np.sqrt(_mean_square(x) + EPS) * w),
        ),
        (
            "every 32 columns have the same weights: its index is the column's, not the lane's",
            _norm_but(lambda x, a, w: a / np.sqrt(_mean_square(a) + EPS) * np.resize(w[:32], len(w))),
        ),
        (
            "each lane divides by its own numbers: nothing is added over the warp",
            _norm_but(lambda x, a, w: a / np.sqrt(_lane_sums(a, 32) ** 2 / a.shape[1] + EPS) * w),
        ),
        (
            "numbers are added up, not their squares",
            _norm_but(lambda x, a, w: a / np.sqrt(a.mean(axis=1, keepdims=True) + EPS) * w),
        ),
        (
            "this multiplies by the root: divide",
            _norm_but(lambda x, a, w: a * np.sqrt(_mean_square(a) + EPS) * w),
        ),
    ),
    rules=(rules.coalesced, rules.reads_once("x", "residual"), rules.writes_once("added", "y"), rules.in_registers),
)

# ---- 7: int8 weights ----------------------------------------------------------------------------------------------------


def int8_rows(rows, columns):
    """A case of exercise 7."""

    def case():
        x, scale = normal(columns), np.abs(normal(rows, seed=2)) + np.float32(0.5)
        q = np.random.default_rng(1).integers(-127, 128, (rows, columns)).astype(np.int8)
        arguments = {"x": x, "q": q.view(np.uint32), "scale": scale, "y": scale, "columns": columns}
        return (), Launch(rows // 4, 128, arguments, want={"y": scale * (f64(q) @ f64(x))})

    return case


def _decoded(change, scaled=True):
    """The result if bytes [rows, words, 4] (uint8) and x [words, 4] became numbers as ``change`` does."""

    def values(launch):
        scale = f64(launch.arguments["scale"])
        words = launch.arguments["q"].view(np.uint8).reshape(len(scale), -1, 4)
        q, x = change(words, f64(launch.arguments["x"]).reshape(-1, 4))
        total = (q * x).sum(axis=(1, 2))
        return {"y": scale * total if scaled else total}

    return values


def _signed(words):
    return f64(words.view(np.int8))


TASK_7 = Task(
    cases=[int8_rows(8, 256), int8_rows(4, 96)],
    hints=[
        "A byte of 200 stands for 200 - 256 = -56. An arithmetic shift to the right copies the sign.",
        "Shift the word up until byte b is on top, take it as int32, and shift down by 24.",
        "int32(word << uint32(24 - 8 * b)) >> int32(24)",
    ],
    promise="have no sign",
    lookalikes=(
        ("the bytes have no sign: 200 stands for -56", _decoded(lambda w, x: (f64(w), x))),
        ("the bytes' order is turned around: byte 0 is the lowest", _decoded(lambda w, x: (_signed(w)[..., ::-1], x))),
        ("the scale is missing", _decoded(lambda w, x: (_signed(w), x), scaled=False)),
        ("only byte 0 of each word is used", _decoded(lambda w, x: (_signed(w)[..., :1], x[:, :1]))),
        ("byte 0 stands for all four", _decoded(lambda w, x: (_signed(w)[..., :1], x))),
        ("byte 3 stands for all four", _decoded(lambda w, x: (_signed(w)[..., 3:], x))),
        ("the last byte of each word is left out", _decoded(lambda w, x: (_signed(w)[..., :3], x[:, :3]))),
        ("x[4 * c] is used for all four bytes", _decoded(lambda w, x: (_signed(w), x[:, :1]))),
        (
            "every row has the first row's scale",
            lambda launch: {"y": launch.want["y"] / launch.arguments["scale"] * launch.arguments["scale"][0]},
        ),
        ("the scale is applied twice", lambda launch: {"y": launch.want["y"] * launch.arguments["scale"]}),
        ("this divides by the scale", lambda launch: {"y": launch.want["y"] / f64(launch.arguments["scale"]) ** 2}),
        (
            "only lane 0's part is there: nothing is added over the warp",
            _decoded(lambda w, x: (_signed(w)[:, ::32], x[::32])),
        ),
        ("7 bits of each byte are used: the mask is 255", _decoded(lambda w, x: (f64(w & 127), x))),
    ),
    rules=(rules.reads_once("q"), rules.writes_once("y")),
)

# ---- 8: a pipeline ------------------------------------------------------------------------------------------------------


def turned(tiles):
    """A case of exercise 8."""

    def case():
        x = normal(tiles, 256)
        return (), Launch(1, 64, {"x": x, "y": x, "tiles": tiles}, want={"y": x[:, ::-1]})

    return case


TASK_8 = Task(
    cases=[turned(4), turned(1)],
    hints=[
        "Each turn commits a group. When tile t is wanted, how many newer groups are there?",
        "ptx.cp_async_wait(1) waits for this thread's copies of tile t. What about those of the others?",
        "After the tile is used, tile t + 2 is copied to the same place: all must be done first.",
    ],
    promise="still under way",
    lookalikes=(
        ("the tiles are copied, but not turned around", lambda launch: {"y": launch.arguments["x"]}),
        (
            "every tile is the first one: the source does not move on",
            lambda launch: {"y": np.broadcast_to(launch.want["y"][:1], launch.want["y"].shape)},
        ),
    ),
    rules=(rules.coalesced, rules.no_conflicts, rules.writes_once("y")),
)

# ---- 9: fragments -------------------------------------------------------------------------------------------------------


def fragments():
    """The case of exercise 9."""
    a, b = normal(16, 16, dtype="bfloat16"), normal(8, 16, dtype="bfloat16", seed=1)
    arguments = {"a": a.view(np.uint32), "b": b.view(np.uint32), "d": np.zeros((16, 8), np.float32)}
    return (), Launch(1, 32, arguments, want={"d": f64(a) @ f64(b).T})


def _fragment(change):
    """The result with a [16, 16] and bᵀ [8, 16] changed as ``change`` does."""

    def values(launch):
        a, b = (f64(launch.arguments[name].view(normal(1, dtype="bfloat16").dtype)) for name in "ab")
        a, b = change(a.copy(), b.copy())
        return {"d": a @ b.T}

    return values


def _blocks(a, order):
    """a from its four quarters (row half, column half) in another order."""
    quarter = [a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]]
    q = [quarter[n] for n in order]
    return np.block([[q[0], q[2]], [q[1], q[3]]])


TASK_9 = Task(
    cases=[fragments],
    hints=[
        "a1 is eight rows below a0; a2 is in a0's row, eight columns (four words) further.",
        "Draw a's fragment from lesson 9: which lane holds row 8, column 0?",
        "a1 = a[(row + 8) * 8 + pair] and a2 = a[row * 8 + pair + 4]",
    ],
    promise="a1 and a2 are exchanged",
    lookalikes=(
        (
            "a1 and a2 are exchanged: a1 is eight rows down, a2 four words right",
            _fragment(lambda a, b: (_blocks(a, (0, 2, 1, 3)), b)),
        ),
        ("a1 repeats a0: it is eight rows down", _fragment(lambda a, b: (_blocks(a, (0, 0, 2, 3)), b))),
        ("a2 repeats a0: it is four words right", _fragment(lambda a, b: (_blocks(a, (0, 1, 0, 3)), b))),
        ("a3 repeats a1: it is four words right as well", _fragment(lambda a, b: (_blocks(a, (0, 1, 2, 1)), b))),
        ("a3 repeats a2: it is eight rows down as well", _fragment(lambda a, b: (_blocks(a, (0, 1, 2, 2)), b))),
        ("b1 repeats b0: it is four words right", _fragment(lambda a, b: (a, np.hstack([b[:, :8], b[:, :8]])))),
        ("b0 and b1 are exchanged", _fragment(lambda a, b: (a, np.hstack([b[:, 8:], b[:, :8]])))),
        (
            "the upper and lower half of the result are exchanged: d0, d1 are row ``row``",
            lambda launch: {"d": np.roll(launch.want["d"], 8, axis=0)},
        ),
        (
            "neighbours in the result are exchanged: d0 comes before d1",
            lambda launch: {"d": launch.want["d"].reshape(16, 4, 2)[..., ::-1].reshape(16, 8)},
        ),
        ("the whole of a is upside down", _fragment(lambda a, b: (a[::-1], b))),
    ),
    rules=(rules.writes_once("d"),),
)

# ---- 10: flash attention ------------------------------------------------------------------------------------------------

LOG2E = np.log2(np.e)
SCALE = LOG2E / np.sqrt(32)


def causal(tokens):
    """A case of exercise 10."""

    def case():
        q, k, v = (normal(tokens, 32, seed=seed) * np.float32(1.5) for seed in range(3))
        y, _, _ = _causal_walk(q, k, v)
        arguments = {"q": q, "k": k, "v": v, "y": q, "tokens": tokens}
        return (), Launch(tokens, 32, arguments, want={"y": y}, tolerance=1e-5)

    return case


def _causal_walk(q, k, v, *, scale=SCALE, seen=lambda i, n: i + 1, shrink_sum=np.exp2, shrink_mixed=np.exp2):
    """(y, totals, mixed) of the walk of exercise 10, with its mistakes."""
    q, k, v = f64(q), f64(k), f64(v)
    n = len(q)
    totals, mixtures = np.zeros((n, 1)), np.zeros((n, 32))
    for i in range(n):
        top, total, mixed = -1e30, 0.0, np.zeros(32)
        for j in range(seen(i, n)):
            score = scale * (q[i] @ k[j])
            higher = max(top, score)
            weight = np.exp2(score - higher)
            total = total * shrink_sum(top - higher) + weight
            mixed = mixed * shrink_mixed(top - higher) + weight * v[j]
            top = higher
        totals[i], mixtures[i] = total, mixed
    return mixtures / totals, totals, mixtures


def _walked(finish=lambda y, total, mixed, launch: y, **change):
    def values(launch):
        q, k, v = (launch.arguments[name] for name in "qkv")
        return {"y": finish(*_causal_walk(q, k, v, **change), launch)}

    return values


TASK_10 = Task(
    cases=[causal(12), causal(33)],
    hints=[
        "total is brought to the new maximum by total * shrink. mixed is a sum of the same powers, each times a v.",
        "Both sums must be relative to the same maximum when one is divided by the other.",
        "mixed = mixed * shrink + weight * v[key * DIM + lane]",
    ],
    promise="the mixture so far is not brought to the new maximum",
    lookalikes=(
        ("the mixture so far is not brought to the new maximum", _walked(shrink_mixed=_no_shrink)),
        ("the sum so far is not brought to the new maximum", _walked(shrink_sum=_no_shrink)),
        (
            "neither sum nor mixture is brought to the new maximum",
            _walked(shrink_sum=_no_shrink, shrink_mixed=_no_shrink),
        ),
        ("the division by the sum of weights is missing", _walked(lambda y, total, mixed, launch: mixed)),
        ("scores are not divided by sqrt(32)", _walked(scale=LOG2E)),
        ("scores are not scaled by log2(e): ex2 is a power of two", _walked(scale=1 / np.sqrt(32))),
        ("scores are not scaled at all", _walked(scale=1.0)),
        ("later tokens are seen as well: the walk ends at the query's own key", _walked(seen=lambda i, n: n)),
        ("the query's own key is left out", _walked(seen=lambda i, n: i)),
        ("one key too many is seen", _walked(seen=lambda i, n: min(n, i + 2))),
        ("weights do not count: this is the mean of v", _walked(scale=0.0)),
        ("the sign of the scores is wrong", _walked(scale=-SCALE)),
        (
            "keys are mixed, not values",
            lambda launch: {"y": _causal_walk(launch.arguments["q"], launch.arguments["k"], launch.arguments["k"])[0]},
        ),
        (
            "the query is compared with values, not keys",
            lambda launch: {"y": _causal_walk(launch.arguments["q"], launch.arguments["v"], launch.arguments["v"])[0]},
        ),
    ),
    rules=(rules.coalesced, rules.writes_once("y")),
)

# ---- 11: merging pieces -------------------------------------------------------------------------------------------------


def merging(heads, pieces, shift):
    """A case of exercise 11."""

    def case():
        part = normal(heads, pieces, 64)
        tops = normal(heads, pieces, seed=1) * 3 + np.float32(shift)
        totals = np.abs(normal(heads, pieces, seed=2)) + 1
        shrink = np.exp2(f64(tops) - f64(tops).max(axis=1, keepdims=True))
        want = (f64(part) * shrink[..., None]).sum(axis=1) / (totals * shrink).sum(axis=1, keepdims=True)
        arguments = {"part": part, "tops": tops, "totals": totals, "y": part[:, 0].copy(), "pieces": pieces}
        return (), Launch(heads, 64, arguments, want={"y": want}, tolerance=1e-5)

    return case


def _merged_but(change):
    def values(launch):
        part, tops, totals = (f64(launch.arguments[name]) for name in ("part", "tops", "totals"))
        shrink = np.exp2(tops - tops.max(axis=1, keepdims=True))
        return {"y": change(part, tops, totals[..., None], shrink[..., None])}

    return values


TASK_11 = Task(
    cases=[merging(2, 4, 0), merging(3, 7, 300), merging(2, 1, -300)],
    hints=[
        "A piece's numbers are relative to 2^(its top). How do you bring them to 2^(the largest top)?",
        "Multiply by 2^(tops[at] - top), both the total and the part.",
        "shrink = ptx.ex2(tops[at] - top)",
    ],
    promise="the pieces are added as they are",
    lookalikes=(
        (
            "the pieces are added as they are: each is relative to its own top",
            _merged_but(lambda p, t, s, k: p.sum(axis=1) / s.sum(axis=1)),
        ),
        (
            "the totals are not brought to the largest top",
            _merged_but(lambda p, t, s, k: (p * k).sum(axis=1) / s.sum(axis=1)),
        ),
        (
            "the parts are not brought to the largest top",
            _merged_but(lambda p, t, s, k: p.sum(axis=1) / (s * k).sum(axis=1)),
        ),
        (
            "the factor is upside down: a piece with a small top counts for little",
            _merged_but(lambda p, t, s, k: (p / k).sum(axis=1) / (s / k).sum(axis=1)),
        ),
        ("the division by the total is missing", _merged_but(lambda p, t, s, k: (p * k).sum(axis=1))),
        ("only the first piece is used", _merged_but(lambda p, t, s, k: p[:, 0] / s[:, 0])),
        ("only the last piece is used", _merged_but(lambda p, t, s, k: p[:, -1] / s[:, -1])),
        (
            "the last piece is left out",
            _merged_but(lambda p, t, s, k: (p * k)[:, :-1].sum(axis=1) / (s * k)[:, :-1].sum(axis=1)),
        ),
        (
            "this is the mean of the finished pieces: they do not all count the same",
            _merged_but(lambda p, t, s, k: (p / s).mean(axis=1)),
        ),
        (
            "powers of e, where tops are in units of log2",
            _merged_but(lambda p, t, s, k: (p * k**LOG2E).sum(axis=1) / (s * k**LOG2E).sum(axis=1)),
        ),
        (
            "2^top overflows or vanishes: take the largest top away first",
            lambda launch: (
                None if launch.arguments["tops"].max() < 128 else {"y": np.full_like(launch.want["y"], np.nan)}
            ),
        ),
        (
            "parts are already sums: they are not to be multiplied by the total",
            _merged_but(lambda p, t, s, k: (p * s * k).sum(axis=1) / (s * k).sum(axis=1)),
        ),
    ),
    rules=(rules.coalesced, rules.writes_once("y")),
)

# ---- 12: bulk copies ----------------------------------------------------------------------------------------------------


def bulk_turned(blocks):
    """A case of exercise 12."""

    def case():
        x = normal(blocks, 256)
        return (), Launch(blocks, 128, {"x": x, "y": x}, want={"y": x[:, ::-1]})

    return case


TASK_12 = Task(
    cases=[bulk_turned(3)],
    hints=[
        "The copy engine works while the threads go on. Who tells them that the bytes have come?",
        "mbarrier_wait(at, parity) waits for the phase of that parity; the first has parity 0.",
        "mbarrier_wait(at, uint32(0)), by every thread, before the tile is read",
    ],
    promise="still under way",
    lookalikes=(
        ("the pieces are copied, but not turned around", lambda launch: {"y": launch.arguments["x"]}),
        (
            "every block has the first piece: the source does not move on",
            lambda launch: {"y": np.broadcast_to(launch.want["y"][:1], launch.want["y"].shape)},
        ),
    ),
    rules=(rules.coalesced, rules.no_conflicts, rules.writes_once("y")),
    arch="sm_90a",
)

# ---- 13: a step that is replayed ----------------------------------------------------------------------------------------


def remembering(position):
    """A case of exercise 13."""

    def case():
        value, history = normal(64), np.zeros((8, 64), np.float32)
        want = history.copy()
        want[position : position + 3] = value
        arguments = {"value": value, "history": history, "position": np.array([position], np.int32)}
        wanted = {"history": want, "position": np.array([position + 3], np.int32)}
        return (), Launch(1, 64, arguments, wanted, keep=("history", "position"))

    return case


def _remembered(rows, moved):
    """What history and position hold if ``rows`` (counted from the first) were written and the position moved on."""

    def values(launch):
        first = int(launch.want["position"][0]) - 3
        history = np.zeros((8, 64), np.float32)
        for row in rows:
            if row is not None and 0 <= first + row < 8:
                history[first + row] = launch.arguments["value"]
        return {"history": history, "position": np.array([first + moved], np.int32)}

    return values


def _history(change):
    """What the three replays leave, if each writes to the place that ``change`` gives."""

    def values(launch):
        first, value = int(launch.want["position"][0]) - 3, launch.arguments["value"]
        history = np.zeros(8 * 64, np.float32)
        for step in range(first, first + 3):
            start, held = change(value, step) or (step, value)
            history[start : start + 64] = held
        return {"history": history.reshape(8, 64), "position": launch.want["position"]}

    return values


TASK_13 = Task(
    cases=[remembering(2), remembering(0)],
    hints=[
        "How many of the 64 threads should add 1? And when may it?",
        "All must have read position[0] before it changes: a barrier stands between.",
        "cuda.syncthreads(), and then thread 0 alone adds 1.",
    ],
    promise="a race between",
    lookalikes=(
        ("the position is never moved on: every replay writes to the same row", _remembered((0,), 0)),
        ("the position moves on by two", _remembered((0, 2, 4), 6)),
        ("the position moves back", _remembered((0, -1, -2), -3)),
        ("the position moves on before the row is written: rows are one too late", _remembered((1, 2, 3), 3)),
        ("the row behind the position is written", _remembered((-1, 0, 1), 3)),
        ("nothing is written to history", _remembered((), 3)),
        ("always row 0 is written: the position is not used", _history(lambda value, first: (0, value))),
        ("rows begin at element position[0]: one is 64 elements on", _history(lambda value, first: None)),
        ("every element is value[0]", _history(lambda value, first: (first * 64, np.full(64, value[0])))),
    ),
    rules=(rules.coalesced,),
    launches=3,
)

# ---- 14: the next token -------------------------------------------------------------------------------------------------


def choosing(columns, shift):
    """A case of exercise 14, with equal scores."""

    def case():
        scores = np.round(normal(6, columns) * 2) + np.float32(shift)
        scores[0, [7 % columns, columns - 1]] = scores.max() + 1
        scores[1, [columns // 2, columns // 3]] = scores.max() + 1
        arguments = {"scores": scores, "token": np.zeros(6, np.int32), "columns": columns}
        return (), Launch(6, 32, arguments, want={"token": scores.argmax(axis=1).astype(np.int32)}, tolerance=0)

    return case


def _chosen(change):
    return lambda launch: {"token": change(launch.arguments["scores"])}


def _last_best(scores):
    return scores.shape[1] - 1 - scores[:, ::-1].argmax(axis=1)


def _equal_scores(results, launch):
    """Whether each row's token has the largest score, though it is not the first that has."""
    scores, token = launch.arguments["scores"], results["token"]
    if ((token < 0) | (token >= scores.shape[1])).any():
        return None
    if (np.take_along_axis(scores, token[:, None].astype(int), axis=1)[:, 0] == scores.max(axis=1)).all():
        return "not always the first of equal scores wins: compare the places too"
    return None


def _first_of_lanes(scores):
    """The first lane that holds the best score, not its column."""
    return np.array([(np.flatnonzero(row == row.max()) % 32).min() for row in scores])


TASK_14 = Task(
    cases=[choosing(40, 0), choosing(200, -50)],
    hints=[
        "Of two equal scores the smaller place wins, whichever lane holds it.",
        "Both lanes of a pair must come to the same decision: compare the places where the scores are equal.",
        "if other > best or (other == best and its < place)",
    ],
    promise="not always the first of equal scores",
    lookalikes=(
        ("the last of equal scores wins: the first should", _chosen(_last_best)),
        ("the smallest score is chosen", _chosen(lambda s: s.argmin(axis=1))),
        ("the lane is given, not the place: lane 8 may hold column 40", _chosen(_first_of_lanes)),
        ("only the first 32 columns are looked at", _chosen(lambda s: s[:, :32].argmax(axis=1))),
        (
            "only lane 0's columns are looked at: the lanes are not compared",
            _chosen(lambda s: 32 * s[:, ::32].argmax(axis=1)),
        ),
        ("the token is always 0: no score is larger than the best so far", _chosen(lambda s: np.zeros(len(s)))),
        (
            "every row has the first row's token: row * columns is missing",
            _chosen(lambda s: np.full(len(s), s[0].argmax())),
        ),
        ("the place is one too large", _chosen(lambda s: s.argmax(axis=1) + 1)),
        ("the best score is given, not its place", _chosen(lambda s: s.max(axis=1).astype(np.int32))),
    ),
    diagnose=_equal_scores,
    rules=(rules.coalesced, rules.reads_once("scores"), rules.writes_once("token")),
)

TASKS = {number: globals()[f"TASK_{number}"] for number in range(1, 15)}
