"""y = activation(x · wᵀ + bias) + residual: x [rows, depth], w [columns, depth] of one float dtype, sums in float32.

    y[m, n] = activation(sum_k x[m, k] · w[n, k] + bias[n]) + residual[m, n]

Six kernels share the work, each a file of its own, for dense and int8 weights alike:

                     16-bit, aligned                         float32, or whatever the tensor cores' kernels cannot take
    few rows         matmul_narrow: bound by the weight      matmul_lanes: a warp a column
    many rows        matmul_tiles: tensor cores              matmul_blocks: multiply-adds in float32
                     matmul_wgmma: the same on sm_90a

and on sm_90a, for few rows of 16 bits times a large weight, matmul_stream: at the speed of memory. From 17 rows on a large
weight is matmul_wgmma's too; where it cannot take a call, matmul_stream can up to 64 rows.

Which one it is depends on shape, dtype and alignment; ``plan`` says why, and ``matmul_wgmma.serves`` for many rows on sm_90a. A
product over no columns is 0, by matmul_lanes.

With activation "silu_mul" rows 2i and 2i + 1 of w are a gate's and an up's, and y has half as many columns (``epilogue``):

    y[m, i] = silu(sum_k x[m, k] · w[2i, k] + bias[2i]) · (sum_k x[m, k] · w[2i + 1, k] + bias[2i + 1])
"""

from dataclasses import dataclass
from functools import lru_cache

from nbkernels.kernels import matmul_blocks, matmul_lanes, matmul_narrow, matmul_stream, matmul_tiles, matmul_wgmma
from nbkernels.kernels.elements import Cost
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.launch import overlap, tuning
from nbkernels.launch.launcher import launch
from nbkernels.launch.tensor_map import describes

# Up to here passes of 16 rows over the weight, the second of which finds it in L2, beat tiles that would stand mostly empty.
NARROW_ROWS = 32
# The same for multiply-adds, eight rows a pass.
LANES_ROWS = 16


@dataclass(frozen=True)
class Alignment:
    """What the addresses of a call's arrays allow; each is a kernel's condition, and described there.

    fragments: matmul_narrow; pieces, pairs: matmul_tiles' wide and pairs; quads: the width of matmul_lanes and matmul_blocks;
    maps: matmul_stream, and that the architecture is the one it is for; scale_maps: its scale_maps.
    """

    fragments: bool
    pieces: bool
    pairs: bool
    quads: bool
    maps: bool = False
    scale_maps: bool = False


def _rows_aligned(array, nbytes):
    """Whether every row begins at an address divisible by nbytes. One row is held to its stride too: as among others."""
    return array.pointer % nbytes == 0 and array.strides[0] * array.itemsize % nbytes == 0


def alignment(x, weight, bias, residual, out, arch, scales=None):
    """The Alignment of a call on an architecture; weight [columns, depth] dense or int8, scales of groups."""
    depth = x.shape[1]
    x_aligned = _rows_aligned(x, 16)
    return Alignment(
        fragments=x_aligned and depth % matmul_narrow.LANE_WIDTH == 0 and _rows_aligned(weight, 8 * weight.itemsize),
        pieces=x_aligned and _rows_aligned(weight, 16),
        pairs=weight.shape[0] % 2 == 0
        # a gated product's y has half as many columns, and is written an element at a time
        and (out.shape[1] < weight.shape[0] or _rows_aligned(out, 4))
        and (residual is None or _rows_aligned(residual, 4))
        and (bias is None or bias.pointer % 4 == 0)
        and out.itemsize == 2,
        quads=x_aligned and depth % matmul_lanes.WIDTH == 0 and _rows_aligned(weight, 4 * weight.itemsize),
        maps=arch == "sm_90a" and describes(x) and describes(weight),
        scale_maps=arch == "sm_90a" and scales is not None and describes(scales),
    )


@lru_cache(maxsize=4096)
def plan(
    rows, columns, depth, dtype, weight, group_size, aligned, epilogue, sm_count, overlapping=False, plan_rows=None
):
    """weight: "dense", "rows" or "groups" with its group_size (else 0); aligned: an Alignment. rows, columns > 0.

    overlapping: whether kernels may start before those in front of them have ended (``launch.overlap``). plan_rows: the kernel is
    chosen as for so many rows, at least ``rows``; each adds up a row's products in an order of its own, whatever its tile is.
    """
    of_rows, rows = rows, max(rows, plan_rows or 0)
    # a stage of tiles, and a chunk of matmul_narrow, has one scale a column; both are 32 deep
    if depth and dtype.itemsize == 2 and group_size % matmul_tiles.STEP == 0:
        if aligned.maps and matmul_stream.serves(rows, columns, depth, weight):
            return matmul_stream.plan(
                of_rows,
                columns,
                depth,
                dtype,
                weight,
                group_size,
                epilogue,
                sm_count,
                overlap=overlapping,
                scale_maps=aligned.scale_maps,
            )
        # where even small tiles would leave half the multiprocessors idle, passes over a weight that is in L2 are faster
        few = rows <= NARROW_ROWS or 2 * matmul_tiles.blocks(rows, columns) < sm_count
        if few and aligned.fragments:
            return matmul_narrow.plan(of_rows, columns, depth, dtype, weight, group_size, epilogue)
        if rows > LANES_ROWS:
            wide, pairs = aligned.pieces, aligned.pairs
            return matmul_tiles.plan(of_rows, columns, dtype, weight, group_size, wide, pairs, epilogue, sm_count)
    wide = aligned.quads and dtype.itemsize == 4 and group_size % matmul_lanes.WIDTH == 0
    if rows <= LANES_ROWS or not depth:
        return matmul_lanes.plan(of_rows, columns, dtype, weight, group_size, wide, epilogue)
    return matmul_blocks.plan(of_rows, columns, dtype, weight, group_size, wide, epilogue, sm_count)


def cost(rows, columns, depth, dtype, *, bias=False, residual=False, gated=False):
    """Each array once; a product and a sum a term. columns: of the product; gated: y has half as many."""
    y_elements = rows * columns // (2 if gated else 1) * (2 if residual else 1)
    elements = rows * depth + columns * depth + y_elements + (columns if bias else 0)
    return Cost(bytes=elements * dtype.itemsize, flops=2 * rows * columns * depth)


def multiply(x, weight, scales, kind, group_size, bias, residual, activation, out, device, stream, plan_rows=None):
    """``run`` for both kinds of weight, [columns, depth]; kind: plan's weight; scales float32 [columns, groups] or None."""
    rows, depth = x.shape
    columns = weight.shape[0]
    epilogue = Epilogue(kind == "rows", bias is not None, activation, residual is not None)
    aligned = alignment(x, weight, bias, residual, out, device.arch, scales if kind == "groups" else None)
    if matmul_wgmma.serves(x, weight, kind, group_size, aligned.pairs, out, device, plan_rows):
        matmul_wgmma.run(x, weight, scales, kind, group_size, bias, residual, epilogue, out, device, stream, plan_rows)
        return
    early = overlap.wanted(device)
    chosen = plan(rows, columns, depth, x.dtype, kind, group_size, aligned, epilogue, device.sm_count, early, plan_rows)
    if chosen.factory is matmul_stream.matmul_stream_kernel:
        matmul_stream.launch_plan(chosen, x, weight, scales, bias, residual, out, device, stream)
        return
    if chosen.factory is matmul_tiles.matmul_tiles_kernel:
        options = rows, columns, x.dtype, kind, group_size, aligned.pieces, aligned.pairs, epilogue, device.shared_bytes
        call = f"{rows}x{columns}x{depth}"
        chosen = tuning.choose(call, chosen, lambda: matmul_tiles.candidates(*options), device)
    launch(
        chosen,
        (
            x.pointer,
            weight.pointer,
            0 if scales is None else scales.pointer,
            0 if bias is None else bias.pointer,
            0 if residual is None else residual.pointer,
            out.pointer,
            rows,
            columns,
            depth,
            x.strides[0],
            weight.strides[0],
            0 if scales is None else scales.strides[0],
            0 if residual is None else residual.strides[0],
            out.strides[0],
        ),
        device,
        stream,
    )


def run(x, weight, bias, residual, activation, out, device, stream, plan_rows=None):
    """x [rows, depth], weight [columns, depth], bias [columns], residual and out [rows, columns], of one dtype.

    Last axes contiguous, any row strides; bias and residual may be None; out may be residual. Of "silu_mul" out has half as many
    columns, and there is no residual.
    """
    multiply(x, weight, None, "dense", 0, bias, residual, activation, out, device, stream, plan_rows)
