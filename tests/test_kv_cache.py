"""The paged KV cache against a Python model of what each sequence holds: whatever is done, no page is lost or seen by another."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from compare import to_host
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import nbkernels as nbk
from nbkernels.model import backend
from nbkernels.model.kv_cache import NO_PAGE, OutOfPages

KV_HEADS, HEAD_DIM, PAGE_SIZE = 2, 4, 16
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def make(pages=9, max_sequences=4, dtype=F32, layers=2, max_pages=4):
    return nbk.KVCache(
        layers, KV_HEADS, HEAD_DIM, dtype,
        pages=pages, page_size=PAGE_SIZE, max_sequences=max_sequences, max_pages_per_sequence=max_pages,
    )  # fmt: skip


def append(cache, sequences, tokens, first, dtype=F32):
    """A step in which token t of row b is the number first + b · tokens + t (+ the layer), in every head; in v less one."""
    step = cache.begin(sequences, tokens)
    numbers = np.arange(first, first + len(sequences) * tokens, dtype=np.float32).reshape(len(sequences), tokens)
    k = np.broadcast_to(numbers[..., None, None], (*numbers.shape, KV_HEADS, HEAD_DIM))
    turn = np.ones((cache.capacity, 0), np.float32)
    for layer, (k_pages, v_pages, k_scales, v_scales) in enumerate(cache.layers):
        q, k_new, v_new = (backend.place((x + layer).astype(dtype)) for x in (k, k, k - 1))
        backend.operations().rotary_append(
            q, k_new, v_new, *map(backend.place, (turn, turn)), step.positions, k_pages, v_pages,
            block_table=step.block_table, k_scales=k_scales, v_scales=v_scales,
        )  # fmt: skip
    cache.end(step)
    return numbers.tolist()


def held(cache, sequence, layer=0):
    """(numbers of k, those of v) of a sequence, by the table and the length on the device."""
    table, length = to_host(cache.block_table)[sequence], int(to_host(cache.lengths)[sequence])
    found = []
    k_pages, v_pages, k_scales, v_scales = cache.layers[layer]
    for pages, scales in ((k_pages, k_scales), (v_pages, v_scales)):
        values = to_host(pages)[table[: -(-length // PAGE_SIZE)]].astype(np.float32)
        if scales is not None:
            values = values * to_host(scales)[table[: -(-length // PAGE_SIZE)]][..., None]
        rows = values.reshape(-1, KV_HEADS * HEAD_DIM)[:length]
        assert (rows == rows[:, :1]).all()
        found.append(rows[:, 0].tolist())
    return found


class Machine(RuleBasedStateMachine):
    """Random operations. ``tokens``: sequence -> the numbers that it holds."""

    def __init__(self):
        super().__init__()
        self.device = nbk.device("cpu")
        self.device.__enter__()
        self.cache = make()
        self.tokens = {}
        self.next = 1

    def teardown(self):
        for sequence in list(self.tokens):
            self.cache.free(sequence)
        assert self.cache.free_pages == self.cache.pages and self.cache.pages_in_use == 0
        assert sorted(self.cache._free) == list(range(self.cache.pages))
        self.device.__exit__(None, None, None)

    def state(self):
        cache = self.cache
        return ([list(p or ()) for p in cache._pages], list(cache._owners), list(cache._free), cache._table.tolist(),
                cache._lengths.tolist(), cache.lengths.tolist(), cache.positions.tolist())  # fmt: skip

    @rule()
    def add(self):
        if len(self.tokens) == self.cache.max_sequences:
            with pytest.raises(OutOfPages, match="all 4 sequences"):
                self.cache.add()
            return
        sequence = self.cache.add()
        assert sequence not in self.tokens
        self.tokens[sequence] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        if len(self.tokens) == self.cache.max_sequences:
            return
        before = self.cache.pages_in_use
        new = self.cache.fork(sequence)
        assert self.cache.pages_in_use == before, "a fork takes no page"
        self.tokens[new] = list(self.tokens[sequence])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=st.integers(1, 40))
    def append(self, data, tokens):
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        before = self.state()
        try:
            added = append(self.cache, sequences, tokens, self.next)
        except OutOfPages:
            assert self.state() == before
            # and there are too few indeed: not even without what is shared would they do
            owned = Counter(page for pages in before[0] for page in pages)
            wanted = sum(
                max(0, -(-(len(self.tokens[s]) + tokens) // PAGE_SIZE) - len(before[0][s]))
                + any(owned[p] > 1 for p in before[0][s][len(self.tokens[s]) // PAGE_SIZE :])
                for s in sequences
            )
            assert wanted > len(before[2])
            return
        except ValueError as error:
            assert "do not fit" in str(error) and self.state() == before
            assert any(len(self.tokens[s]) + tokens > self.cache.capacity for s in sequences)
            return
        self.next += len(sequences) * tokens
        for sequence, numbers in zip(sequences, added, strict=True):
            self.tokens[sequence] += numbers

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def reserve(self, data, tokens):
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        before = self.state()
        try:
            self.cache.reserve(sequences, tokens)
        except (OutOfPages, ValueError):
            assert self.state() == before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(ValueError, match="none of this cache"):
            self.cache.length(sequence)

    @invariant()
    def contents(self):
        for sequence, numbers in self.tokens.items():
            assert self.cache.length(sequence) == len(numbers)
            for layer in range(2):
                k, v = held(self.cache, sequence, layer)
                assert k == [n + layer for n in numbers] and v == [n + layer - 1 for n in numbers]
        np.testing.assert_array_equal(self.cache.lengths, self.cache.positions)

    @invariant()
    def prefix(self):
        for others in ([0, 1], [1, 2, 3], [3, 0]):
            if all(s in self.tokens for s in others):
                common = self.cache.shared_prefix(others)
                pages = [self.cache._pages[s][: common // PAGE_SIZE] for s in others]
                assert common % PAGE_SIZE == 0 and all(p == pages[0] for p in pages)
                assert common <= min(len(self.tokens[s]) for s in others)
                at = common // PAGE_SIZE  # and not one page more
                more = {self.cache._pages[s][at] if len(self.tokens[s]) >= common + PAGE_SIZE else -1 for s in others}
                assert len(more) > 1 or -1 in more

    @invariant()
    def pages(self):
        cache = self.cache
        owned = Counter(page for pages in cache._pages for page in pages or ())
        assert [owned[page] for page in range(cache.pages)] == cache._owners
        assert sorted(cache._free) == [page for page in range(cache.pages) if not owned[page]]
        np.testing.assert_array_equal(cache._table, cache.block_table)
        for sequence, pages in enumerate(cache._pages):
            row = cache._table[sequence]
            assert row[: len(pages or ())].tolist() == list(pages or ()) and (row[len(pages or ()) :] == NO_PAGE).all()


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestRandomOperations = Machine.TestCase


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.int8)], ids=str)
def test_forks_copy_on_write(device, dtype):
    """On the device: what is shared, what is copied, and that steps of rows apart from each other are like those in a row."""
    cache = make(dtype=dtype)
    first = cache.add()
    append(cache, [first], 20, 1, BF16)
    forks = [cache.fork(first) for _ in range(3)]
    assert cache.pages_in_use == 2
    cache.free(forks[1])
    append(cache, [first, forks[0]], 2, 100, BF16)
    assert cache.pages_in_use == 4, "two of three writers took a copy of the second page, and nobody of the first"
    append(cache, [first, forks[2]], 13, 140, BF16)  # rows 0 and 3; the last owner keeps the page
    assert cache.pages_in_use == 6
    whole = np.arange(1, 21).tolist()
    want = {
        first: [*whole, 100, 101, *range(140, 153)],
        forks[0]: [*whole, 102, 103],
        forks[2]: [*whole, *range(153, 166)],
    }
    for sequence, numbers in want.items():
        for found, n in zip(held(cache, sequence), (numbers, np.array(numbers) - 1), strict=True):
            np.testing.assert_allclose(found, n, rtol=1e-6)  # int8: 127 times its scale
    np.testing.assert_array_equal(to_host(cache.positions), [35, 22, 0, 33])
    assert to_host(cache.block_table)[forks[1]].tolist() == [NO_PAGE] * 4


def test_bytes():
    with nbk.device("cpu"):
        assert make(dtype=BF16).nbytes == 2 * 2 * 9 * PAGE_SIZE * KV_HEADS * HEAD_DIM * 2
        assert make(dtype=np.int8).nbytes == 2 * 2 * 9 * PAGE_SIZE * KV_HEADS * (HEAD_DIM + 4)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda c: make(pages=0), ValueError, "pages: 0"),
        (lambda c: make(layers=1.5), TypeError, "layers: float"),
        (lambda c: make(dtype=np.int32), TypeError, "dtype: int32"),
        (lambda c: nbk.KVCache(1, 1, 8, F32, pages=2, page_size=24), ValueError, "page_size: 24"),
        (lambda c: c.reserve([0, 0], 1), ValueError, "wanted each of one or more once"),
        (lambda c: c.reserve([], 1), ValueError, "sequences"),
        (lambda c: c.reserve([1], 1), ValueError, "sequence: 1 is none of this cache"),
        (lambda c: c.reserve([0], -1), ValueError, "tokens: -1"),
        (lambda c: c.reserve([0], 1.0), TypeError, "tokens: float"),
        (lambda c: c.begin([0], 65), ValueError, "0 \\+ 65 do not fit into the 64 of a sequence"),
        (lambda c: c.truncate(0, 1), ValueError, "length: 1 of a sequence of 0"),
        (lambda c: c.truncate(0, "1"), TypeError, "length: str"),
        (lambda c: c.length("a"), TypeError, "sequence: str"),
        (lambda c: c.fork(-1), ValueError, "sequence: -1"),
    ],
)
def test_errors(call, error, message):
    with nbk.device("cpu"):
        cache = make()
        cache.add()
        with pytest.raises(error, match=message):
            call(cache)
