"""Exercise 6: RMS norm, fused with the residual.

added = x + residual; y = added / sqrt(mean(added²) + EPS) · weight; all [rows, columns] float32, weight [columns],
the mean over a row. A warp a row, the row in registers. What is missing is the factor that normalises:
``ptx.warp_sum``, ``ptx.rsqrt``.
"""

from numba import cuda, float32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")
WARPS, EPS = 4, 0.1


def rms_norm_kernel(columns):
    held = columns // 32

    @kernel(launch_bounds=32 * WARPS)
    def rms_norm(x: floats, residual: floats, weight: floats, added: floats, y: floats):
        lane = cuda.threadIdx.x % 32
        first = (cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32) * columns + lane
        values = cuda.local.array(held, float32)
        total = float32(0)
        for i in range(held):
            values[i] = x[first + 32 * i] + residual[first + 32 * i]
            added[first + 32 * i] = values[i]
            total += values[i] * values[i]
        inverse = float32(1)  # …
        for i in range(held):
            y[first + 32 * i] = values[i] * inverse * weight[lane + 32 * i]

    return rms_norm
