"""y = activation(x · dequantised(w)ᵀ + bias) + residual, w int8 [columns, depth] with float32 scales, sums in float32.

    y[m, n] = activation(sum_g scales[n, g] · sum_(k in group g) x[m, k] · values[n, k] + bias[n]) + residual[m, n]

The kernels are those of ``matmul``, which read int8 weights as well: the bytes become numbers of x's dtype (or float32) in
registers, exactly, and never pass memory in another form:

    int8 in memory  ->  16-bit floats (``int8``)  ->  mma with x  ->  float32 sums of a group  ->  · scale, added up

The tensor cores' kernels multiply a group's sum by its scale, in float32, where group_size is a multiple of 32, and the whole sum
where there is one scale a row; matmul_lanes and matmul_blocks multiply each weight, in float32, for any group_size. On sm_90a
matmul_wgmma rounds each weight of a group, times its scale, to bfloat16.
"""

from nbkernels.kernels.elements import Cost
from nbkernels.kernels.matmul import multiply


def cost(rows, columns, depth, groups, dtype, *, bias=False, residual=False):
    """Each array once; groups: scales a row of the weight. A product and a sum a term."""
    elements = rows * depth + rows * columns * (2 if residual else 1) + (columns if bias else 0)
    return Cost(bytes=elements * dtype.itemsize + columns * (depth + 4 * groups), flops=2 * rows * columns * depth)


def run(x, weight, bias, residual, activation, out, device, stream):
    """x [rows, depth]; weight an Int8Weight [columns, depth]; bias [columns]; residual, out [rows, columns] of x's dtype.

    Last axes contiguous, any row strides; bias and residual may be None; out may be residual.
    """
    one_scale = weight.group_size is None or weight.group_size >= x.shape[1]
    kind, group_size = ("rows", 0) if one_scale else ("groups", weight.group_size)
    multiply(x, weight.values, weight.scales, kind, group_size, bias, residual, activation, out, device, stream)
