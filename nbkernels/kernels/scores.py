"""What some models do to the scores of attention beside scaling and masking them, for all of its kernels.

    soft cap (Gemma 2):  score = cap · tanh(scale · q·k / cap), so that no score leaves (-cap, cap)
    sink (gpt-oss):      exp(sink of the head) joins the sum of a row's weights, and has no value

Scores are in powers of two here, as in the kernels: times log2(e). A kernel gets scale / cap in place of its scale, and
cap · log2(e).
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32

from nbkernels import ptx

LOG2E = np.log2(np.e)


def score_factors(scale, soft_cap):
    """(the factor of q·k, arguments of a capped kernel beside it): scale · log2(e), or scale / cap and cap · log2(e)."""
    if soft_cap is None:
        return float(scale * LOG2E), ()
    return float(scale / soft_cap), (float(soft_cap * LOG2E),)


@cache
def soft_cap_function(exact):
    """cap(x, cap_log2) -> cap_log2 · tanh(x): a capped score, x being scale / cap · q·k.

    Without ``exact`` it is off by up to 3e-7 · cap, by ex2 and rcp: enough for 16-bit results, as weights are off by the same
    ratio. tanh.approx, off by 2^-11 of the score, is not: at scores of 30 weights would be off by 1.5%.
    """
    if exact:

        @cuda.jit(device=True, inline="always")
        def cap(x, cap_log2):
            # a bare product may be fused with a difference that follows, in one variant of a kernel and not in another
            return ptx.fma(float32(math.tanh(x)), cap_log2, float32(0.0))

    else:

        @cuda.jit(device=True, inline="always")
        def cap(x, cap_log2):
            # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends: exp(2x) is 0 or infinite there
            share = ptx.rcp(float32(1.0) + ptx.ex2(x * float32(2 * LOG2E)))
            return ptx.fma(share, float32(-2.0) * cap_log2, cap_log2)

    return cap


@cuda.jit(device=True, inline="always")
def join_sink(largest, total, sink):
    """(factor, sum) of a row whose keys are done: its vector times factor / sum is the result, with the sink in the sum.

    largest: the maximum of the row's scores in powers of two; total: the sum of its weights below that maximum; sink: the
    head's, as given.
    """
    new = ptx.fmax_nan(largest, sink * float32(LOG2E))
    factor = ptx.ex2(largest - new)
    return factor, ptx.fma(total, factor, ptx.ex2(ptx.fma(sink, float32(LOG2E), -new)))
