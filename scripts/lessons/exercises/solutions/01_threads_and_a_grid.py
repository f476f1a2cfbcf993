"""One answer to exercise 1."""

from numba import cuda, float32, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")


def axpy_kernel():
    @kernel(launch_bounds=256)
    def axpy(a: float32, x: floats, y: floats, n: int32):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < n:
            y[i] = a * x[i] + y[i]

    return axpy
