"""Sequences of unequal length one after another, without padding: which tile of which sequence a block works on.

Sequence b has rows offsets[b] to offsets[b + 1] - 1. The host knows neither lengths nor how many tiles there are, but a bound:
each sequence begins at the tile of the whole in which its first row lies, and one further for each sequence before it,

    first_tile(b) = offsets[b] // tile + b        so there are at most total // tile + sequences of them

and no two sequences meet, as a sequence of n rows has ceil(n / tile) tiles at most (n + offset % tile) // tile + 1. A tile behind
its sequence's last row has nothing to do. Offsets that don't ascend give wrong results, and reach no row outside of the arrays.
"""

from functools import cache

from numba import cuda, int32, uint32


def tile_count(total, tile, sequences):
    """How many tiles of so many rows there are at most."""
    return total // tile + sequences


@cuda.jit(device=True, inline="always")
def span(offsets, sequence, total):
    """(first row, rows) of a sequence, inside of the array whatever the offsets say."""
    first = min(max(offsets[sequence], int32(0)), total)
    end = min(max(offsets[uint32(sequence + uint32(1))], first), total)
    return first, int32(end - first)


@cache
def find_function(tile):
    """find(number, offsets, sequences, total) -> (sequence, its first tile) of the tile with that number, by bisection."""

    @cuda.jit(device=True, inline="always")
    def first_tile(offsets, sequence, total):
        row = min(max(offsets[sequence], int32(0)), total)
        return uint32(uint32(uint32(row) // uint32(tile)) + sequence)

    @cuda.jit(device=True, inline="always")
    def find(number, offsets, sequences, total):
        low, high = uint32(0), sequences
        while uint32(low + uint32(1)) < high:
            middle = uint32(uint32(low + high) // uint32(2))
            if first_tile(offsets, middle, total) <= number:
                low = middle
            else:
                high = middle
        return low, first_tile(offsets, low, total)

    return find


@cache
def queries_function(tile):
    """queries(number, query_offsets, kv_offsets, sequences, total_q, total_kv) -> (first row of the tile in its sequence, where
    the sequence's queries begin, how many, where its keys begin, how many). The first row is behind the last where the tile is
    empty.
    """
    find = find_function(tile)

    @cuda.jit(device=True, inline="always")
    def queries(number, query_offsets, kv_offsets, sequences, total_q, total_kv):
        sequence, first_tile = find(number, query_offsets, sequences, total_q)
        q_at, q_len = span(query_offsets, sequence, total_q)
        kv_at, count = span(kv_offsets, sequence, total_kv)
        first_row = q_len
        if first_tile <= number:
            first_row = min(int32(uint32(number - first_tile) * uint32(tile)), q_len)
        return first_row, q_at, q_len, kv_at, count

    return queries
