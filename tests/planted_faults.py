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
        ("barrier of the reduction removed", "            cuda.syncthreads()\n        else:\n            # lane r", "        else:\n            # lane r"),
        ("warp of a partial result", "scratch[uint32(k * parts) + warp] = x[k]", "scratch[uint32(k * parts) + warp // uint32(2)] = x[k]"),
        ("index of a partial result", "ptx.lane_id() % uint32(fewer))\n            x = scratch", "ptx.lane_id() % uint32(fewer // 2))\n            x = scratch"),
        ("bound of a wide chunk", "* uint32(width)) < columns", "* uint32(width)) <= columns"),
        ("offset of a chunk", "own + int64(c * threads * width + p * part)", "own + int64(c * threads * width + p * part + width)"),
        ("steps of the butterfly", "steps = lanes.bit_length() - 1", "steps = lanes.bit_length() - 2"),
        ("row of a block", "int64(cuda.blockIdx.x) * int64(rows_per_block)", "int64(cuda.blockIdx.x) * int64(rows_per_block + 1)"),
        ("chunk that is not whole", "uint32(uint32(c + 1) * uint32(threads * width)) <= columns", "uint32(uint32(c) * uint32(threads * width)) <= columns"),
    ),
    *_of(
        "rows",
        "softmax float16, short rows",
        ("rows past the last load", "if row >= rows:", "if row > rows:"),
        ("bound of a strided element", "+ uint32(i % row_elements)) < columns", "+ uint32(i % row_elements)) <= columns"),
        ("store without its bound", "            if inside(i, thread, columns):\n                pointer", "            if True:\n                pointer"),
        ("lanes of a row", "uint32(lanes) >> uint32(step + 1)", "uint32(2 * lanes) >> uint32(step + 1)"),
    ),
    *_of(
        "rows",
        "softmax bfloat16, odd rows",
        ("head of a row", "uint32(15)) // uint32(itemsize), columns)", "uint32(7)) // uint32(itemsize), columns)"),
        ("wait for the copies removed", "        ptx.cp_async_wait(0)\n        cuda.syncthreads()", "        cuda.syncthreads()"),
        ("barrier behind the copies removed", "        ptx.cp_async_wait(0)\n        cuda.syncthreads()", "        ptx.cp_async_wait(0)"),
        ("barrier before the pieces leave removed", "        cuda.syncthreads()\n        shared = pieces_at()", "        shared = pieces_at()"),
        ("tail of a row", "if last < uint32(columns - head):", "if last <= uint32(columns - head):"),
        ("bytes of the last piece", "count = min(uint32(behind - done), uint32(16))", "count = uint32(16)"),
        ("row that begins within a word", "odd = uint32(own & uint32(2)) != uint32(0)", "odd = uint32(own & uint32(2)) == uint32(0)"),
    ),
    *_of(
        "rows",
        "softmax float16, cluster",
        ("barrier of the cluster removed", "            cluster_arrive()\n            cluster_wait()\n\n    return exchange", "\n    return exchange"),
        ("entered without waiting", "(cluster_arrive, cluster_wait) if", "(cluster_arrive, cluster_arrive) if"),
        ("place of a block's parts", "part = uint32(uint32(cluster_rank() * uint32(warps)) + warp)", "part = warp"),
        ("first column of a block", "first = min(uint32(cluster_rank() * share), columns)", "first = uint32(0)"),
        ("block that is told", "uint32(part << uint32(2))), lane)", "uint32(part << uint32(2))), uint32(0))"),
    ),
    *_of(
        "softmax",
        "softmax bfloat16, block",
        ("mask of the maximum", "values[j] = float32(-np.inf)", "values[j] *= float32(1.0)"),
        ("mask of the sum", "values[j] = float32(0.0)\n            for j", "values[j] *= float32(1.0)\n            for j"),
        ("scale left out", "values[j] = ptx.ex2(ptx.fma(values[j], sign, -top) * steepness)\n            if", "values[j] = ptx.ex2(ptx.fma(values[j], sign, -top))\n            if"),
        ("one scratch for two reductions", "row_sum(total, sum_scratch)", "row_sum(total, max_scratch)"),
        ("stride of the output", "one_row(held, y, row * y_stride + start", "one_row(held, y, row * (y_stride + 8) + start"),
    ),
    *_of(
        "softmax",
        "softmax float32, tiled",
        ("sum not rescaled", "total = total * ptx.ex2((before - top) * steepness) + part", "total = total + part"),
        ("second walk starts a tile late", "flush(y, y_row + start, thread", "flush(y, y_row + start + tile, thread"),
        ("columns of the last tile", "here = uint32(min(columns - start, int64(tile)))", "here = uint32(tile)"),
        ("rescaling across threads", "total * ptx.ex2((top - row_top) * steepness)", "total"),
    ),
    *_of(
        "norm",
        "rms_norm float32, residual",
        ("residual left out", "ptx.bits_from_float(ptx.float_from_bits(held[i]) + ptx.float_from_bits(other[i]))", "held[i]"),
        ("weight of another column", "load_all(weight, first, thread", "load_all(weight, first + int64(4), thread"),
        ("sum of squares", "correction, squares * inverse_columns)", "correction, squares)"),
    ),
    *_of(
        "rms_norm",
        "rms_norm bfloat16, tiled",
        ("part of a tile", "sums[0] += part", "sums[0] = part"),
        ("sum stored at the row's start", "flush(total, row * total_stride + start, thread", "flush(total, row * total_stride, thread"),
    ),
    *_of(
        "layer_norm",
        "layer_norm bfloat16, residual",
        ("eps as a factor", "sums[0], correction, inverse_columns, eps, thread", "sums[0], correction, eps, inverse_columns, thread"),
        ("mean left in", "values[j] = ptx.fma(values[j], scale, offset)", "values[j] = values[j] * scale"),
    ),
    *_of(
        "attention_wgmma",
        "attention bfloat16, a part of two tiles",
        ("diagonal of the mask", "high = min(high, int32(here + int32(1)))", "high = min(high, int32(here + int32(2)))"),
        ("parity of a ring", "return uint32(uint32(number // uint32(stages)) & uint32(1))", "return uint32(number & uint32(1))"),
        ("bytes that a barrier expects", "mbarrier_expect(barrier, uint32(kv_bytes))", "mbarrier_expect(barrier, uint32(kv_bytes - 128))"),
        ("arrivals of the consumers", "uint32(4 * consumers))", "uint32(2 * consumers))"),
        ("wait for a tile of V removed", "                    mbarrier_wait(v_barrier(base, v_full, number), v_parity(number))\n                    if wipes_rows", "                    if wipes_rows"),
        ("step along k", "s // 4 * kv_box + s % 4 * 32", "s // 4 * kv_box + s % 4 * 16"),
        ("head of the keys", "of_keys = uint32(head // group_size)", "of_keys = head"),
        ("wait for the last product removed", "                        wgmma_wait(0)\n                        hold_sums(sums, 0)\n                        hold_words(words, 0)\n                        if lane == uint32(0):\n                            mbarrier_arrive(v_barrier(base, v_free, last))\n                    leave",
         "                        hold_sums(sums, 0)\n                        hold_words(words, 0)\n                        if lane == uint32(0):\n                            mbarrier_arrive(v_barrier(base, v_free, last))\n                    leave", 0,
         "no fault on the emulator: a product is done when it is issued, and only its reads of shared memory last until the wait"),
        ("fence before the result leaves removed", "        fence_proxy_async_shared()\n        mbarrier_arrive(rows_written", "        mbarrier_arrive(rows_written", 0,
         "what generic writes need to be seen by the copy engine is not modelled: the barrier alone orders them in the emulator"),
    ),
    *_of(
        "attention_wgmma",
        "attention bfloat16, several items a block",
        ("wait for a tile of K removed", "k_parity(number))\n                        hold_scores(scores, 0)\n                        hold_sums(sums, 0)",
         "k_parity(number ^ uint32(k_stages)))\n                        hold_scores(scores, 0)\n                        hold_sums(sums, 0)"),
        ("rows of q of the next item", "rows_of(q_ring, following, group)", "rows_of(q_ring, turn, group)"),
        ("slot of a description", "uint32(turn % uint32(plans))", "uint32(turn % uint32(plans - 1))"),
        ("an item planned too early", "mbarrier_wait(uint32(base + uint32(begun)), uint32(turn & uint32(1)))", "mbarrier_wait(uint32(base + uint32(begun)), uint32(uint32(turn & uint32(1)) ^ uint32(1)))"),
        ("wait for an item's q and description removed", "        mbarrier_wait(q_barrier(base, q_full, turn), q_parity(turn))\n        at = description", "        at = description"),
    ),
    *_of(
        "matmul_wgmma",
        "matmul bfloat16, a prompt",
        ("bytes that a barrier expects", "mbarrier_expect(barrier, uint32(both))", "mbarrier_expect(barrier, uint32(both + 128))"),
        ("wait for a full stage removed", "                    mbarrier_wait(barrier, parity)\n", ""),
        ("wait for the products removed", "                wgmma_wait(0)\n", "", 0,
         "no fault on the emulator: a product is done when it is issued, and only its reads of shared memory last until the wait"),
        ("barrier before the result leaves removed", "            barrier_sync(uint32(uint32(store_barrier) + group), uint32(WARPGROUP))\n", ""),
    ),
    *_of(
        "matmul_wgmma",
        "int8_matmul bfloat16, a deep prompt, groups",
        ("slot of a tile's first block", "slot = uint32(slot + uint32(1))", "slot = uint32(slot + uint32(0))"),
        ("scales of a stage's second half", "min(uint32(k + uint32(STEP // 2 * half))", "min(uint32(k + uint32(0 * half))"),
        ("what a rounded scale lacks", "scales[4 + scale]", "scales[scale]"),
        ("last step of a block's tile", "k_end = min(depth, uint32(min(steps, uint32(end - uint32(tile * steps))) * uint32(STEP)))", "k_end = depth"),
        ("stage freed under its products", "        wgmma_wait(1)\n        for k in range(K_STEPS):\n", "        for k in range(K_STEPS):\n"),
    ),
    *_of(
        "matmul_stream",
        "int8_matmul bfloat16, a large weight",
        ("wait for a full stage removed", "                mbarrier_wait(full, parity)\n", ""),
        ("stage freed before it is read", "                ptx.warp_sync()\n                if lane == uint32(0):\n                    mbarrier_arrive", "                if lane == uint32(0):\n                    mbarrier_arrive", 0,
         "no fault on the emulator, which runs a warp's lanes together: a lane that still reads is ordered by the warp's next load"),
        ("last block of a tile", "if came == uint32(last_block - first_block):", "if came == uint32(last_block - first_block + uint32(1)):", 0,
         "a counter that is not set back harms the next launch, and the emulator gives each its own; test_counters_are_zero_again sees it"),
        ("slot of the first block", "from_slot = uint32(from_slot + uint32(1))", "from_slot = uint32(from_slot + uint32(0))"),
        ("row of x", "+ uint32(quad_row >> uint32(2)))", "+ uint32(quad_row >> uint32(1)))"),
        ("scales of another step", "first = uint32(uint32(step * uint32(scale_groups))", "first = uint32(uint32(step * uint32(2 * scale_groups))"),
        ("last columns", "if row < rows and y_column < columns and first_team:", "if row < rows and first_team:"),
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
        ("counter of the generator", "step[row if by_row else 0]", "step[row if by_row else 1]"),
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
        "decode_tensor",
        "decode bfloat16",
        ("copies that are not waited for", "            ptx.cp_async_wait(pending)\n", "            ptx.cp_async_wait(asked)\n"),
        ("lanes that do not wait for each other", "            ptx.warp_sync()  # every lane's copies are there, and the stage before has been read\n", ""),
        ("keys behind the last one", "if here >= begin and here < end else uint32(0)\n                    ptx.cp_async_16_zfill", "if here >= begin else uint32(0)\n                    ptx.cp_async_16_zfill"),
        ("second element of a head's pair", "16 * d + 8 * half) + g)", "16 * d + 8) + g)"),
        ("sums that don't shrink", "for i in range(sums):\n                    vector[i] *= shrink", "for i in range(sums - 1):\n                    vector[i] *= shrink"),
    ),
    *_of(
        "decode_merge",
        "decode bfloat16",
        ("barrier before the warps are merged", "        cuda.syncthreads()  # the warps' states are there\n", ""),
        ("barrier before the counter", "            cuda.syncthreads()  # the partial results of all warps have been written\n", "", 0,
         "the emulator's warps and blocks keep step: all results are written before the last block counts"),
        ("counter that keeps its count", "                    ptx.st_global(counter, uint32(0))  # for the next launch", "                    ptx.st_global(counter, came)", 0,
         "seen by the next launch alone, which the emulator gives new counters"),
        ("weight of a warp", "total = ptx.fma(ptx.ld_shared_f32(uint32(at + uint32(4 * rows))), factor, total)", "total += ptx.ld_shared_f32(uint32(at + uint32(4 * rows)))"),
        ("partial results that are awaited", "awaited = uint32(end - max(child, own_low))", "awaited = uint32(uint32(end - max(child, own_low)) - uint32(1))", 0,
         "the emulator's blocks keep step: the results of all are written before the first one counts"),
        ("split of a partial result", "query_row * int64(all_places) + int64(split)", "query_row * int64(all_places)"),
    ),
    *_of(
        "decode_tensor",
        "decode float16, window",
        ("key past the split's end", "if key >= end or key >= last[n]", "if key > end or key > last[n]"),
        ("first key of the window", "or key < first[n]:", "or key <= first[n]:"),
        ("first step of a block", "start = int32(uint32(uint32(begin) // uint32(step)) * uint32(step))", "start = int32(uint32(uint32(begin) // uint32(step)) * uint32(step) + uint32(step))"),
    ),
    *_of(
        "decode_merge",
        "decode bfloat16, head size 128, lengths",
        ("splits that hold keys", "high = uint32(uint32(last + int32(split_keys - 1)) // uint32(split_keys))", "high = uint32(uint32(last) // uint32(split_keys))"),
        ("length ignored", "count = min(max(kv_lengths[batch], int32(0)), kv_len)", "count = kv_len"),
    ),
    *_of(
        "decode_tensor",
        "decode bfloat16, head size 128, lengths",
        ("stage that is free", "if at_free == uint32(ring_bytes):\n                at_free = uint32(0)", "if at_free == uint32(ring_bytes):\n                at_free = uint32(of_stage)"),
        ("warp's part of the keys", "start = int32(start + int32(step))\n            at_stage", "start = int32(start + int32(step - TILE))\n            at_stage"),
    ),
    *_of(
        "decode_tensor",
        "paged decode bfloat16, window",
        ("tile's page", "of_page = ptx.shfl_idx_u32(my_page, number)", "of_page = ptx.shfl_idx_u32(my_page, uint32(0))"),
    ),
    *_of(
        "decode_tensor",
        "paged decode float16, int8, head size 128",
        ("scale of a value", "scores[of + n] *= v_factors[2 * i + n // 2]", "scores[of + n] *= v_factors[2 * i]"),
        ("origin of scores", "origin[4 * s + n] if int8_pages else float32(0.0)", "float32(0.0)"),
        ("128 of each value", "x = float32(x + bias[n // 2 * 4 + n % 2]) * float32(UNIT)", "x = x * float32(UNIT)"),
        ("bytes of two values", "fragment[2 * w + 1] = ptx.prmt(biased, uint32(0), uint32(BYTES_13))", "fragment[2 * w + 1] = ptx.prmt(biased, uint32(0), uint32(BYTES_02))"),
        ("scales of keys past the end", "there = uint32(4) if here >= begin and here < end else uint32(0)", "there = uint32(4)"),
    ),
    *_of(
        "decode_lanes",
        "paged decode float32",
        ("page of a key", "page = min(uint32(block_table[table_at + int64(key >> int32(page_shift))]), last_page)", "page = min(uint32(block_table[int64(key >> int32(page_shift))]), last_page)"),
    ),
    *_of(
        "decode_lanes",
        "decode float32",
        ("key that stands in for one past the end", "key = min(key, end - int32(1))", "key = min(key, end)"),
        ("scale of a query", "values[w] * scale_log2", "values[w]"),
        ("sums that don't shrink", "vector[r * elements + e] *= shrink", "vector[r * elements + e] *= float32(1.0)"),
        ("total that doesn't shrink", "total[r] = ptx.fma(total[r], shrink, added)", "total[r] = total[r] + added"),
        ("step of the walk", "start = int32(start + int32(step))", "start = int32(start + int32(2 * step))"),
        ("warp's state", "uint32(warp * uint32(warp_bytes))", "uint32(warp * uint32(0))"),
        ("lane groups that are merged", "if (1 << i) >= lanes:", "if (1 << i) > lanes:"),
        ("lanes of a score", "if (1 << i) < lanes:", "if (2 << i) < lanes:"),
        ("elements of a chunk", "vector[r * elements + c * width + w]\n                            )", "vector[r * elements + c * width]\n                            )"),
    ),
    *_of(
        "pages",
        "paged prompt float16, int8",
        ("part that is gathered", "is_v = uint32(block & uint32(1)) != uint32(0)", "is_v = uint32(block & uint32(2)) != uint32(0)"),
        ("sequence in the result", "to = (batch * int64(kv_len) + int64(start))", "to = int64(start)"),
    ),
    *_of(
        "rotary",
        "rotary_append, int8 pages and norms",
        ("page that is none", "return page >= int64(0) and page < pages, page, row", "return page < pages, page, row"),
        ("sum over a head's lanes", "total += ptx.shfl_bfly(total, uint32(1 << bit))", "total += float32(0.0)"),
        ("head of a scale", "v_scales[outer * v_scales_batch + row * v_scales_token + head * v_scales_head]", "v_scales[outer * v_scales_batch + row * v_scales_token]"),
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
    newer = any(word in fault.file + fault.case for word in ("wgmma", "stream", "cluster"))
    with nbk.device("emulator", arch="sm_90a" if newer else "sm_80"):
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
