"""Exercise 9: the fragments of one mma.sync.

d [16, 8] float32 = a [16, 16] · b [16, 8] of bfloat16. a comes as words of two numbers, [16, 8]; b as its transpose,
[8, 8] words. Lane l has row = l / 4 and pair = l % 4. Of a it holds the words (row, pair), (row + 8, pair), (row,
pair + 4), (row + 8, pair + 4), of b those at pair and pair + 4 of column ``row``. Two of the words of a are not right
yet.
"""

from numba import cuda, float32, types, uint32

from nbkernels import ptx
from nbkernels.launch.compile import kernel

floats, words = ptx.pointer("float32"), types.CPointer(uint32)


def product_kernel():
    @kernel(launch_bounds=32)
    def product(a: words, b: words, d: floats):
        lane = uint32(cuda.threadIdx.x)
        row, pair = lane // uint32(4), lane % uint32(4)
        a0 = a[row * 8 + pair]
        a1 = a[row * 8 + pair + 4]  # …
        a2 = a[(row + 8) * 8 + pair]  # …
        a3 = a[(row + 8) * 8 + pair + 4]
        b0 = b[row * 8 + pair]
        b1 = b[row * 8 + pair + 4]
        zero = float32(0)
        d0, d1, d2, d3 = ptx.mma_m16n8k16_bf16(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
        d[row * 8 + 2 * pair] = d0
        d[row * 8 + 2 * pair + 1] = d1
        d[(row + 8) * 8 + 2 * pair] = d2
        d[(row + 8) * 8 + 2 * pair + 1] = d3

    return product
