"""Texts for requests that come and go: ``with Engine(model) as engine: engine.submit("…").result()``.

A turn (``step``) reads a chunk of the prompts that wait to be read, then decodes a token of every request that has been read
("continuous batching", Yu et al. 2022, Orca). While nothing changes but that everyone has one more token, the GPU runs ahead: a
step is launched before the tokens of the one before it are known to the host, whose work is done while the GPU does its own:

    turn n:    | launch step n + 1 | text of step n - 1 | take the tokens of step n |
    GPU:    ···  step n            |         step n + 1                ···

Who turns out to have ended with step n has a row too many in step n + 1, which is thrown away. Where somebody is admitted, read,
preempted or drafts tokens, the steps under way are finished first.

What a request says does not depend on its neighbours, to the bit. Products of a decode step are planned as for the largest
batch (``runner``). Prompts are read in chunks that begin at multiples of prefill_tokens, and what is reused of another's prompt
is whole chunks, so that a chunk is always computed by the same calls. A request that gives way when pages run out gets its pages
back as they were. And a draw depends on its own seed and token number alone.
"""

import asyncio
import threading
import time
from collections import deque
from contextlib import contextmanager

import numpy as np

from nbkernels.launch.device import device
from nbkernels.model import backend
from nbkernels.model.kv_cache import KVCache
from nbkernels.model.prompt_lookup import PromptLookup
from nbkernels.model.runner import Row, Runner
from nbkernels.model.sampling import SamplingOptions, check_new_tokens, check_speculate, check_stop
from nbkernels.model.scheduler import PrefixCache, Scheduler
from nbkernels.model.statistics import Statistics
from nbkernels.model.tokenizer import TextStream

PAGE_SIZE = 64  # tokens
FREE_SHARE = 0.85  # of the GPU's free memory
HOST_BYTES = 2**30  # that they take at most on other devices
WAITING_INSIDE = "on_text must not wait for a request"


class QueueFull(RuntimeError):
    """As many requests wait as the Engine lets wait; nothing was submitted."""


class Cancelled(Exception):
    """A request was cancelled while somebody waited for it."""


class Request:
    """A text that an Engine writes: iterate it for pieces, or take its ``result``. Made by ``Engine.submit``.

    prompt: its ids; ids: the tokens handed out; text: theirs; finish_reason: None while it runs, then "end" (an end token),
    "stop" (a stop string), "length" (max_new_tokens or the context), "cancelled" or "error", with the exception in ``error``.
    """

    def __init__(self, engine, number, prompt, limit, options, stop, on_text, speculate):
        self.engine = engine
        self.number = number
        self.prompt = prompt
        self.ids = []
        self.text = ""
        self.finish_reason = None
        self.error = None
        self.statistics = Statistics(engine.model.device.name, len(prompt))
        self._limit = limit
        self._options = options
        self._stream = TextStream(engine.model.tokenizer, stop)
        self._on_text = on_text
        self._speculate = speculate
        self._pieces = deque()
        self._wake = None  # called when pieces have come, or the end
        self._submitted = time.perf_counter()
        self._first = None  # when its first token came
        # the engine's: tokens that were chosen, a part of which has not been handed out; the rest see Scheduler
        self._tokens = []
        self._ended = False  # whether the last of its tokens has been chosen
        self._choice = None
        self._lookup = None
        self.sequence = None
        self.saved = None
        self.parent = 0

    @property
    def done(self):
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def cancel(self):
        """End it as soon as may be; its memory goes back. Nothing where it is done."""
        self.engine._cancel(self)

    close = cancel  # as a ``Generation``'s

    def result(self, timeout=None):
        """The text, once it is complete: waits for the Engine's thread, or works for it where there is none.

        Raises Cancelled, TimeoutError after ``timeout`` seconds, and what ended it in an error.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            self.engine._advance(lambda: self.done, deadline)
        if self.error is not None:
            raise self.error
        if self.finish_reason == "cancelled":
            raise Cancelled(f"request {self.number} was cancelled after {len(self.ids)} tokens")
        return self.text

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            done = self.done  # asked first: the last piece may come between the two
            if self._pieces:
                return self._pieces.popleft()
            if done:
                raise StopIteration if self.error is None else self.error
            self.engine._advance(lambda: self._pieces or self.done, None)

    def _note(self, token):
        """A token was chosen."""
        now = time.perf_counter()
        self._tokens.append(token)
        if self._first is None:
            self._first = now
            self.statistics.first_token_seconds = now - self._submitted
        self.statistics.decode_seconds = now - self._first
        if self._lookup is not None:
            self._lookup.push(token)
        self._ended = token in self.engine.model.tokenizer.end_ids or len(self._tokens) == self._limit

    def _hand_out(self, token):
        """A token that was chosen becomes text. -> why the text ends with it, or None. Raises what on_text raises."""
        self.ids.append(token)
        self.statistics.new_tokens = len(self.ids)
        reason = None
        if token in self.engine.model.tokenizer.end_ids:
            reason = "end"
        else:
            self._emit(self._stream.push(token))
            if self._stream.stopped:
                reason = "stop"
            elif len(self.ids) == self._limit:
                reason = "length"
        if reason is not None:
            self._emit(self._stream.finish())
        return reason

    def _emit(self, piece):
        if not piece:
            return
        self.text += piece
        self._pieces.append(piece)
        if self._on_text is not None:
            self._on_text(piece)


class Engine:
    """Continues prompts of a LanguageModel, many at once. A context manager; ``start`` gives it a thread of its own.

    pages: of page_size tokens, for all requests together (default: those that fit into memory, at most max_batch full contexts);
    context: the most tokens of a prompt and its text (default the model's); max_batch: how many are decoded at once;
    prefill_tokens: of prompts a turn, a multiple of page_size: long prompts are read in such chunks, and what two prompts share
    is computed once in whole ones; max_queue: how many may wait; max_prompt: tokens of the longest prompt (default: what the
    context holds); cache_dtype: of keys and values, default the activations', or int8.

    Without ``start`` whoever waits for a request does the work (``Request.result``, iteration, ``run``). All methods may be
    called from any thread.
    """

    def __init__(
        self,
        model,
        *,
        pages=None,
        context=None,
        max_batch=64,
        prefill_tokens=512,
        max_queue=1024,
        max_prompt=None,
        page_size=PAGE_SIZE,
        cache_dtype=None,
    ):
        if not hasattr(model, "transformer"):
            raise TypeError(f"model: {type(model).__name__}, wanted a LanguageModel, as nbkernels.load gives it")
        config = model.config
        context = config.context if context is None else context
        sizes = {"max_batch": max_batch, "prefill_tokens": prefill_tokens, "max_queue": max_queue, "context": context}
        sizes["page_size"] = page_size
        sizes |= {name: n for name, n in (("pages", pages), ("max_prompt", max_prompt)) if n is not None}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: {type(value).__name__}, wanted an integer")
            if value < 1:
                raise ValueError(f"{name}: {value}, wanted at least 1")
        if context > config.context:
            raise ValueError(f"context: {context}, wanted at most the model's {config.context}")
        if prefill_tokens % page_size:
            raise ValueError(f"prefill_tokens: {prefill_tokens}, wanted a multiple of page_size {page_size}")
        self.model = model
        self.context = context
        self.max_prompt = context - 1 if max_prompt is None else min(max_prompt, context - 1)
        self.max_queue = max_queue
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        with model.on_device():
            self._stream = backend.new_stream() if model.device.kind == "cuda" else None
        with self._on_device():
            transformer = model.transformer
            cache_dtype = np.dtype(transformer.dtype if cache_dtype is None else cache_dtype)
            most = -(-context // page_size)
            if pages is None:
                pages = pages_for(config, cache_dtype, page_size, max_batch * most)
            self.cache = KVCache(
                config.layers,
                config.kv_heads,
                config.head_dim,
                cache_dtype,
                pages=pages,
                page_size=page_size,
                max_sequences=max_batch,
                max_pages_per_sequence=most,
                tables_on_device=False,
            )
            vocab = min(config.vocab, len(model.tokenizer))
            self._runner = Runner(transformer, self.cache, vocab, max_batch)
        self.prefixes = PrefixCache(self.cache, prefill_tokens)
        self._scheduler = Scheduler(self.cache, self.prefixes, max_batch)
        self._arrived = deque()  # submitted, not yet seen by a step
        self._cancelled = deque()  # likewise cancelled
        self._working = False  # whether a turn is under way
        # [(request, drafted tokens), …] of each step that was launched and whose tokens were not taken
        self._flight = deque()
        self._chosen = deque()  # (request, tokens) of steps, not yet handed out
        self._number = 0
        # whether steps are launched before the tokens of those before are known
        self._ahead = not self._runner.synchronous
        self._stepping = threading.RLock()  # held by whoever works
        self._changed = threading.Condition()  # something arrived, or came out
        self._thread = None
        self._closing = False
        self._broken = None  # what ended the work for good

    # ---- requests ------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt,
        *,
        max_new_tokens=128,
        temperature=0.0,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=1.0,
        seed=None,
        stop=(),
        on_text=None,
        speculate=0,
    ):
        """Ask for the continuation of a prompt (see ``LanguageModel.generate``): a Request, at once.

        on_text: called with every piece, from the thread that works; what it raises ends this request alone. speculate: so many
        tokens (0 to 7) are drafted from the text itself and checked in one step, where the choice is greedy: the text is as ever.
        ValueError for a prompt that is too long, QueueFull where too many wait.
        """
        check_new_tokens(max_new_tokens)
        check_speculate(speculate)
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed).with_seed()
        stop = check_stop(stop)
        if on_text is not None and not callable(on_text):
            raise TypeError(f"on_text: {type(on_text).__name__}, wanted a function of a text")
        ids = self.model.encode(prompt)
        if len(ids) > self.max_prompt:
            raise ValueError(
                f"prompt: {len(ids)} tokens, wanted at most {self.max_prompt} of the context of {self.context}"
            )
        limit = min(max_new_tokens, self.context - len(ids))
        room = self.cache.pages * self.cache.page_size
        if len(ids) + limit > room:
            raise ValueError(f"prompt: {len(ids)} tokens and {limit} new ones, wanted at most the {room} of all pages")
        with self._changed:
            if self._broken is not None:
                raise RuntimeError("the engine has stopped after an error") from self._broken
            if self._closing:
                raise RuntimeError("the engine is closed")
            if len(self._arrived) + len(self._scheduler.waiting) >= self.max_queue:
                raise QueueFull(f"{self.max_queue} requests are waiting")
            self._number += 1
            request = Request(self, self._number, ids, limit, options, stop, on_text, speculate)
            self._arrived.append(request)
            self._changed.notify_all()
        return request

    async def stream(self, prompt, **options):
        """The pieces of a text for asyncio: ``async for piece in engine.stream("…")``; leaving the loop cancels the request.

        options: those of ``submit`` but on_text. Starts the Engine's thread where there is none.
        """
        async for piece in self.pieces(self.submit(prompt, **options)):
            yield piece

    async def pieces(self, request):
        """The pieces of a Request for asyncio; cancels it where they are not all taken."""
        if self._thread is None and not request.done:
            self.start()
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake():
            loop.call_soon_threadsafe(event.set)

        request._wake = wake
        try:
            while True:
                event.clear()
                while request._pieces:
                    yield request._pieces.popleft()
                if request.done and not request._pieces:
                    break
                await event.wait()
            if request.error is not None:
                raise request.error
        finally:
            request._wake = None
            request.cancel()

    # ---- work ----------------------------------------------------------------------------------------------------------------

    def start(self):
        """Work in a thread of the Engine's own until ``close``. Returns the Engine."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="nbkernels engine", daemon=True)
                self._thread.start()
        return self

    def close(self):
        """Cancel what is not done and give the pages back. Nothing can be submitted after it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._stepping:
            if not self._working:  # else somebody's on_text closes it, and the turn under way ends with it
                self._end()

    def _end(self):
        for request in self._unfinished():
            self._finish(request, "cancelled")
        for queue in (self._arrived, self._cancelled, self._chosen, self._flight):
            queue.clear()
        self.prefixes.clear()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.close()

    def run(self):
        """Work until no request is left."""
        while self.step():
            pass

    @property
    def counts(self):
        """(requests that run, requests that wait), as of about now."""
        return len(self._scheduler.running), len(self._scheduler.waiting) + len(self._arrived)

    @property
    def failed(self):
        """Whether an error of the work itself has ended it."""
        return self._broken is not None

    @property
    def busy(self):
        """Whether some request is not done."""
        known = self._scheduler
        return bool(self._arrived or self._flight or self._chosen or known.waiting or known.running)

    def step(self):
        """One turn of work (see above). -> whether there is more to do."""
        with self._stepping:
            if self._working:
                raise RuntimeError(WAITING_INSIDE)
            self._working = True
            try:
                with self._on_device():
                    self._turn()
                    if self._closing:
                        self._end()
            except BaseException as error:
                self._break(error)
                raise
            finally:
                self._working = False
            return self.busy

    def _turn(self):
        self._take_arrivals()
        if self._flight and self._may_run_ahead():
            self._runner.launch_again()
            self._flight.append(self._flight[-1])
            self._hand_out()
            self._land()
            return
        if self._flight:
            self._land()
        if not self._ahead:  # text that waits for the next step would come later, and nothing sooner
            self._hand_out()
        for request in self._scheduler.admit():
            request._choice = self._runner.open_choice(request._options, request.prompt + request._tokens)
        self._prefill()
        rows, drafts = self._rows()
        if rows:
            self._runner.launch(rows)
            self._flight.append(drafts)
        self._hand_out()
        if rows and not self._ahead:
            self._land()

    def _may_run_ahead(self):
        """Whether the step under way may be followed by one of the same rows, whose last tokens only the device knows."""
        scheduler, rows = self._scheduler, self._flight[-1]
        if len(rows) != len(scheduler.running) or scheduler.may_admit():
            return False
        for (request, _), running in zip(rows, scheduler.running, strict=True):
            # drafts wait for what they follow; the last token of a text is followed by none
            if request is not running or request._lookup is not None or len(request._tokens) + 1 >= request._limit:
                return False
        return all(scheduler.take_room(request, 2) for request, _ in rows)

    def _land(self):
        """Take the tokens of the oldest step under way."""
        self._check_rows(self._flight.popleft(), self._runner.tokens())

    def _take_arrivals(self):
        with self._changed:
            while self._arrived:
                self._scheduler.enqueue(self._arrived.popleft())
            cancelled = list(self._cancelled)
            self._cancelled.clear()
        for request in cancelled:
            if not request.done:
                self._finish(request, "cancelled")

    def _prefill(self):
        """Read the next chunks of prompts, the oldest first, prefill_tokens in all or a little more."""
        budget = self.prefill_tokens
        for request in list(self._scheduler.running):
            if budget <= 0:
                return
            while request.sequence is not None and not request._tokens and budget > 0:
                budget -= self._read_chunk(request)

    def _read_chunk(self, request):
        """The next chunk of a prompt, computed if nobody has it. -> tokens that were computed."""
        cache, chunk, sequence = self.cache, self.prefill_tokens, request.sequence
        begin = cache.length(sequence)
        end = min(len(request.prompt), (begin // chunk + 1) * chunk)
        ids = request.prompt[begin:end]
        if begin % chunk == 0 and end < len(request.prompt):  # behind the last token there must be scores
            known = self.prefixes.find(request.parent, ids)
            if known is not None:
                cache.adopt(sequence, known.pages)
                request.parent = known.number
                request.statistics.reused_tokens += len(ids)
                return 0
        if not self._make_room(request, len(ids)):
            return 0
        hidden = self._runner.prefill(sequence, ids)
        if end % chunk == 0:
            pages = cache.page_numbers(sequence)[begin // cache.page_size : end // cache.page_size]
            request.parent = self.prefixes.keep(request.parent, ids, pages)
        if end == len(request.prompt):
            if request._speculate and request._choice.greedy:
                request._lookup = PromptLookup(request.prompt)
            self._note(request, [self._runner.first_token(hidden, request._choice)])
        return len(ids)

    def _rows(self):
        """The rows of the next step, and of each request among them how many drafted tokens stand behind its own."""
        ready = [r for r in self._scheduler.running if r._tokens and not r._ended]
        spare = self._scheduler.max_batch - len(ready)
        rows, drafts = [], []
        for request in ready:
            if request.sequence is None:  # it has given way to an older one
                continue
            drafted = self._draft(request, spare)
            if not self._make_room(request, 1 + len(drafted)):
                continue
            spare -= len(drafted)
            position, step = self.cache.length(request.sequence), len(request._tokens)
            for i, token in enumerate((request._tokens[-1], *drafted)):
                rows.append(Row(request.sequence, token, position + i, request._choice, step + i))
            drafts.append((request, drafted))
        return rows, drafts

    def _draft(self, request, most):
        if request._lookup is None:
            return []
        # of the tokens that are wanted the last is chosen and never read
        most = min(most, request._speculate, request._limit - len(request._tokens) - 1)
        return request._lookup.draft(most) if most > 0 else []

    def _check_rows(self, drafts, chosen):
        """Take what a step chose: a token a request, and one more for each drafted token that was right."""
        at = 0
        for request, drafted in drafts:
            mine = chosen[at : at + 1 + len(drafted)]
            at += len(mine)
            if request.done or request._ended:  # by its text, or in the step before
                continue
            right = 0
            while right < len(drafted) and drafted[right] == mine[right]:
                right += 1
            request.statistics.drafted_tokens += len(drafted)
            request.statistics.accepted_tokens += right
            # the tokens that were read and are part of the text; what the others left behind is overwritten
            self.cache.count((request.sequence,), 1 + right)
            self._note(request, mine[: 1 + right])

    def _note(self, request, tokens):
        """Tokens of a request were chosen; those behind an end are none. Where it ends its pages go back."""
        taken = []
        for token in tokens:
            request._note(token)
            taken.append(token)
            if request._ended:
                break
        self._chosen.append((request, taken))
        if request._ended:
            self._leave(request)

    def _hand_out(self):
        """Tokens become text, and texts end."""
        handed = []
        while self._chosen:
            request, tokens = self._chosen[0]  # which stays until it is done: see ``_unfinished``
            for token in tokens:
                if request.done:
                    break
                try:
                    reason = request._hand_out(token)
                except BaseException as error:
                    # an exit, or Ctrl-C: of whoever lends the Engine his thread
                    if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                        raise
                    request.error = error
                    reason = "error"
                if reason is not None:
                    self._finish(request, reason)
            handed.append(request)
            self._chosen.popleft()
        if handed:
            self._announce(handed)

    def _make_room(self, request, tokens):
        """Pages for so many more tokens; False where the request had to give way."""
        enough, preempted = self._scheduler.make_room(request, tokens)
        for other in preempted:
            other.statistics.preemptions += 1
            self._close_choice(other)
        return enough

    def _leave(self, request):
        """A request needs no memory any more."""
        self._scheduler.remove(request)
        request.saved = None
        self._close_choice(request)

    def _close_choice(self, request):
        if request._choice is not None:
            self._runner.close_choice(request._choice)
            request._choice = None

    def _finish(self, request, reason):
        self._leave(request)
        request.finish_reason = reason
        self._announce((request,))

    def _announce(self, requests):
        """Wake those who wait for pieces."""
        for request in requests:
            wake = request._wake
            if wake is not None:
                try:
                    wake()
                except RuntimeError:  # its event loop is gone, and with it who waited
                    self._cancelled.append(request)
        with self._changed:
            self._changed.notify_all()

    def _unfinished(self):
        """Every request that is not done."""
        known = [*self._scheduler.running, *self._scheduler.waiting, *(r for r, _ in self._chosen), *self._arrived]
        return [r for r in dict.fromkeys(known) if not r.done]

    def _break(self, error):
        """The work itself has failed: nobody waits in vain."""
        with self._changed:
            self._broken = error
        for request in self._unfinished():
            request.error = error
            self._finish(request, "error")
        for queue in (self._arrived, self._cancelled, self._chosen, self._flight):
            queue.clear()

    # ---- threads -------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _on_device(self):
        """As ``LanguageModel.on_device``, on a stream of the Engine's own."""
        with device(self.model.device.kind, arch=self.model.device.arch), backend.use_stream(self._stream):
            yield

    def _work(self):
        while True:
            with self._changed:
                while not (self._closing or self.busy or self._cancelled):
                    self._changed.wait()
                if self._closing:
                    return
            try:
                self.step()
            except Exception:  # kept in ``_broken``, and told to every request
                return

    def _advance(self, enough, deadline):
        """Wait for the thread until ``enough()`` or something has changed, or do a turn of the work where there is none."""
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError("the text is not complete")
        if self._thread is None:
            self.step()
            return
        if self._thread is threading.current_thread():  # it would wait for itself
            raise RuntimeError(WAITING_INSIDE)
        with self._changed:
            if not enough():
                left = None if deadline is None else min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                self._changed.wait(left)

    def _cancel(self, request):
        """End a request now where nobody works; else the next turn does."""
        with self._changed:
            if request.done:
                return
            self._cancelled.append(request)
            self._changed.notify_all()
        if self._thread is None and self._stepping.acquire(blocking=False):
            try:
                if not self._working:
                    with self._on_device():
                        self._take_arrivals()
            finally:
                self._stepping.release()


def pages_for(config, dtype, page_size, most):
    """Pages for most of the memory there is on the device in force, at most ``most``."""
    head_bytes = config.head_dim * dtype.itemsize + (4 if dtype.itemsize == 1 else 0)
    page_bytes = 2 * config.layers * config.kv_heads * head_bytes * page_size
    room = int(FREE_SHARE * backend.free_bytes()) or HOST_BYTES
    return max(1, min(most, room // page_bytes))
