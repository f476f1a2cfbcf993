"""Common wrong answers to the lessons' exercises.

number -> [(text of the solution, what stands there instead, part of the message it must get)]
"""

_AXPY = "i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x"
_STORE = "y[i] = a * x[i] + y[i]"
_LOOP = "for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):"
_FACTOR = "y[row * columns + c] = factor * x[row * columns + c]"
_TILE = "tile[r, lane] = x[(down + r) * columns + across + lane]"
_OUT = "y[(across + r) * rows + down + lane] = tile[lane, r]"
_SHUFFLE = "total += ptx.shfl_bfly(total, uint32(16 >> stage))"
_SQUARES = "total += x[first + c] * x[first + c]"

MISTAKES = {
    1: [
        ("        if i < n:\n            ", "        ", "reads x[1000] of 1000 elements, outside the array"),
        ("i < n", "i <= n", "thread 232 of block 3 reads x[1000] of 1000 elements"),
        ("i < n", "i < n - 1", "the last element is left as it was"),
        (_AXPY, "i = cuda.threadIdx.x", "of block 3 on y[0]"),
        (_AXPY, "i = cuda.blockIdx.x * cuda.gridDim.x + cuda.threadIdx.x", "a race between"),
        (_AXPY, "i = cuda.threadIdx.x * cuda.gridDim.x + cuda.blockIdx.x", "uncoalesced"),
        (_AXPY, "i = cuda.blockIdx.x + cuda.threadIdx.x", "a race between"),
        (_STORE, "y[i] = x[i] + y[i]", "x is missing its factor"),
        (_STORE, "y[i] = a * x[i]", "what y held is lost"),
        (_STORE, "y[i] = a * (x[i] + y[i])", "a·(x + y)"),
        (_STORE, "y[i] = a * x[0] + y[i]", "wrong values: y[1] is"),
        (_AXPY, "i = cuda.blockIdx.x * cuda.blockDim + cuda.threadIdx.x", "mul(int32, Dim3)"),
    ],
    2: [
        ("row = cuda.blockIdx.x", "row = cuda.threadIdx.x", "thread 0 of block"),
        (_LOOP, "for c in range(cuda.blockDim.x):", "is never written"),
        (_LOOP, "for c in range(cuda.threadIdx.x, columns, columns):", "is never written"),
        (_LOOP, "for c in range(cuda.threadIdx.x, columns, 32):", "a race"),
        (_LOOP, "for c in range(cuda.threadIdx.x, columns - 1, cuda.blockDim.x):", "y[0, 191] is never written"),
        (_LOOP, "for c in range(cuda.threadIdx.x, columns + 1, cuda.blockDim.x):", "a race"),
        (
            _LOOP,
            "for c in range(2 * cuda.threadIdx.x, min(columns, 2 * cuda.threadIdx.x + 2)):",
            "uncoalesced",
        ),
        ("factor = s[row]", "factor = s[0]", "every row has the first row's factor"),
        (_FACTOR, "y[row * columns + c] = s[c] * x[row * columns + c]", "s[row], not s[column]"),
        (_FACTOR, "y[row * columns + c] = factor + x[row * columns + c]", "this is x + s"),
        (_FACTOR, "y[row * rows + c] = factor * x[row * rows + c]", "outside the array"),
        (_FACTOR, "y[row * columns + c] = factor * factor * x[row * columns + c]", "the factor is squared"),
    ],
    3: [
        ("        cuda.syncthreads()\n", "", "a race between threads"),
        ("WIDTH = 33", "WIDTH = 32", "bank conflicts: line"),
        ("WIDTH = 33", "WIDTH = 34", "2 times as many"),
        ("WIDTH = 33", "WIDTH = 31", "a race"),
        ("        cuda.syncthreads()\n", "        ptx.warp_sync()\n", "a race between threads"),
        (_OUT, "y[(across + r) * rows + down + lane] = tile[r, lane]", "not transposed inside"),
        (_OUT, "y[(down + lane) * rows + across + r] = tile[lane, r]", "not transposed inside"),
        (_OUT, "y[(across + lane) * rows + down + r] = tile[r, lane]", "uncoalesced"),
        (_OUT, "y[(across + 31 - r) * rows + down + lane] = tile[lane, r]", "upside down"),
        (_TILE, "tile[lane, r] = x[(down + r) * columns + across + lane]", "not transposed inside"),
        (
            "for r in range(warp, TILE, WARPS):\n            tile",
            "for r in range(warp, TILE - 8, WARPS):\n            tile",
            "which no thread has written",
        ),
        (
            "        cuda.syncthreads()\n",
            "        if warp < 7:\n            cuda.syncthreads()\n",
            "a race between threads",
        ),
    ],
    4: [
        ("range(5)", "range(4)", "one of the five shuffles"),
        ("range(5)", "range(3)", "two of the five shuffles"),
        ("range(5)", "range(6)", "counts twice"),
        (f"        for stage in range(5):\n            {_SHUFFLE}\n", "", "nothing is added over the lanes"),
        (_SHUFFLE, "total = max(total, ptx.shfl_bfly(total, uint32(16 >> stage)))", "add, do not compare"),
        (_SHUFFLE, "total += ptx.shfl_bfly(total, uint32(16))", "must halve each time"),
        ("math.sqrt(total)", "total", "the square root is missing"),
        ("math.sqrt(total)", "math.sqrt(total / columns)", "root mean square"),
        (_SQUARES, "total += x[first + c]", "not their squares"),
        (_SQUARES, "total += abs(x[first + c])", "not squares"),
        ("x[first + c] * inverse", "x[first + c] / inverse", "this is x times the length"),
        (
            f"            {_SHUFFLE}\n",
            f"            if lane < 16:\n                {_SHUFFLE}\n",
            "lanes 16 to 31 are left out",
        ),
        ("        if row >= rows:\n            return\n", "", "outside the array"),
    ],
}
