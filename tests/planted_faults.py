"""Faults planted in copies of our kernels, one at a time, to see whether the emulator's checks or a comparison find them.

    python tests/planted_faults.py                   runs all, prints them, writes tests/data/planted_faults.json
    python tests/planted_faults.py decode softmax    those whose file or kind holds one of the words; writes nothing

Lines are longer than elsewhere, since a fault quotes lines of the kernels.

A fault replaces a piece of source text, in a copy of the package that a process of its own imports. It is found when a check
of the emulator fires ("check"), or the result differs from the reference ("comparison"). ``note`` says why one cannot be seen.
"""

# ruff: noqa: E501

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "nbkernels"
REPORT = HERE / "data" / "planted_faults.json"
SECONDS = 300  # for one fault: a copy of a kernel is compiled and run in 2 to 20
INSTRUCTIONS = 3e8  # of a launch; the largest case does a thirtieth of it


@dataclass(frozen=True)
class Fault:
    """In ``file`` of nbkernels/kernels, occurrence ``number`` of ``old`` becomes ``new``; ``case`` of kernel_cases runs."""

    kind: str
    file: str
    case: str
    old: str
    new: str
    number: int = 0
    note: str = ""

    @property
    def name(self):
        return f"{self.file}: {self.kind} ({self.case})"


def _of(file, case, *faults):
    return [Fault(kind, file, case, *rest) for kind, *rest in faults]


FAULTS = [
    *_of(
        "rows",
        "softmax bfloat16, block",
        ("barrier of the reduction removed", "            cuda.syncthreads()\n            # the partial", "            # the partial"),
        ("warp of a partial result", "scratch[uint32(cuda.threadIdx.x) // uint32(ptx.WARP)] = x", "scratch[uint32(cuda.threadIdx.x) // uint32(2 * ptx.WARP)] = x"),
        ("lane that writes a partial result", "if lane == uint32(0):\n                scratch", "if lane == uint32(1):\n                scratch", 0,
         "no fault after all: behind the butterfly every lane of a warp holds the same sum"),
        ("index of a partial result", "scratch[lane % uint32(warps)]", "scratch[lane % uint32(warps // 2)]"),
        ("bound of a wide chunk", "* uint32(width)) < columns", "* uint32(width)) <= columns"),
        ("offset of a chunk", "int64(c * threads * width + p * part))\n                for", "int64(c * threads * width + p * part + width))\n                for"),
        ("steps of the butterfly", "steps = lanes.bit_length() - 1", "steps = lanes.bit_length() - 2"),
        ("row of a block", "int64(cuda.blockIdx.x) * int64(rows_per_block)", "int64(cuda.blockIdx.x) * int64(rows_per_block + 1)"),
    ),
    *_of(
        "rows",
        "softmax float16, short rows",
        ("rows past the last load", "if row >= rows:", "if row > rows:"),
        ("bound of a strided element", "uint32(uint32(i) * uint32(threads) + thread) < columns", "uint32(uint32(i) * uint32(threads) + thread) <= columns"),
        ("store without its bound", "            if inside(i, thread, columns):\n                pointer", "            if True:\n                pointer"),
        ("lanes of a row", "uint32(lanes) >> uint32(step + 1)", "uint32(2 * lanes) >> uint32(step + 1)"),
    ),
    *_of(
        "softmax",
        "softmax bfloat16, block",
        ("mask of the maximum", "            if inside(i, thread, here):\n                top = ptx.fmax(top, held[i])\n        top = row_max", "            top = ptx.fmax(top, held[i])\n        top = row_max"),
        ("mask of the sum", "held[i] = weight if inside(i, thread, here) else float32(0.0)", "held[i] = weight"),
        ("scale left out", "ptx.ex2((held[i] - top) * steepness)\n            held", "ptx.ex2(held[i] - top)\n            held"),
        ("one scratch for two reductions", "row_sum(total, sum_scratch)", "row_sum(total, max_scratch)"),
        ("stride of the output", "store(y, row * y_stride", "store(y, row * (y_stride + 8)"),
    ),
    *_of(
        "softmax",
        "softmax float32, tiled",
        ("sum not rescaled", "total = total * ptx.ex2((before - top) * steepness) + part", "total = total + part"),
        ("second walk starts a tile late", "store(y, y_row + start, thread", "store(y, y_row + start + tile, thread"),
        ("columns of the last tile", "here = uint32(min(columns - start, int64(tile)))", "here = uint32(tile)"),
        ("rescaling across threads", "total * ptx.ex2((top - row_top) * steepness)", "total"),
    ),
    *_of(
        "norm",
        "rms_norm float32, residual",
        ("residual left out", "held[i] += other[i]", "held[i] += float32(0.0) * other[i]"),
        ("weight of another column", "load(weight, first, thread, columns, operand)", "load(weight, first + 4, thread, columns, operand)"),
        ("sum of squares", "squares * inverse_columns - mean", "squares - mean"),
    ),
    *_of(
        "rms_norm",
        "rms_norm bfloat16, tiled",
        ("part of a tile", "sums[0] += part", "sums[0] = part"),
        ("sum stored at the row's start", "row * total_stride + start", "row * total_stride"),
    ),
    *_of(
        "layer_norm",
        "layer_norm bfloat16, residual",
        ("eps as a factor", "inverse_columns, eps)\n\n", "eps, inverse_columns)\n\n"),
    ),
    *_of(
        "argmax",
        "argmax",
        ("barrier removed", "        cuda.syncthreads()\n        key = uint64(0)", "        key = uint64(0)"),
        ("step of the walk", "column + uint32(threads * width)", "column + uint32(2 * threads * width)"),
        ("bound of the warps", "if lane < uint32(warps):", "if lane <= uint32(warps):"),
        ("index within a chunk", "uint32(column + uint32(i))", "column"),
    ),
    *_of(
        "sampling",
        "sample",
        ("barrier before a bin is chosen", "                    cuda.syncthreads()\n                    _choose_bin(halves, bins, chosen, above, uint64(top_k))", "                    _choose_bin(halves, bins, chosen, above, uint64(top_k))"),
        ("bound of the vocabulary", "while i < vocab:", "while i <= vocab:", 1),
        ("counter of the generator", "counter = uint32(step[0])", "counter = uint32(step[1])"),
        ("mass kept", "key >= threshold and", "key > threshold and"),
    ),
    *_of(
        "embedding",
        "embedding",
        ("bound of a row", "if column < hidden:", "if column <= hidden:"),
        ("row of the result", "store(y, row * int64(hidden)", "store(y, (row + int64(1)) * int64(hidden)"),
        ("token's row", "int64(token) * table_stride", "int64(token + int32(1)) * table_stride"),
    ),
    *_of(
        "advance",
        "advance",
        ("bound of the sequences", "if i < count:", "if i <= count:"),
    ),
    *_of(
        "quantize",
        "quantize_int8",
        ("lane's step", "                i += int64(ptx.WARP)\n            scale", "                i += int64(2 * ptx.WARP)\n            scale"),
        ("end of a group", "end = min((group + int64(1)) * group_size, columns)", "end = (group + int64(1)) * group_size"),
        ("steps of the warp's maximum", "for step in range(5):", "for step in range(4):"),
        ("scale of the next group", "scales[row * scales_stride + group]", "scales[row * scales_stride + group + 1]"),
    ),
    *_of(
        "rotary",
        "rotary_append",
        ("partner of a pair", "at + i + int64(half))\n            c", "at + i + int64(half - width))\n            c"),
        ("sign of the sine", "float32(-(second[n] * s[n]))", "float32(second[n] * s[n])"),
        ("position in the cache", "position * k_cache_token", "token * k_cache_token"),
        ("inside of the table", "position < int64(limit)", "position <= int64(limit)"),
        ("v and k swapped", "v_cache, v_to + head", "k_cache, v_to + head"),
    ),
    *_of(
        "matmul_tiles",
        "matmul float16, many rows",
        ("wait for one stage fewer", "unfinished = stages - 2", "unfinished = stages - 1"),
        ("barrier of the ring removed", "                # the stage has landed for all threads, and all are done with the one that is filled next\n                cuda.syncthreads()", "                pass"),
        ("barrier before the tile of y", "        # the sums go through shared memory, so that whole rows leave together\n        cuda.syncthreads()", ""),
        ("barrier behind the tile of y", "= sums[4 * (m * n_tiles + n) + j]\n        cuda.syncthreads()", "= sums[4 * (m * n_tiles + n) + j]"),
        ("commit left out", "            ptx.cp_async_commit()\n            ahead", "            ahead"),
        ("rows past the tile", "rows_here = uint32(min(rows - first_row, int64(tile_m)))", "rows_here = uint32(tile_m)"),
        ("depth past the row", "row < here and first < depth", "row < here"),
        ("columns past the weight", "inside < columns_here", "inside <= columns_here"),
        ("swizzle of x alone", "a = ptx.ldmatrix_x4(uint32(x_tile + offset(row, piece)))", "a = ptx.ldmatrix_x4(uint32(x_tile + offset(row, piece) ^ uint32(16)))"),
        ("row of a fragment", "uint32(16 * m) + (lane & uint32(15))", "uint32(16 * m) + (lane & uint32(7))"),
        ("operands of the product", "b[2 * n], b[2 * n + 1], sums[c]", "b[2 * n + 1], b[2 * n], sums[c]"),
        ("ring that turns too late", "if fill_at == end:", "if fill_at > end:"),
    ),
    *_of(
        "matmul_tiles",
        "int8_matmul bfloat16, groups",
        ("scale of the group before", "int64(uint32(k // uint32(group_size)))", "int64(uint32(k // uint32(2 * group_size)))"),
        ("scales swapped", "sums[c] = ptx.fma(part[c], first, sums[c])", "sums[c] = ptx.fma(part[c], second, sums[c])"),
        ("scales not copied for the last column", "if groups and thread < uint32(tile_n):", "if groups and thread < uint32(tile_n // 2):"),
    ),
    *_of(
        "attention",
        "attention bfloat16",
        ("barrier at a tile's start removed", "            cuda.syncthreads()  # K of this tile (and q) is there, V of the one before has been used\n", ""),
        ("wait for K removed", "            ptx.cp_async_wait(0)\n            cuda.syncthreads()  # K of this", "            cuda.syncthreads()  # K of this"),
        ("rows of q past the end", "copy_q(q_tile, q, q_start, q_token, int32(last_row - first_row))", "copy_q(q_tile, q, q_start, q_token, int32(tile_m))"),
        ("keys past the end", "copy_kv(v_tile, v, v_start, v_token, int32(end - key))", "copy_kv(v_tile, v, v_start, v_token, int32(tile_n))"),
        ("diagonal off by one", "high = min(high, int32(position + int32(1)))", "high = min(high, int32(position + int32(2)))"),
        ("partly masked tile taken for a whole one", "partly = partly or int32(following - int32(1)) > top", "partly = partly or int32(following - int32(1)) > int32(top + int32(16))"),
        ("exchange of the row's maximum", "peak = ptx.fmax_nan(peak, ptx.shfl_bfly(peak, uint32(2)))", "peak = ptx.fmax_nan(peak, ptx.shfl_bfly(peak, uint32(4)))"),
        ("sums not scaled", "shrink[h] = ptx.ex2(old - new)", "shrink[h] = float32(1.0)"),
        ("stage of K", "other = uint32(stage ^ uint32(kv_bytes))", "other = stage"),
        ("step of V", "v_start += int64(tile_n) * v_token\n            ptx", "v_start += int64(tile_n - 1) * v_token\n            ptx"),
        ("head of K", "kv_head = uint32(head // group)\n        lane", "kv_head = uint32(head % group)\n        lane"),
    ),
    *_of(
        "attention",
        "attention float16, lengths and window",
        ("length ignored", "count = min(max(kv_lengths[batch], int32(0)), kv_len)\n        first_row = int32(tile", "count = kv_len\n        first_row = int32(tile"),
        ("window one too wide", "low = int32(position - window - key - my_key)", "low = int32(position - window - key - my_key - int32(1))"),
    ),
    *_of(
        "attention",
        "attention float32",
        ("barrier before V removed", "            cuda.syncthreads()  # the weights are there, and K has been used\n", ""),
        ("barrier before K removed", "            cuda.syncthreads()  # q is there, and V of the tile before has been used\n", ""),
    ),
    *_of(
        "attention",
        "attention float32, every key",
        ("keys past the end", "hidden = column >= end", "hidden = column > end"),
    ),
    *_of(
        "decode",
        "decode bfloat16",
        ("barrier before the warps are merged", "        cuda.syncthreads()\n        leave(\n            shared_max, shared_sum, shared_vector, out, vectors, weights, batch, kv_head, tile, split,\n            q_len, kv_heads, group, splits, out_batch, out_token, out_head,\n        )  # fmt: skip\n\n    return tensor_decode", "        leave(\n            shared_max, shared_sum, shared_vector, out, vectors, weights, batch, kv_head, tile, split,\n            q_len, kv_heads, group, splits, out_batch, out_token, out_head,\n        )  # fmt: skip\n\n    return tensor_decode"),
        ("last key that is read", "last_key = int32(end - int32(1))\n        start = int32(begin + int32(uint32(warp * uint32(16 * tiles))))", "last_key = end\n        start = int32(begin + int32(uint32(warp * uint32(16 * tiles))))"),
        ("halves of V's words", "ptx.prmt(values[a], values[a + 4], uint32(UPPER_HALVES))", "ptx.prmt(values[a], values[a + 4], uint32(LOWER_HALVES))"),
        ("weight of a warp", "x = ptx.fma(shared_vector[w, r, column], ptx.ex2(shared_max[w, r] - largest), x)", "x = ptx.fma(shared_vector[w, r, column], float32(1.0), x)"),
        ("split of a partial result", "slot = query_row * int64(splits) + int64(split)", "slot = query_row * int64(splits)"),
    ),
    *_of(
        "decode",
        "decode float16, window",
        ("key past the split's end", "if key >= end or key >= last[row]", "if key > end or key >= last[row]"),
        ("first key of the window", "or key < first[row]:", "or key <= first[row]:"),
    ),
    *_of(
        "decode",
        "decode bfloat16, head size 128, lengths",
        ("splits that hold keys", "end = int32((last + int32(SPLIT - 1)) // int32(SPLIT))", "end = int32(last // int32(SPLIT))"),
        ("merge without its barrier", "        cuda.syncthreads()\n", "", -1),
        ("warp's part of the keys", "start = int32(start + int32(step))", "start = int32(start + int32(step - 16))", 1),
        ("warps of the merge", "s = int32(begin + int32(warp))", "s = int32(begin + int32(warp) + int32(1))"),
    ),
]  # fmt: skip


def plant(fault, folder):
    """A copy of the package in ``folder`` with the fault. ValueError where the text it replaces is not there."""
    shutil.copytree(PACKAGE, folder / "nbkernels", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "nbkernels" / "kernels" / f"{fault.file}.py"
    pieces = path.read_text().split(fault.old)
    if len(pieces) < 2 or not -len(pieces) < fault.number < len(pieces) - 1:
        raise ValueError(
            f"{fault.name}: the text to be replaced is not in {fault.file}.py; change the list with the kernel"
        )
    at = fault.number % (len(pieces) - 1) + 1
    path.write_text(fault.old.join(pieces[:at]) + fault.new + fault.old.join(pieces[at:]))


def _outcome(fault, folder):
    """(how it was found or "survived", what was said), in a process that has not imported the package yet."""
    os.environ["NBKERNELS_CACHE"] = str(folder / "cache")
    sys.path[:0] = [str(folder), str(HERE)]
    import nbkernels as nbk

    assert Path(nbk.__file__).is_relative_to(folder), "the package was imported before the fault was planted"
    from kernel_cases import CASES

    from nbkernels.emulator import EmulatorError
    from nbkernels.launch import emulated

    case = CASES[fault.case]
    with nbk.device("emulator", arch="sm_90a" if "wgmma" in fault.file else "sm_80"):
        emulated.emulator().instruction_limit = INSTRUCTIONS
        try:
            error = case.error(case.call())
        except EmulatorError as said:
            return "check", f"{type(said).__name__}: {str(said).splitlines()[0]}"
    if not error <= case.bound:
        return "comparison", f"relative error {error:.2g}, bound {case.bound:g}"
    return "survived", fault.note or "no reason is known"


def run(fault):
    """{"name", "change", "found", "said"} of one fault; in a forked process, so that nothing of it stays."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(fault, folder)
        signal.alarm(SECONDS)  # ends the process
        try:
            found, said = _outcome(fault, folder)
        except Exception as error:
            found, said = "did not run", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        signal.alarm(0)
    change = [text.strip() for text in (fault.old, fault.new)]
    return {"name": fault.name, "change": change, "found": found, "said": said.replace(name, "…")}


def run_all(faults, processes):
    """Yield the outcome of each fault."""
    import numba.cuda  # noqa: F401  imported once, inherited by the processes

    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        yield from pool.imap(run, faults)


def main():
    words = sys.argv[1:]
    chosen = [f for f in FAULTS if not words or any(w in f.name for w in words)]
    outcomes = []
    for number, outcome in enumerate(run_all(chosen, os.cpu_count() or 1), 1):
        outcomes.append(outcome)
        print(f"{number}/{len(chosen)} {outcome['found']:<12} {outcome['name']}: {outcome['said']}", flush=True)
    found = sum(o["found"] in ("check", "comparison") for o in outcomes)
    print(f"{found} of {len(outcomes)} found")
    if not words:
        REPORT.write_text(json.dumps(outcomes, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
