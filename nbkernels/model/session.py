"""One sequence being written: its KV cache and the steps that extend it, on a GPU as a graph that is replayed.

A decode step is the same launches at the same addresses each time: positions and lengths are counted on the device. So the
second step is recorded as a CUDA graph, and from then on a token costs the host one launch, its choice, and reading it. The step
behind a token needs nothing of the host, and is launched before the host has read the token: the GPU does not wait.
"""

from collections import deque

import numpy as np

from nbkernels.launch.device import current
from nbkernels.launch.overlap import overlapping
from nbkernels.model import backend
from nbkernels.model.kv_cache import KVCache

PAGE_SIZE = 256  # tokens: a lone sequence has its pages in a row, and the largest are the fewest to look up
PREFILL_TOKENS = (
    512  # a long prompt goes through the layers in pieces of this many tokens, which bounds the memory it takes
)


class Session:
    """A KV cache of one sequence, and logits behind its last token.

    ``start(ids)`` reads a prompt, ``extend()`` the token that stands in ``token`` (int32 [1] on the device); both return logits
    [1, vocab]. ``post`` begins to copy ``token`` to the host and ``take`` waits for the copy posted first; up to 1 + ``ahead``
    are under way, so that the next step may be launched in between. The device of the transformer must be entered, and its stream
    be in force. one_launch: take a token through all layers in one launch where that can be; the bits are the same without.
    """

    def __init__(self, transformer, capacity, *, one_launch=True):
        config = transformer.config
        self.transformer = transformer
        # whole pages: sessions of about one length can serve one another
        pages = -(-min(config.context, capacity) // PAGE_SIZE)
        self.cache = KVCache(
            config.layers, config.kv_heads, config.head_dim, transformer.dtype, pages=pages, page_size=PAGE_SIZE
        )
        self.sequences = (self.cache.add(),)
        self.token = backend.zeros((1,), np.dtype(np.int32))
        # on a device they have one place, so that a replay finds it
        self.logits = None if backend.on_host() else backend.zeros((1, config.vocab), transformer.dtype)
        self.together = transformer.one_launch(self.cache.layers) if one_launch else None
        self._graph = None
        self._arena = None
        self._posted = deque()
        self._mailbox = None
        self.ahead = 0
        if current().kind == "cuda":
            from nbkernels.launch.memory import Mailbox

            self.ahead = 1
            self._mailbox = Mailbox(self.token.nbytes, 1 + self.ahead)

    def start(self, prompt_ids):
        """Forget everything and read a prompt. -> logits behind its last token."""
        self._posted.clear()
        if self._mailbox is not None:
            self._mailbox.clear()
        self.cache.truncate(self.sequences[0], 0)
        # all of it at once: no later step changes the table
        self.cache.reserve(self.sequences, self.cache.capacity)
        ids = np.asarray(prompt_ids, np.int32)[None]
        for begin in range(0, len(prompt_ids), PREFILL_TOKENS):
            piece = backend.place(np.ascontiguousarray(ids[:, begin : begin + PREFILL_TOKENS]))
            hidden = self.transformer.hidden(piece, self.cache, self.sequences)
        return self.transformer.logits(hidden[:, -1], out=self.logits)

    def extend(self):
        """Read the token in ``token``. -> logits behind it; those of the step before are overwritten."""
        if current().kind != "cuda":
            return self._step()
        if self._graph is None:
            return self._record()
        self.cache.reserve(self.sequences, 1)
        self._graph.replay(backend.stream())
        self.cache.count(self.sequences, 1)
        return self.logits

    def post(self):
        """Begin to copy ``token`` to the host, behind the work so far."""
        if self._mailbox is None:
            self._posted.append(int(backend.fetch(self.token)[0]))
        else:
            self._mailbox.post(self.token)

    def take(self):
        """The token that was posted first."""
        return self._posted.popleft() if self._mailbox is None else int(self._mailbox.take()[0])

    def _step(self):
        with overlapping():  # the weights were there before
            hidden = self.transformer.hidden(self.token.reshape(1, 1), self.cache, self.sequences, self.together)
            return self.transformer.logits(hidden[:, -1], out=self.logits)

    def _record(self):
        """A step that runs, and with it the memory and the kernels of the recording that follows."""
        from nbkernels.launch.graph import Graph
        from nbkernels.launch.memory import Arena, use_arena

        self._arena = Arena()
        with use_arena(self._arena):
            self._step()
            if self.cache.length(*self.sequences) < self.cache.capacity:  # else there is no second step
                graph = Graph()
                with graph.capture(backend.stream()):
                    self._step()
                self.cache.count(self.sequences, -1)  # recorded, not run
                self._graph = graph
        return self.logits
