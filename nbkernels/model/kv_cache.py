"""The paged KV cache: what attention remembers of each token, in pages that sequences take, share and give back.

A page holds page_size tokens of one sequence, in every layer at the same number (Kwon et al. 2023, "PagedAttention"). The host
keeps who has which page; the device has a table of them, positions and lengths, at addresses that never change, so that a step
can be a CUDA graph:

    sequence 0:  | page 4 | page 1 | page 7, partly full |       block_table[0] = 4, 1, 7, -1, …
    its fork 1:  | page 4 | page 1 | page 7              |       block_table[1] = 4, 1, 7, -1, …
    1 writes:    | page 4 | page 1 | page 2, a copy of 7 |       block_table[1] = 4, 1, 2, -1, …
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from nbkernels import ops
from nbkernels.arrays import FLOATS
from nbkernels.model import backend

INT8, INT32, FLOAT32 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.float32)
NO_PAGE = -1


class OutOfPages(RuntimeError):
    """No page, or no row of the table, is free for what was asked. Every sequence is as it was."""


class LayerPages(NamedTuple):
    """One layer's pools: k, v [pages, page_size, kv_heads, head_dim]; scales of int8 [pages, page_size, kv_heads], or None."""

    k: object
    v: object
    k_scales: object
    v_scales: object


class Step(NamedTuple):
    """What the kernels of a step of some sequences read: block_table [sequences, max_pages], positions and lengths [sequences].

    positions says where a sequence's first new token goes, lengths how many tokens there are with the new ones; prefix: how
    many tokens lie in pages that all of them share.
    """

    sequences: tuple
    tokens: int
    prefix: int
    block_table: object
    positions: object
    lengths: object


class Saved(NamedTuple):
    """A sequence in host memory: how many tokens it has, and of each pool's array its pages [pages, …]."""

    length: int
    arrays: tuple


class KVCache:
    """Keys and values of up to max_sequences sequences, in ``pages`` pages of page_size tokens (a power of two, 16 to 256).

    dtype: of keys and values, or int8: then each has a float32 scale a token and head. max_pages_per_sequence: columns of the
    table (default: as many as there are pages). A sequence is named by its row of the table. The arrays are made on the device
    in force. TypeError or ValueError for wrong arguments and for sequences that are none.

    tables_on_device: False for one who hands the kernels tables of his own, made of ``page_numbers``: there is no ``begin`` then.
    """

    def __init__(
        self,
        layers,
        kv_heads,
        head_dim,
        dtype,
        *,
        pages,
        page_size=64,
        max_sequences=1,
        max_pages_per_sequence=None,
        tables_on_device=True,
    ):
        max_pages = pages if max_pages_per_sequence is None else max_pages_per_sequence
        sizes = {
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "pages": pages,
            "max_sequences": max_sequences,
            "max_pages_per_sequence": max_pages,
        }
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name}: {type(value).__name__}, wanted an integer")
            if value < 1:
                raise ValueError(f"{name}: {value}, wanted at least 1")
        if page_size not in ops.PAGE_SIZES:
            raise ValueError(f"page_size: {page_size!r}, wanted one of {', '.join(map(str, ops.PAGE_SIZES))}")
        dtype = np.dtype(dtype)
        if dtype != INT8 and dtype not in FLOATS:
            raise TypeError(f"dtype: {dtype}, wanted float32, float16, bfloat16 or int8")
        self.page_size = page_size
        self.dtype = dtype
        self.pages = pages
        self.max_sequences = max_sequences
        self._arrays = []  # those of which a copy of a page is made, [pages, …]
        self.layers = [self._make_layer(kv_heads, head_dim) for _ in range(layers)]
        self.tables_on_device = tables_on_device
        if tables_on_device:
            self.block_table = backend.zeros((max_sequences, max_pages), INT32)
            self.positions = backend.zeros((max_sequences,), INT32)
            self.lengths = backend.zeros((max_sequences,), INT32)
        # the host's own: lengths, the table, each sequence's pages (None: no sequence), how many have a page, and the free ones
        self._lengths = np.zeros(max_sequences, np.int32)
        self._table = np.full((max_sequences, max_pages), NO_PAGE, np.int32)
        self._pages = [None] * max_sequences
        self._owners = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # the last is taken first: a new sequence gets pages in a row
        if tables_on_device:
            backend.overwrite(self.block_table, self._table)

    def _make_layer(self, kv_heads, head_dim):
        shape = (self.pages, self.page_size, kv_heads, head_dim)
        k, v = (backend.zeros(shape, self.dtype) for _ in range(2))
        self._arrays += [k, v]
        if self.dtype != INT8:
            return LayerPages(k, v, None, None)
        # a head's scales follow each other token by token, as a kernel that walks one head's keys reads them
        scales = [backend.zeros((self.pages, kv_heads, self.page_size), FLOAT32) for _ in range(2)]
        self._arrays += scales
        return LayerPages(k, v, *(s.swapaxes(1, 2) for s in scales))

    @property
    def nbytes(self):
        """Bytes of all keys and values, and of their scales."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def capacity(self):
        """Tokens that a sequence may have, if there are pages."""
        return self._table.shape[1] * self.page_size

    @property
    def free_pages(self):
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def pages_in_use(self):
        """Pages that some sequence has; a shared one counts once."""
        return self.pages - len(self._free)

    def length(self, sequence):
        """Tokens of a sequence, by the host's count."""
        self._check(sequence)
        return int(self._lengths[sequence])

    # ---- sequences -----------------------------------------------------------------------------------------------------------

    def add(self):
        """A new sequence without tokens: its number, the lowest that is free. OutOfPages where all are taken."""
        sequence = next((i for i, pages in enumerate(self._pages) if pages is None), None)
        if sequence is None:
            raise OutOfPages(f"all {self.max_sequences} sequences of the KV cache are in use")
        self._pages[sequence] = []
        self._publish(sequence, 0)
        return sequence

    def fork(self, sequence):
        """A new sequence with the same tokens. Pages are shared until one of those writes there. OutOfPages as ``add``."""
        self._check(sequence)
        new = self.add()
        length = int(self._lengths[sequence])
        self._pages[new] = self._pages[sequence][: self._pages_of(length)]
        for page in self._pages[new]:
            self._owners[page] += 1
        self._publish(new, length)
        return new

    def page_numbers(self, sequence):
        """The numbers of a sequence's pages, in their order."""
        self._check(sequence)
        return list(self._pages[sequence])

    def table_row(self, sequence):
        """The host's row of a sequence, int32 [max_pages_per_sequence], NO_PAGE behind its pages; not to be written to."""
        self._check(sequence)
        return self._table[sequence]

    def table_rows(self, sequences, columns):
        """A copy of the first columns of the rows of a list of sequences, each as often as it stands there."""
        return self._table[sequences, :columns]

    def room(self, sequence):
        """How many more tokens fit into the pages that a sequence has."""
        return len(self._pages[sequence]) * self.page_size - int(self._lengths[sequence])

    def adopt(self, sequence, pages):
        """Extend a sequence by full pages that were written before, and that it shares from now on with whoever has them.

        The tokens must fill the pages that the sequence has: ValueError.
        """
        self._check(sequence)
        length = int(self._lengths[sequence])
        own = self._pages[sequence]
        if length != len(own) * self.page_size:
            raise ValueError(f"sequence: {length} tokens, wanted {len(own)} full pages of {self.page_size}")
        if length + len(pages) * self.page_size > self.capacity:
            raise ValueError(f"pages: {len(pages)} do not fit into the {self.capacity} tokens of a sequence")
        self.hold(pages)
        own.extend(pages)
        self._publish(sequence, length + len(pages) * self.page_size)

    def hold(self, pages):
        """Keep pages, whatever their sequences do, until they are ``drop``ped. ValueError for one that nobody has."""
        for page in pages:
            if not 0 <= page < self.pages or not self._owners[page]:
                raise ValueError(f"pages: {page}, which no sequence has")
        for page in pages:
            self._owners[page] += 1

    def drop(self, pages):
        """Give back pages that were held."""
        for page in pages:
            self._disown(page)

    def owners(self, page):
        """How many have a page: sequences, and those who ``hold`` it."""
        return self._owners[page]

    def save(self, sequence):
        """A copy of a sequence in host memory, a ``Saved``; the sequence stays as it is."""
        self._check(sequence)
        length = int(self._lengths[sequence])
        pages = self._pages[sequence][: self._pages_of(length)]
        arrays = tuple(np.array([backend.fetch(array[page]) for page in pages]) for array in self._arrays)
        return Saved(length, arrays)

    def restore(self, saved):
        """A new sequence that is what was saved, to the bit: its number. OutOfPages, or all as it was."""
        sequence = self.add()
        try:
            self.reserve((sequence,), saved.length)
        except OutOfPages:
            self.free(sequence)
            raise
        for array, values in zip(self._arrays, saved.arrays, strict=True):
            for page, content in zip(self._pages[sequence], values, strict=True):
                backend.overwrite(array[page], content)
        self._publish(sequence, saved.length)
        return sequence

    def shared_prefix(self, sequences):
        """How many leading tokens of some sequences lie in pages that all of them share; 0 for a lone one."""
        sequences = self._checked(sequences)
        if len(sequences) == 1:
            return 0
        tables = self._table[list(sequences)]
        full = int(self._lengths[list(sequences)].min()) // self.page_size
        apart = (tables[:, :full] != tables[0, :full]).any(axis=0)
        return self.page_size * (int(apart.argmax()) if apart.any() else full)

    def truncate(self, sequence, length):
        """Forget all tokens behind the first ``length``, and give back the pages that are not needed for them."""
        self._check(sequence)
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
            raise TypeError(f"length: {type(length).__name__}, wanted an integer")
        if not 0 <= length <= self._lengths[sequence]:
            raise ValueError(f"length: {length} of a sequence of {self._lengths[sequence]} tokens")
        self._release(sequence, self._pages_of(length))
        self._publish(sequence, length)

    def free(self, sequence):
        """End a sequence: its pages go back, and its number may be given to another."""
        self.truncate(sequence, 0)
        self._pages[sequence] = None

    def reserve(self, sequences, tokens):
        """Make room for ``tokens`` more tokens in each of some sequences, in pages of their own.

        A page that is shared and would be written is copied first. OutOfPages where there are too few, ValueError where the
        table has no room for so many; nothing is changed then.
        """
        sequences = self._checked(sequences)
        if not self._wants(sequences, tokens):
            return
        needed = self._count(sequences, tokens)
        if needed > len(self._free):
            raise OutOfPages(f"{needed} pages wanted for {tokens} tokens, {len(self._free)} of {self.pages} are free")
        for sequence in sequences:
            pages, length = self._pages[sequence], int(self._lengths[sequence])
            changed = False
            for i in range(length // self.page_size, min(len(pages), self._pages_of(length + tokens))):
                if self._owners[pages[i]] > 1:
                    pages[i] = self._own_copy(pages[i])
                    changed = True
            while len(pages) < self._pages_of(length + tokens):
                pages.append(self._take())
                changed = True
            if changed:
                self._publish_table(sequence)

    # ---- steps ---------------------------------------------------------------------------------------------------------------

    def begin(self, sequences, tokens):
        """A step of ``tokens`` new tokens in each of some sequences begins: a ``Step``. Raises as ``reserve``.

        Sequences whose numbers follow one another are read in place, by which a step can be recorded in a graph (to be replayed
        while they share what they shared then); of others the rows are copied.
        """
        sequences = self._checked(sequences)
        self.reserve(sequences, tokens)
        prefix = self.shared_prefix(sequences)
        first = sequences[0]
        if sequences == tuple(range(first, first + len(sequences))):
            here = slice(first, first + len(sequences))
            lengths = self.lengths[here]
            ops.advance(lengths, tokens)
            return Step(sequences, tokens, prefix, self.block_table[here], self.positions[here], lengths)
        rows = np.array(sequences)
        positions = self._lengths[rows]
        copies = (self._table[rows], positions, positions + np.int32(tokens))
        return Step(sequences, tokens, prefix, *map(backend.place, copies))

    def end(self, step):
        """The tokens of a step have been written into every layer."""
        self.count(step.sequences, step.tokens)
        first, number = step.sequences[0], len(step.sequences)
        if step.sequences == tuple(range(first, first + number)):
            ops.advance(step.positions, step.tokens)
            return
        for array in (self.positions, self.lengths):
            backend.overwrite(array, self._lengths)

    def count(self, sequences, tokens):
        """The host's part of ``end``, for a step that a graph replays; tokens below 0: for one that was recorded and not run."""
        for sequence in sequences:
            self._lengths[sequence] += tokens

    # ---- the host's bookkeeping ----------------------------------------------------------------------------------------------

    def _check(self, sequence):
        if isinstance(sequence, bool) or not isinstance(sequence, (int, np.integer)):
            raise TypeError(f"sequence: {type(sequence).__name__}, wanted an integer")
        if not 0 <= sequence < self.max_sequences or self._pages[sequence] is None:
            raise ValueError(f"sequence: {sequence} is none of this cache")

    def _checked(self, sequences):
        sequences = tuple(sequences)
        for sequence in sequences:
            self._check(sequence)
        if not sequences or len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences: {sequences}, wanted each of one or more once")
        return sequences

    def _pages_of(self, tokens):
        return -(-tokens // self.page_size)

    def _wants(self, sequences, tokens):
        """Whether some sequence lacks a page of its own for that many more tokens."""
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)):
            raise TypeError(f"tokens: {type(tokens).__name__}, wanted an integer")
        if tokens < 0:
            raise ValueError(f"tokens: {tokens}, wanted at least 0")
        wanted = False
        for sequence in sequences:
            pages, length = self._pages[sequence], int(self._lengths[sequence])
            if length + tokens > self.capacity:
                raise ValueError(f"tokens: {length} + {tokens} do not fit into the {self.capacity} of a sequence")
            end = self._pages_of(length + tokens)
            wanted = wanted or end > len(pages)
            wanted = wanted or any(self._owners[page] > 1 for page in pages[length // self.page_size : end])
        return wanted

    def _count(self, sequences, tokens):
        """Pages that ``reserve`` takes. Of those who share a page and write, the last one keeps it, if nobody else has it."""
        needed, writers = 0, Counter()
        for sequence in sequences:
            pages, length = self._pages[sequence], int(self._lengths[sequence])
            end = self._pages_of(length + tokens)
            needed += max(0, end - len(pages))
            writers.update(pages[length // self.page_size : end])
        return needed + sum(min(n, self._owners[page] - 1) for page, n in writers.items())

    def _take(self):
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _own_copy(self, page):
        """Another page with the same content, for one of those who share it."""
        new = self._take()
        self._owners[page] -= 1
        for array in self._arrays:
            backend.copy(array[new], array[page])
        return new

    def _release(self, sequence, keep):
        """Give back all pages of a sequence but the first ``keep``, the last first: they are taken again in their order."""
        pages = self._pages[sequence]
        while len(pages) > keep:
            self._disown(pages.pop())

    def _disown(self, page):
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

    def _publish_table(self, sequence):
        row = self._table[sequence]
        row[:] = NO_PAGE
        row[: len(self._pages[sequence])] = self._pages[sequence]
        if self.tables_on_device:
            backend.overwrite(self.block_table[sequence], row)

    def _publish(self, sequence, length):
        """A sequence's pages and length to the device. A row beyond its pages is no page, so that nothing is written there."""
        self._publish_table(sequence)
        self._lengths[sequence] = length
        if not self.tables_on_device:
            return
        for array in (self.positions, self.lengths):
            backend.overwrite(array[sequence : sequence + 1], self._lengths[sequence : sequence + 1])
