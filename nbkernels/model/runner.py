"""Steps of a changing batch: a chunk of one prompt, or a token each of several sequences, on a GPU as graphs by batch size.

A decode step reads all that changes from one block of device memory, which one copy fills before it, and from a block table, of
which those rows are copied that have changed:

    seeds | temperatures … | positions | lengths | tokens              block table [rows, pages]

so that the step for 1, 2, 4, … rows is recorded once and replayed. A step writes the tokens that it chose where the next one
reads them, so that one more step of the same rows may be launched before the host knows them. Rows without a sequence stand at
position -1, where nothing is written, and have no keys. Products are planned as for the largest batch (``plan_rows``), and every
other operation works row by row, or for a lone row all layers are one launch: a row's bits depend neither on how many rows there
are nor on which it is. On the CPU, where BLAS gives other bits for other numbers of rows, they go through the layers one by one.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from nbkernels import ops
from nbkernels.launch.device import current
from nbkernels.launch.overlap import overlapping
from nbkernels.model import backend
from nbkernels.model.kv_cache import Step
from nbkernels.model.sampling import SamplingOptions
from nbkernels.model.transformer import planned_as

INT32 = np.dtype(np.int32)
MOST_TOP_K = np.iinfo(INT32).max  # more than any vocabulary, as all that is beyond it
LEAST_TABLE_TOKENS = 256  # of the narrowest table: a split of keys


class Row(NamedTuple):
    """One token of a decode step: where it stands, and how the next one is chosen (``Choice``); step: that one's number."""

    sequence: int
    token: int
    position: int
    choice: object
    step: int


class Choice:
    """How a sequence's tokens are chosen. options: SamplingOptions with a seed; seen: its row of the penalised tokens."""

    def __init__(self, options, seen):
        self.options = options
        self.seen = seen
        self.greedy = options.temperature == 0 and options.repetition_penalty == 1


GREEDY = Choice(SamplingOptions(seed=0), None)


class _Reading:
    """The cache as one step of some rows sees it, in the place of ``KVCache`` in ``Transformer.hidden``."""

    def __init__(self, layers, block_table, positions, lengths):
        self.layers = layers
        self.arrays = (block_table, positions, lengths)

    def begin(self, sequences, tokens):
        """The step that was prepared."""
        return Step(sequences, tokens, 0, *self.arrays)

    def end(self, step):
        """Nothing: the host counts (``KVCache.count``)."""


class _RowArrays:
    """The device memory that a step's rows are read from, and its image in host memory. NumPy arrays by name: ``host``."""

    def __init__(self, rows, pages):
        fields = {"seed": (np.uint64, (rows,))}
        fields |= dict.fromkeys(("temperature", "repetition_penalty", "top_p", "min_p"), (np.float32, (rows,)))
        fields |= dict.fromkeys(("top_k", "step", "seen_row", "position", "length"), (np.int32, (rows,)))
        fields["token"] = (np.int32, (rows,))  # the last: see ``upload``
        sizes = {name: np.dtype(dtype).itemsize * int(np.prod(shape)) for name, (dtype, shape) in fields.items()}
        self.image = np.zeros(sum(sizes.values()), np.uint8)
        self.memory = backend.zeros(self.image.shape, self.image.dtype)
        self.host, self.device = {}, {}
        self.choices = [None] * rows
        at = 0
        for name, (dtype, shape) in fields.items():
            here = slice(at, at + sizes[name])
            self.host[name] = self.image[here].view(dtype).reshape(shape)
            self.device[name] = backend.view_bytes(self.memory[here], dtype, shape)
            at = here.stop
        self.table = backend.zeros((rows, pages), INT32)
        self.host_table = np.zeros((rows, pages), np.int32)

    def set_choice(self, i, choice):
        """How row i's token is chosen, but for its step."""
        if self.choices[i] is choice:
            return
        self.choices[i] = choice
        options, host = choice.options, self.host
        host["seed"][i] = options.seed
        host["temperature"][i] = options.temperature
        host["repetition_penalty"][i] = options.repetition_penalty
        host["top_p"][i] = 1.0 if options.top_p is None else options.top_p
        host["min_p"][i] = 0.0 if options.min_p is None else options.min_p
        host["top_k"][i] = min(options.top_k or 0, MOST_TOP_K)
        host["seen_row"][i] = 0 if choice.seen is None else choice.seen

    def set_table(self, rows):
        """The first columns of the first rows of the table, int32; copied to the device are those rows that have changed."""
        held = self.host_table[: rows.shape[0], : rows.shape[1]]
        changed = np.flatnonzero((held != rows).any(axis=1))
        if changed.size:
            held[changed] = rows[changed]
            span = slice(changed[0], changed[-1] + 1)
            backend.overwrite_at_once(self.table[span], self.host_table[span])

    def upload(self, tokens=True):
        """One copy to the device; with or without the tokens."""
        end = len(self.image) if tokens else len(self.image) - self.host["token"].nbytes
        backend.overwrite_at_once(self.memory[:end], self.image[:end])


class Runner:
    """Runs a Transformer over a KVCache's sequences for the Engine, whose device and stream are in force.

    vocab: how many of the model's tokens may be chosen; max_rows: the most rows of a decode step. Steps are launched, and their
    ``tokens`` taken in the same order; ``launch_again`` may be called before those of the step before are taken.
    ``synchronous``: whether ``launch`` returns when its work is done.
    """

    def __init__(self, transformer, cache, vocab, max_rows):
        self.transformer = transformer
        self.cache = cache
        self.vocab = vocab
        self.max_rows = max_rows
        self.synchronous = current().kind != "cuda"
        self._rows = []  # of the last step
        self._tokens = deque()  # of each step whose tokens were not taken, where a step is done at once
        self._free_seen = list(range(max_rows))
        if backend.on_host():
            return
        self._together = transformer.one_launch(cache.layers, max_rows)
        pages = cache.capacity // cache.page_size
        self.rows = _RowArrays(max_rows, pages)
        self.first = _RowArrays(1, 1)
        self.logits = backend.zeros((max_rows, transformer.config.vocab), transformer.dtype)
        self.seen = backend.zeros((max_rows, vocab), np.dtype(np.uint8))
        self._last = None
        if not self.synchronous:
            from nbkernels.launch.memory import Mailbox

            self._mailbox = Mailbox(4 * max_rows)
        self._graphs = {}  # (rows, pages, greedy) -> a Graph, or None after the first step of this kind
        self._arena = None

    # ---- how tokens are chosen -----------------------------------------------------------------------------------------------

    def open_choice(self, options, ids):
        """A Choice for a sequence that has the tokens ids; at most max_rows at a time, given back by ``close_choice``."""
        if options.repetition_penalty == 1:
            return Choice(options, None)
        mask = np.zeros(self.vocab, np.uint8)
        mask[[i for i in ids if i < self.vocab]] = 1
        if backend.on_host():
            return Choice(options, mask[None])
        row = self._free_seen.pop()
        backend.overwrite(self.seen[row], mask)
        return Choice(options, row)

    def close_choice(self, choice):
        """A Choice is needed no more."""
        if choice.seen is not None and not backend.on_host():
            self._free_seen.append(choice.seen)

    # ---- prompts -------------------------------------------------------------------------------------------------------------

    def prefill(self, sequence, ids):
        """Extend a sequence, which has room for them, by tokens of its prompt. -> the residual stream behind them."""
        begin, end = self.cache.length(sequence), self.cache.length(sequence) + len(ids)
        pages = -(-end // self.cache.page_size)
        table = self.cache.table_row(sequence)[None, :pages]
        arrays = (table.copy(), np.array([begin], np.int32), np.array([end], np.int32))
        placed = backend.place(np.array([ids], np.int32))
        reading = _Reading(self.cache.layers, *map(backend.place, arrays))
        hidden = self.transformer.hidden(placed, reading, (sequence,))
        self.cache.count((sequence,), len(ids))
        return hidden

    def first_token(self, hidden, choice):
        """The token behind a prompt, the first of a text."""
        if backend.on_host():
            return self._choose_on_host(self.transformer.logits(hidden[:, -1]), choice, 0)
        self.first.set_choice(0, choice)
        self.first.upload()
        self.transformer.logits(hidden[:, -1], out=self.logits[:1])
        self._choose(self.first, 1, choice.greedy)
        return int(backend.fetch(self.first.device["token"])[0])

    # ---- decode --------------------------------------------------------------------------------------------------------------

    def launch(self, rows):
        """Begin a step of some Rows, for whose tokens there is room; rows of one sequence follow one another."""
        self._rows = rows
        self._launch(tokens_known=True)

    def launch_again(self):
        """The same rows a token further, with the tokens that the last step chose, known or not; there is room for them."""
        self._rows = [row._replace(token=None, position=row.position + 1, step=row.step + 1) for row in self._rows]
        self._launch(tokens_known=False)

    def _launch(self, tokens_known):
        rows = self._rows
        if backend.on_host():
            tokens = [row.token for row in rows] if tokens_known else self._last_tokens
            self._last_tokens = [self._decode_on_host(row, t) for row, t in zip(rows, tokens, strict=True)]
            self._tokens.append(self._last_tokens)
            return
        count, longest = len(rows), max(row.position for row in rows) + 1
        bucket = min(1 << (count - 1).bit_length(), self.max_rows)
        pages = self._table_pages(longest)
        self._fill(rows, bucket, pages, tokens_known)
        greedy = all(row.choice.greedy for row in rows)
        self._last = (bucket, pages, greedy)
        chosen = self.rows.device["token"][:count]
        if self.synchronous:
            self._step(*self._last)
            self._tokens.append(backend.fetch(chosen).tolist())
        else:
            self._run_graph(self._last)
            self._mailbox.post(chosen)

    def repeat(self):
        """The last step once more, with the same result: what a step costs without the host's part. On a GPU."""
        self._run_graph(self._last)

    def tokens(self):
        """The tokens, a row each, of the first step whose tokens were not taken; waits for them."""
        return self._tokens.popleft() if self.synchronous else self._mailbox.take().tolist()

    def _table_pages(self, tokens):
        """Columns of the table that a step reads: few, since attention starts blocks for all, and of few sizes."""
        pages = -(-LEAST_TABLE_TOKENS // self.cache.page_size)
        while pages * self.cache.page_size < tokens:
            pages *= 2
        return min(pages, self.cache.capacity // self.cache.page_size)

    def _fill(self, rows, bucket, pages, tokens_known):
        host, count = self.rows.host, len(rows)
        sequences, tokens, positions, choices, steps = zip(*rows, strict=True)
        if tokens_known:
            host["token"][:count] = tokens
            host["token"][count:bucket] = 0
        host["position"][:count] = positions
        host["length"][:count] = host["position"][:count] + 1
        host["position"][count:bucket] = -1
        host["length"][count:bucket] = 0
        for i, choice in enumerate((*choices, *(GREEDY,) * (bucket - count))):
            self.rows.set_choice(i, choice)
        host["step"][:count] = steps
        self.rows.set_table(self.cache.table_rows(list(sequences), pages))
        self.rows.upload(tokens_known)

    def _run_graph(self, key):
        from nbkernels.launch.graph import Graph
        from nbkernels.launch.memory import Arena, use_arena

        if key in self._graphs:
            graph = self._graphs[key]
            if graph is None:
                graph = Graph()
                with use_arena(self._arena), graph.capture(backend.stream()):
                    self._step(*key)
                self._graphs[key] = graph
            graph.replay(backend.stream())
            return
        # the first step of its kind compiles its kernels and finds the memory that the recording will find again
        self._arena = self._arena or Arena()
        with use_arena(self._arena):
            self._step(*key)
        self._graphs[key] = None

    def _step(self, bucket, pages, greedy):
        device = self.rows.device
        arrays = (self.rows.table[:bucket, :pages], device["position"][:bucket], device["length"][:bucket])
        reading = _Reading(self.cache.layers, *arrays)
        transformer = self.transformer
        with overlapping(), planned_as(self.max_rows):
            together = self._together if bucket == 1 else None
            ids = device["token"][:bucket].reshape(bucket, 1)
            hidden = transformer.hidden(ids, reading, tuple(range(bucket)), together)
            transformer.logits(hidden[:, -1], out=self.logits[:bucket])
        self._choose(self.rows, bucket, greedy)

    def _choose(self, arrays, rows, greedy):
        """Of the logits of so many rows, to where the next step reads its tokens."""
        logits, out = self.logits[:rows, : self.vocab], arrays.device["token"][:rows]
        if greedy:
            ops.argmax(logits, out=out)
            return
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "step", "seen_row")
        options = {name: arrays.device[name][:rows] for name in names}
        ops.sample_rows(logits, seen=self.seen, out=out, **options)

    def _decode_on_host(self, row, token):
        position = np.array([row.position], np.int32)
        reading = _Reading(self.cache.layers, self.cache.table_row(row.sequence)[None], position, position + 1)
        hidden = self.transformer.hidden(np.array([[token]], np.int32), reading, (row.sequence,))
        return self._choose_on_host(self.transformer.logits(hidden[:, -1]), row.choice, row.step)

    def _choose_on_host(self, logits, choice, step):
        """logits [1, vocab] -> a token."""
        logits = logits[:, : self.vocab]
        if choice.greedy:
            return int(ops.argmax(logits)[0])
        options = {**vars(choice.options), "seen": choice.seen, "step": np.array([step], np.int32)}
        return int(ops.sample(logits, **options)[0])
