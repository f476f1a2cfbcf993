"""Who runs, who waits, and which pages are kept for whom: the Engine's bookkeeping, which computes nothing.

submit -> waiting (first come, first served) -> prefilling -> decoding -> done
             ^                                       |
             +------ preempted: the youngest, when pages run out; its pages go to host memory and come back as they were
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from nbkernels.model.kv_cache import OutOfPages


@dataclass
class Chunk:
    """Pages that hold a chunk of prompt tokens. number: its name as a parent; parent: of the chunk before, 0 for none."""

    number: int
    parent: int
    pages: list
    children: int = 0


class PrefixCache:
    """Pages of the prompts that were read, found again by their tokens: a tree of chunks of ``chunk`` tokens.

        root -> [chunk of tokens 0 … 511] -> [512 … 1023] -> …
                                          -> [others]

    A chunk is looked up by the chunk before it and its own tokens, compared one by one: there are no collisions.
    Chunks that no sequence shares any more are kept until ``evict`` gives their pages back, of those without children
    the one used longest ago.
    """

    def __init__(self, cache, chunk):
        self.cache = cache
        self.chunk = chunk
        self._chunks = OrderedDict()  # (parent, tokens) -> Chunk, used longest ago first
        self._keys = {}  # number -> key
        self._last = 0

    @property
    def pages(self):
        """Pages that are kept, shared ones included."""
        return sum(len(chunk.pages) for chunk in self._chunks.values())

    @property
    def evictable_pages(self):
        """Pages that ``evict`` would give back, again and again: of chunks that, as all behind them, no sequence shares."""
        staying = set()
        for chunk in self._chunks.values():
            if not self._unshared(chunk):
                number = chunk.number
                while number and number not in staying:
                    staying.add(number)
                    number = self._chunks[self._keys[number]].parent
        return sum(len(chunk.pages) for chunk in self._chunks.values() if chunk.number not in staying)

    def find(self, parent, ids):
        """The Chunk of these tokens behind a parent, or None."""
        chunk = self._chunks.get((parent, tuple(ids)))
        if chunk is not None:
            self._touch(chunk.number)
        return chunk

    def keep(self, parent, ids, pages):
        """Keep the pages that hold these tokens: the number of their chunk. What is kept already stays as it is."""
        key = (parent, tuple(ids))
        chunk = self._chunks.get(key)
        if chunk is None:
            if parent and parent not in self._keys:  # evicted meanwhile: nobody would find the way to this one
                return parent
            self._last += 1
            chunk = Chunk(self._last, parent, list(pages))
            self.cache.hold(chunk.pages)
            self._chunks[key] = chunk
            self._keys[chunk.number] = key
            if parent:
                self._chunks[self._keys[parent]].children += 1
        self._touch(chunk.number)
        return chunk.number

    def evict(self):
        """Give back the pages of one chunk; False where all are in use."""
        for key, chunk in self._chunks.items():
            if not chunk.children and self._unshared(chunk):
                del self._chunks[key]
                del self._keys[chunk.number]
                if chunk.parent:
                    self._chunks[self._keys[chunk.parent]].children -= 1
                self.cache.drop(chunk.pages)
                return True
        return False

    def clear(self):
        """Give back all pages that nobody else has."""
        while self.evict():
            pass

    def _unshared(self, chunk):
        return all(self.cache.owners(page) == 1 for page in chunk.pages)

    def _touch(self, number):
        """Chunk and parents become those used last, the parents after their children."""
        while number:
            key = self._keys[number]
            self._chunks.move_to_end(key)
            number = self._chunks[key].parent


class Scheduler:
    """The queue, those who run in the order of their arrival, and the pages they have.

    A request here has: number (of arrival), prompt (ids), sequence of the cache or None, saved (a ``Saved`` or None) and
    parent (its last chunk of the prefix cache).
    """

    def __init__(self, cache, prefixes, max_batch):
        self.cache = cache
        self.prefixes = prefixes
        self.max_batch = max_batch
        self.waiting = deque()
        self.running = []  # oldest first

    def enqueue(self, request):
        """A new request goes to the end of the queue."""
        self.waiting.append(request)

    def admit(self):
        """Let those in front of the queue run, in their order, while there are rows and pages for them. -> the admitted."""
        admitted = []
        while self.may_admit():
            request = self.waiting[0]  # where it stays if there is an error: nobody else knows it
            if request.saved is None:
                request.sequence = self.cache.add()
            else:
                self._restore(request)
            self.running.append(self.waiting.popleft())
            self.running.sort(key=lambda r: r.number)
            admitted.append(request)
        return admitted

    def may_admit(self):
        """Whether ``admit`` would let somebody run."""
        return bool(self.waiting) and len(self.running) < self.max_batch and self._fits(self.waiting[0])

    def take_room(self, request, tokens):
        """Pages for so many more tokens of a running request, of those that are free; False where there are none."""
        if self.cache.room(request.sequence) >= tokens:
            return True
        try:
            self.cache.reserve((request.sequence,), tokens)
        except OutOfPages:
            return False
        return True

    def make_room(self, request, tokens):
        """Pages for so many more tokens of a running request, if need be of younger ones. -> (whether, those preempted).

        Where it is the youngest itself it is preempted. What nobody shares of the prefix cache goes first.
        """
        if self.cache.room(request.sequence) >= tokens:  # pages that are shared are full here, and never written
            return True, ()
        preempted = []
        while True:
            try:
                self.cache.reserve((request.sequence,), tokens)
            except OutOfPages:
                if self.prefixes.evict():
                    continue
                victim = self.running[-1]
                self.preempt(victim)
                preempted.append(victim)
                if victim is request:
                    return False, preempted
            else:
                return True, preempted

    def preempt(self, request):
        """A running request's pages go to host memory, and it waits again, in front of all younger ones."""
        request.saved = self.cache.save(request.sequence)
        self.remove(request)
        at = next((i for i, r in enumerate(self.waiting) if r.number > request.number), len(self.waiting))
        self.waiting.insert(at, request)

    def remove(self, request):
        """Take a request out, running or waiting; its pages go back."""
        if request.sequence is not None:
            self.cache.free(request.sequence)
            request.sequence = None
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _fits(self, request):
        """Whether a waiting request may run: alone always; beside others if they may all go on a page's length too."""
        if not self.running:
            return True
        tokens = (len(request.prompt) if request.saved is None else request.saved.length) + 1
        promised = sum(
            max(0, self._pages(len(r.prompt) + 1) - len(self.cache.page_numbers(r.sequence))) for r in self.running
        )
        missing = self._pages(tokens) + promised + len(self.running) - self.cache.free_pages
        return missing <= 0 or missing <= self.prefixes.evictable_pages  # which takes a walk over all that is kept

    def _restore(self, request):
        while True:
            try:
                request.sequence = self.cache.restore(request.saved)
            except OutOfPages:
                if not self.prefixes.evict():
                    raise
            else:
                request.saved = None
                return

    def _pages(self, tokens):
        return -(-tokens // self.cache.page_size)
