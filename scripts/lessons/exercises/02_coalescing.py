"""Exercise 2: scale the rows of a matrix, and let neighbours read neighbours.

y[r, c] = s[r] · x[r, c]; x, y [rows, columns] float32 row by row in memory, s [rows]. The launch gives 128 threads a
block and a block a row. As it stands, each thread walks a row by itself: right, and uncoalesced. Let the threads of a
block share one row.
"""

from numba import cuda, int32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats = ptx.pointer("float32")


def scale_rows_kernel():
    @kernel(launch_bounds=128)
    def scale_rows(x: floats, s: floats, y: floats, rows: int32, columns: int32):
        row = cuda.grid(1)
        if row < rows:
            for c in range(columns):
                y[row * columns + c] = s[row] * x[row * columns + c]

    return scale_rows
