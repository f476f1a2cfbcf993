"""y = activation(x · dequantised(w)ᵀ + bias) + residual, w int8 [columns, depth] with float32 scales, sums in float32.

    y[m, n] = activation(sum_g scales[n, g] · sum_(k in group g) x[m, k] · values[n, k] + bias[n]) + residual[m, n]

or, with activation "silu_mul", two columns of the product make one of y, as in ``matmul``.

The kernels are those of ``matmul``, which read int8 weights as well: the bytes become numbers of x's dtype (or float32) in
registers, exactly, and never pass memory in another form:

    int8 in memory  ->  16-bit floats (``int8``)  ->  mma with x  ->  float32 sums of a group  ->  · scale, added up

The tensor cores' kernels multiply a group's sum by its scale, in float32, where group_size is a multiple of 32, and the whole sum
where there is one scale a row; matmul_lanes and matmul_blocks multiply each weight, in float32, for any group_size. On sm_90a
matmul_wgmma rounds each weight of a group, times its scale, to bfloat16.

Where x is int8 too (``run_int8``), products of bytes are summed in int32, exactly: by matmul_tiles_int8, or on sm_90a by
matmul_wgmma_int8 (many rows; a scale a row, or a group of a multiple of 128) and matmul_stream_int8 (few rows, a large weight
with a scale a row). float32 begins with the sum of a row, or of a group:

    z[m, n] = sum_g scales[n, g] · float(sum_(k in group g) x[m, k] · values[n, k])
    y[m, n] = activation(x_scales[m] · z[m, n] + bias[n]) + residual[m, n]
"""

from nbkernels.kernels import matmul_stream_int8, matmul_tiles_int8, matmul_wgmma_int8
from nbkernels.kernels.elements import Cost
from nbkernels.kernels.epilogue import Epilogue
from nbkernels.kernels.matmul import alignment, multiply
from nbkernels.launch.launcher import launch


def cost(rows, columns, depth, groups, dtype, *, bias=False, residual=False, gated=False):
    """Each array once; groups: scales a row of the weight. A product and a sum a term. gated: y has half as many columns."""
    y_elements = rows * columns // (2 if gated else 1) * (2 if residual else 1)
    elements = rows * depth + y_elements + (columns if bias else 0)
    return Cost(bytes=elements * dtype.itemsize + columns * (depth + 4 * groups), flops=2 * rows * columns * depth)


def cost_int8(rows, columns, depth, groups, dtype, *, bias=False, residual=False):
    """As ``cost`` for quantised x: a byte an element and a scale a row; dtype is y's."""
    y_elements = rows * columns * (2 if residual else 1) + (columns if bias else 0)
    return Cost(
        bytes=rows * (depth + 4) + columns * (depth + 4 * groups) + y_elements * dtype.itemsize,
        flops=2 * rows * columns * depth,
    )


def _group_size(weight):
    """Columns a scale; 0 where a row has one."""
    return 0 if weight.group_size is None or weight.group_size >= weight.shape[1] else weight.group_size


def run(x, weight, bias, residual, activation, out, device, stream, plan_rows=None):
    """x [rows, depth]; weight an Int8Weight [columns, depth]; bias [columns]; residual, out [rows, columns] of x's dtype.

    Last axes contiguous, any row strides; bias and residual may be None; out may be residual; "silu_mul" as in ``matmul.run``.
    """
    group_size = _group_size(weight)
    kind = "groups" if group_size else "rows"
    multiply(
        x, weight.values, weight.scales, kind, group_size, bias, residual, activation, out, device, stream, plan_rows
    )


def run_int8(x, x_scales, weight, bias, residual, activation, out, device, stream, plan_rows=None):
    """x int8 [rows, depth] with x_scales float32 [rows, 1]; the rest as ``run``, groups of the weight multiples of 32."""
    rows, columns = out.shape
    planned = max(rows, plan_rows or 0)
    group_size = _group_size(weight)
    epilogue = Epilogue(group_size == 0, bias is not None, activation, residual is not None)
    aligned = alignment(x, weight.values, bias, residual, out, device.arch)
    if matmul_wgmma_int8.serves(x, weight.values, group_size, aligned.pairs, out, device, plan_rows):
        matmul_wgmma_int8.run(
            x, x_scales, weight.values, weight.scales, group_size, bias, residual, epilogue, out, device, stream
        )
        return
    if matmul_stream_int8.serves(x, weight.values, group_size, device, planned):
        matmul_stream_int8.run(x, x_scales, weight.values, weight.scales, bias, residual, epilogue, out, device, stream)
        return
    chosen = matmul_tiles_int8.plan(
        rows, columns, out.dtype, group_size, aligned.pieces, aligned.pairs, epilogue, device.sm_count
    )
    arguments = matmul_tiles_int8.arguments(x, x_scales, weight.values, weight.scales, bias, residual, out)
    launch(chosen, arguments, device, stream)
