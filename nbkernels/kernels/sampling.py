"""Draw a token from logits without sorting them and without the host.

    score  = penalised(logit) / temperature                              penalty: divided where positive, else multiplied
    kept   = score among the top_k largest, then in the smallest set of largest whose probability reaches top_p,
             and exp(score - max) >= min_p
    token  = the first largest of score - max + g over kept, g = -log(-log(u)) (Gumbel 1954: this is a draw from softmax)

u comes from Philox4x32-10 (Salmon et al. 2011) at counter (token, step, row, 0), so a seed gives the same tokens on every
device (up to rounding: log differs in its last bit from NumPy's, which turns a draw about once in a million).

A block a row; the row stays in L2 and is walked once a pass. The k-th largest score, and the score where the probability
reaches top_p, are found by radix selection over the scores' ordered bits (``argmax.ordered``), a byte a pass from the top: each
pass adds the masses of the keys that share the bytes found so far into 256 bins, and a suffix sum names the next byte:

    bins:   0 … | b | … 255        mass above b  <  target  <=  mass above b + mass of b

A mass is 1 for top_k and a probability in units of 2^-26 for top_p: integers, so the order in which they are added is no
matter. Each is kept in two 13-bit halves, for which shared memory has 32-bit atomic additions and which up to 2^19 tokens can't
overflow.
"""

import math
from functools import cache, lru_cache

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint32, uint64

from nbkernels import ptx
from nbkernels.kernels.argmax import LARGEST_INDEX, block_largest, key_of, ordered
from nbkernels.kernels.elements import Cost, conversions
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch

THREADS = 1024  # one block must read the whole row
WARPS = THREADS // ptx.WARP
BINS = 256
HALVES = 2 * BINS
LOG2E = np.float32(np.log2(np.e))
MASS_UNIT = np.float32(2.0**26)
HALF_BITS = 13
LARGEST_MASS = 2 ** (2 * HALF_BITS) - 1
MOST_TOKENS = 2 ** (32 - HALF_BITS)
# Philox's multipliers and key increments
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
HALF_STEP = np.float32(2.0**-23)


@cuda.jit(device=True, inline="always")
def philox(c0, c1, c2, c3, k0, k1):
    """The first word of Philox4x32-10 at a counter of four words under a key of two."""
    for _ in range(10):
        high0 = ptx.mulhi(c0, uint32(MULTIPLIER_0))
        low0 = uint32(c0 * uint32(MULTIPLIER_0))
        high1 = ptx.mulhi(c2, uint32(MULTIPLIER_1))
        low1 = uint32(c2 * uint32(MULTIPLIER_1))
        c0 = uint32(high1 ^ c1 ^ k0)
        c1 = low1
        c2 = uint32(high0 ^ c3 ^ k1)
        c3 = low0
        k0 = uint32(k0 + uint32(WEYL_0))
        k1 = uint32(k1 + uint32(WEYL_1))
    return c0


@cuda.jit(device=True, inline="always")
def gumbel(token, step, row, seed_low, seed_high):
    """-log(-log(u)), u an odd multiple of 2^-24 in (0, 1)."""
    word = philox(token, step, row, uint32(0), seed_low, seed_high)
    uniform = float32((float32(uint32(word >> uint32(9))) + float32(0.5)) * HALF_STEP)
    return float32(-math.log(float32(-math.log(uniform))))


@cache
def _score(dtype, penalised, by_row):
    """score(logits, seen, at, seen_at, temperature, penalty): of one token. by_row: a penalty of 1 reads no mark."""
    from_storage, _ = conversions(dtype)

    @cuda.jit(device=True, inline="always")
    def score(logits, seen, at, seen_at, temperature, penalty):
        x = from_storage(logits[at])
        if penalised and (not by_row or penalty != float32(1.0)) and seen[seen_at] != 0:
            x = float32(x / penalty) if x > float32(0.0) else float32(x * penalty)
        return float32(x / temperature)

    return score


@cuda.jit(device=True, inline="always")
def _clear(halves):
    """Empty the bins; halves: shared uint32 [HALVES], the upper halves of the masses behind the lower ones."""
    cuda.syncthreads()
    if cuda.threadIdx.x < HALVES:
        halves[cuda.threadIdx.x] = uint32(0)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def _add_mass(halves, number, mass):
    """Add a mass to a bin."""
    cuda.atomic.add(halves, number, uint32(mass & uint32(2**HALF_BITS - 1)))
    upper = uint32(mass >> uint32(HALF_BITS))
    if upper != uint32(0):
        cuda.atomic.add(halves, uint32(number + uint32(BINS)), upper)


@cuda.jit(device=True, inline="always")
def _mass(halves, number):
    """The mass of a bin."""
    return uint64(uint64(halves[number]) + (uint64(halves[uint32(number + uint32(BINS))]) << uint64(HALF_BITS)))


@cuda.jit(device=True, inline="always")
def _choose_bin(halves, bins, chosen, above, target):
    """The byte whose bin holds the target mass, and the mass above it; every thread takes part. bins: shared uint64 [BINS]."""
    thread = uint32(cuda.threadIdx.x)
    own = uint64(0)
    if thread < uint32(BINS):
        own = _mass(halves, thread)
        bins[thread] = own
    for i in range(8):  # suffix sums, in place: bin b becomes the mass of b and all above it
        cuda.syncthreads()
        more = uint64(0)
        if thread < uint32(BINS) and uint32(thread + uint32(1 << i)) < uint32(BINS):
            more = bins[uint32(thread + uint32(1 << i))]
        cuda.syncthreads()
        if thread < uint32(BINS):
            bins[thread] = uint64(bins[thread] + more)
    if thread == uint32(0):
        chosen[0] = uint64(0)  # where all the mass is less than the target, everything is taken
        chosen[1] = above
    cuda.syncthreads()
    if thread < uint32(BINS):
        through = uint64(above + bins[thread])
        before = uint64(through - own)
        if before < target and through >= target:
            chosen[0] = uint64(thread)
            chosen[1] = before
    cuda.syncthreads()


def sample_kernel(dtype, greedy, penalised, by_count, by_mass, by_share, stepped, by_row=False):
    """logits [rows, vocab] -> out int32 [rows]; a block a row.

    greedy: temperature 0. penalised: a ``seen`` mask is read, and the token marked. by_count: top_k; by_mass: top_p;
    by_share: min_p. by_row: the numbers are arrays with one a row, which draws as a lone row would (``run_rows``).
    """
    score = _score(dtype, penalised, by_row)
    number = ptx.pointer("float32") if by_row else float32
    largest_key = block_largest(THREADS)
    _, block_max = ptx.block_reductions(THREADS)

    @kernel(launch_bounds=THREADS)
    def sample(
        logits: ptx.pointer(dtype),
        seen: ptx.pointer("uint8"),
        step: ptx.pointer("int32"),
        out: ptx.pointer("int32"),
        vocab: uint32,
        logits_stride: int64,
        seen_stride: int64,
        out_stride: int64,
        temperatures: number,
        penalties: number,
        top_ks: ptx.pointer("int32") if by_row else uint32,
        top_ps: number,
        min_ps: number,
        seeds_low: ptx.pointer("uint32") if by_row else uint32,
        seeds_high: None if by_row else uint32,
        seen_rows: ptx.pointer("int32") if by_row else None,
    ):
        scratch = cuda.shared.array(32, uint64)
        warp_values = cuda.shared.array(WARPS, float32)
        halves = cuda.shared.array(HALVES, uint32)
        bins = cuda.shared.array(BINS, uint64)
        chosen = cuda.shared.array(2, uint64)
        row = int64(cuda.blockIdx.x)
        thread = uint32(cuda.threadIdx.x)
        at = row * logits_stride
        if by_row:
            temperature, penalty = temperatures[row], penalties[row]
            top_k, top_p, min_p = uint32(top_ks[row]), top_ps[row], min_ps[row]
            seed_low, seed_high = seeds_low[2 * row], seeds_low[2 * row + 1]
            seen_at, draw_row = int64(seen_rows[row]) * seen_stride, uint32(0)
            draws = temperature > float32(0.0)
            if not draws:
                temperature = float32(1.0)
            counts = draws and top_k != uint32(0) and top_k < vocab
            masses = draws and top_p < float32(1.0)
            marks = penalty != float32(1.0)
        else:
            temperature, penalty, top_k, top_p, min_p = temperatures, penalties, top_ks, top_ps, min_ps
            seed_low, seed_high = seeds_low, seeds_high
            seen_at, draw_row = row * seen_stride, uint32(row)
            draws, counts, masses, marks = True, True, True, True

        best = uint64(0)
        if greedy:
            i = thread
            while i < vocab:
                x = score(logits, seen, at + int64(i), seen_at + int64(i), float32(1.0), penalty)
                best = max(best, key_of(x, i))
                i = uint32(i + uint32(THREADS))
        else:
            top = float32(-np.inf)
            i = thread
            while i < vocab:
                top = ptx.fmax(top, score(logits, seen, at + int64(i), seen_at + int64(i), temperature, penalty))
                i = uint32(i + uint32(THREADS))
            top = block_max(top, warp_values)

            threshold = uint32(0)  # the smallest ordered score that is kept
            if by_count and counts:
                prefix = uint32(0)
                above = uint64(0)
                for level in range(4):
                    shift = uint32(24 - 8 * level)
                    _clear(halves)
                    i = thread
                    while i < vocab:
                        key = ordered(score(logits, seen, at + int64(i), seen_at + int64(i), temperature, penalty))
                        # shifted in 64 bits, since a shift by 32 has no meaning in 32
                        if uint32(uint64(key) >> uint64(shift + uint32(8))) == prefix:
                            _add_mass(halves, uint32(uint32(key >> shift) & uint32(BINS - 1)), uint32(1))
                        i = uint32(i + uint32(THREADS))
                    cuda.syncthreads()
                    _choose_bin(halves, bins, chosen, above, uint64(top_k))
                    prefix = uint32(uint32(prefix << uint32(8)) | uint32(chosen[0]))
                    above = chosen[1]
                threshold = prefix
            if by_mass and masses:
                target = uint64(0)
                prefix = uint32(0)
                above = uint64(0)
                for level in range(4):
                    shift = uint32(24 - 8 * level)
                    _clear(halves)
                    i = thread
                    while i < vocab:
                        x = score(logits, seen, at + int64(i), seen_at + int64(i), temperature, penalty)
                        key = ordered(x)
                        if key >= threshold and uint32(uint64(key) >> uint64(shift + uint32(8))) == prefix:
                            mass = uint32(ptx.ex2(float32(x - top) * LOG2E) * MASS_UNIT)
                            mass = min(mass, uint32(LARGEST_MASS))
                            _add_mass(halves, uint32(uint32(key >> shift) & uint32(BINS - 1)), mass)
                        i = uint32(i + uint32(THREADS))
                    cuda.syncthreads()
                    if level == 0:
                        total = uint64(0)
                        for b in range(BINS):
                            total = uint64(total + _mass(halves, uint32(b)))
                        target = max(uint64(math.ceil(float64(total) * float64(top_p))), uint64(1))
                        cuda.syncthreads()
                    _choose_bin(halves, bins, chosen, above, target)
                    prefix = uint32(uint32(prefix << uint32(8)) | uint32(chosen[0]))
                    above = chosen[1]
                threshold = max(threshold, prefix)

            counter = uint32(0)
            if stepped:
                counter = uint32(step[row if by_row else 0])
            i = thread
            while i < vocab:
                x = score(logits, seen, at + int64(i), seen_at + int64(i), temperature, penalty)
                kept = ordered(x) >= threshold
                if by_share:
                    kept = kept and ptx.ex2(float32(x - top) * LOG2E) >= min_p
                if by_row and not draws:
                    best = max(best, key_of(x, i))
                elif kept:
                    noisy = float32(float32(x - top) + gumbel(i, counter, draw_row, seed_low, seed_high))
                    best = max(best, key_of(noisy, i))
                i = uint32(i + uint32(THREADS))
        best = largest_key(best, scratch)
        if thread == uint32(0):
            token = uint32(uint32(LARGEST_INDEX) - uint32(best & uint64(0xFFFFFFFF)))
            out[row * out_stride] = int32(token)
            if penalised and marks:
                seen[seen_at + int64(token)] = 1

    return sample


@lru_cache(maxsize=1024)
def plan(rows, dtype, greedy, penalised, by_count, by_mass, by_share, stepped, by_row=False):
    """A block of 1024 threads a row."""
    constants = (dtype, greedy, penalised, by_count, by_mass, by_share, stepped, *([True] if by_row else []))
    return Plan(sample_kernel, constants, (rows, 1, 1), (THREADS, 1, 1))


def cost(rows, vocab, itemsize):
    """Each logit read once, one token a row written."""
    return Cost(bytes=rows * (vocab * itemsize + 4), flops=8 * rows * vocab)


def run(logits, seen, step, out, options, device, stream):
    """See ``nbkernels.sample``: logits [rows, vocab], seen [rows, vocab] or None, step [1] or None, out [rows]: DeviceArrays."""
    rows, vocab = logits.shape
    greedy = options["temperature"] == 0
    by_count = not greedy and options["top_k"] is not None and options["top_k"] < vocab
    by_mass = not greedy and options["top_p"] is not None and options["top_p"] < 1
    by_share = not greedy and options["min_p"] is not None
    if by_mass and vocab > MOST_TOKENS:
        raise ValueError(f"logits: {vocab} columns, top_p takes at most {MOST_TOKENS}")
    chosen = plan(rows, logits.dtype, greedy, seen is not None, by_count, by_mass, by_share, step is not None)
    pointers = (logits.pointer, *(0 if x is None else x.pointer for x in (seen, step)), out.pointer)
    strides = (logits.strides[0], 0 if seen is None else seen.strides[0], out.strides[0])
    numbers = (
        options["temperature"],
        options["repetition_penalty"],
        options["top_k"] if by_count else 0,
        options["top_p"] if by_mass else 1.0,
        options["min_p"] if by_share else 0.0,
        options["seed"] & 0xFFFFFFFF,
        options["seed"] >> 32,
    )
    launch(chosen, (*pointers, vocab, *strides, *numbers), device, stream)


def run_rows(logits, numbers, seen, out, device, stream):
    """See ``nbkernels.sample_rows``; numbers: its arrays by name, contiguous DeviceArrays; seen may be None."""
    rows, vocab = logits.shape
    if vocab > MOST_TOKENS:
        raise ValueError(f"logits: {vocab} columns, wanted at most {MOST_TOKENS}")
    chosen = plan(rows, logits.dtype, False, seen is not None, True, True, True, True, by_row=True)
    pointers = (logits.pointer, 0 if seen is None else seen.pointer, numbers["step"].pointer, out.pointer)
    strides = (logits.strides[0], 0 if seen is None else seen.strides[0], out.strides[0])
    names = ("temperature", "repetition_penalty", "top_k", "top_p", "min_p", "seed", "seen_row")
    launch(chosen, (*pointers, vocab, *strides, *(numbers[name].pointer for name in names)), device, stream)
