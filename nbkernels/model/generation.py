"""A language model that is loaded and speaks: ``load(path).generate("…", stream=True)``."""

import sys
import time
from contextlib import contextmanager

import numpy as np

from nbkernels import ops
from nbkernels.launch.device import device
from nbkernels.model import backend
from nbkernels.model.chat import encode_chat
from nbkernels.model.engine import PAGE_SIZE as ENGINE_PAGE_SIZE
from nbkernels.model.engine import Engine, pages_for
from nbkernels.model.kv_cache import KVCache
from nbkernels.model.sampling import SamplingOptions, check_new_tokens, check_speculate, check_stop
from nbkernels.model.session import PAGE_SIZE, Session
from nbkernels.model.statistics import Statistics
from nbkernels.model.tokenizer import TextStream

# Rows of the Engine behind ``generate``: up to LEAST_ROWS products have the bits of a lone row's, beyond MOST_ROWS they queue.
LEAST_ROWS, MOST_ROWS = 16, 64


class Generation:
    """A running generation: iterate it for pieces of text, each as soon as it is certain.

    ``ids`` are the tokens so far (an end-of-sequence token included), ``text`` what has been given out, ``statistics`` how
    long it took, ``finish_reason`` "end" (an end token), "stop" (a stop string), "length" (max_new_tokens or the context).
    """

    def __init__(self, model, prompt_ids, max_new_tokens, options, stop):
        self.ids = []
        self.text = ""
        self.finish_reason = None
        self.statistics = Statistics(model.device.name, len(prompt_ids))
        self._pieces = self._run(model, prompt_ids, max_new_tokens, options, TextStream(model.tokenizer, stop))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._pieces)

    def close(self):
        """End the generation early and give its memory back."""
        self._pieces.close()

    def _run(self, model, prompt_ids, max_new_tokens, options, stream):
        started = time.perf_counter()
        limit = min(max_new_tokens, model.config.context - len(prompt_ids))
        tokens = model.tokens(prompt_ids, limit, options)
        try:
            while True:
                # the device is entered for a step and left before a piece is handed out, so that it never leaks to the caller
                with model.on_device():
                    token = next(tokens, None)
                now = time.perf_counter()
                if token is None:
                    self.finish_reason = "length"
                    break
                self.ids.append(token)
                if len(self.ids) == 1:
                    self.statistics.first_token_seconds = now - started
                    first = now
                self.statistics.new_tokens = len(self.ids)
                self.statistics.decode_seconds = now - first
                if token in model.tokenizer.end_ids:
                    self.finish_reason = "end"
                    break
                piece = stream.push(token)
                if piece:
                    self.text += piece
                    yield piece
                if stream.stopped:
                    self.finish_reason = "stop"
                    break
            rest = stream.finish()
            if rest:
                self.text += rest
                yield rest
        finally:
            tokens.close()
            with model.on_device():
                self.statistics.memory_bytes = backend.memory_bytes()


class LanguageModel:
    """A checkpoint on a device. Made by ``load``."""

    def __init__(self, transformer, tokenizer, chat_template, on):
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.device = on
        self._idle_session = None
        self._engine = None
        self._stream = backend.new_stream() if on.kind == "cuda" else None

    @property
    def config(self):
        """The model's ModelConfig."""
        return self.transformer.config

    @contextmanager
    def on_device(self):
        """A context in which the operations run on this model's device, and on a GPU on its own stream."""
        with device(self.device.kind, arch=self.device.arch), backend.use_stream(self._stream):
            yield

    def encode(self, prompt):
        """Token ids of a prompt: a string as it is written, a list of chat messages, or ids as they are.

        Control tokens written in a prompt string count as such; in a message's content they are text. ValueError for an empty
        prompt, one without tokens, or ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt: an empty string, wanted some text")
            ids = self.tokenizer.encode_prompt(prompt)
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            ids = encode_chat(self.tokenizer, self.chat_template, list(prompt))
        elif isinstance(prompt, list | tuple | np.ndarray):
            for i, token in enumerate(prompt):
                if isinstance(token, bool) or not isinstance(token, int | np.integer):
                    raise TypeError(f"prompt[{i}]: {type(token).__name__}, wanted a token id")
            ids = [int(i) for i in prompt]
            if ids and (min(ids) < 0 or max(ids) >= self.config.vocab):
                raise ValueError(f"prompt: ids {min(ids)} to {max(ids)} for a vocabulary of {self.config.vocab}")
        else:
            raise TypeError(f"prompt: {type(prompt).__name__}, wanted a string, a list of chat messages or token ids")
        if not ids:  # also of a text, whose bytes the vocabulary may lack
            raise ValueError("prompt: no tokens, wanted at least one")
        return ids

    def generate(
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
        stream=False,
        speculate=0,
    ):
        """Continue a prompt (see ``encode``). Returns the text, or with stream=True a ``Generation`` to iterate over.

        temperature 0 is greedy; the rest as ``nbkernels.sample``. stop: a string or several; the text ends before the first one.
        ValueError or TypeError for a wrong option, an empty prompt, or one that does not leave room in the context.

        Of a list of strings, of chats or of lists of ids all are continued at once, by an ``Engine``: returns the list of their
        texts; with stream=True a list of ``Request``s, each to be iterated. Without a seed each has one of its own. speculate: so
        many tokens (0 to 7) are drafted from the text itself and checked in one step, where the choice is greedy: the text stays
        the same.
        """
        check_new_tokens(max_new_tokens)
        check_speculate(speculate)
        options = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed).with_seed()
        stop = check_stop(stop)
        if speculate or _is_several(prompt):
            options = {
                **vars(options),
                "seed": seed,
                "max_new_tokens": max_new_tokens,
                "stop": stop,
                "speculate": speculate,
            }
            return self._generate_all(prompt, options, stream)
        ids = self._encode_within_context(prompt)
        generation = Generation(self, ids, max_new_tokens, options, stop)
        if stream:
            return generation
        for _ in generation:
            pass
        return generation.text

    def _encode_within_context(self, prompt):
        ids = self.encode(prompt)
        if len(ids) >= self.config.context:
            raise ValueError(
                f"prompt: {len(ids)} tokens, wanted fewer than the model's context of {self.config.context}"
            )
        return ids

    def _generate_all(self, prompt, options, stream):
        """``generate`` of several prompts, or of one whose tokens are drafted, by an Engine; options: those of its ``submit``."""
        several = _is_several(prompt)
        prompts = [self._encode_within_context(one) for one in (prompt if several else [prompt])]
        engine = self._engine_for(prompts, options["max_new_tokens"], 1 + options["speculate"], kept=not stream)
        try:
            requests = [engine.submit(ids, **options) for ids in prompts]
            if stream:
                return requests if several else requests[0]
            texts = [request.result() for request in requests]
        except BaseException:
            self._engine = None
            raise
        return texts if several else texts[0]

    def _engine_for(self, prompts, max_new_tokens, rows_each, kept):
        """An Engine for these ids; kept: the one that the model keeps, or in its place a new one where it is too small."""
        rows = min(max(LEAST_ROWS, 1 << (len(prompts) * rows_each - 1).bit_length()), MOST_ROWS)
        pages = [-(-min(self.config.context, len(ids) + max_new_tokens) // ENGINE_PAGE_SIZE) for ids in prompts]
        most = min(sum(pages), max(pages) * rows)
        engine = self._engine if kept else None
        if engine is not None and engine.max_batch >= rows and engine.cache.pages >= most:
            return engine
        if kept:
            self._engine = None  # its pages go first
        with self.on_device():
            fit = pages_for(self.config, self.transformer.dtype, ENGINE_PAGE_SIZE, 1 << (most - 1).bit_length())
        engine = Engine(self, max_batch=rows, pages=max(fit, *pages), max_queue=sys.maxsize)
        if kept:
            self._engine = engine
        return engine

    def tokens(self, prompt_ids, limit, options):
        """The chosen tokens, one after another, at most ``limit``; the device must be entered around each step.

        In a step the host reads the chosen token and nothing else.
        """
        session = self._take_session(len(prompt_ids) + limit)
        try:
            sampler = _Sampler(self, prompt_ids, options)
            # a vocabulary padded beyond the tokenizer's is never drawn from
            vocab = min(self.config.vocab, len(self.tokenizer))
            sampler.choose(session.start(prompt_ids)[:, :vocab], session.token)
            session.post()
            launched = 1
            for produced in range(1, limit + 1):
                # not before the first token, which would wait for the recording of the step behind it
                ahead = session.ahead if produced > 1 else 0
                while launched < min(produced + ahead, limit):
                    sampler.choose(session.extend()[:, :vocab], session.token)
                    session.post()
                    launched += 1
                yield session.take()
        finally:
            self._idle_session = session

    def _take_session(self, capacity):
        """The session of an earlier generation where it is long enough and not in use, else a new one."""
        session, self._idle_session = self._idle_session, None
        if session is None or session.cache.capacity < min(capacity, self.config.context):
            session = Session(self.transformer, capacity)
        return session

    def logits(self, ids):
        """The scores behind every token of a text. ids: token ids -> NumPy float32 [tokens, vocab]."""
        ids = self.encode(ids)
        if len(ids) > self.config.context:
            raise ValueError(f"ids: {len(ids)} tokens, wanted at most the model's context of {self.config.context}")
        with self.on_device():
            config = self.config
            dtype = self.transformer.dtype
            pages = -(-len(ids) // PAGE_SIZE)
            cache = KVCache(config.layers, config.kv_heads, config.head_dim, dtype, pages=pages, page_size=PAGE_SIZE)
            placed = backend.place(np.asarray(ids, np.int32)[None])
            hidden = self.transformer.hidden(placed, cache, [cache.add()])
            return backend.fetch(self.transformer.logits(hidden[0])).astype(np.float32)

    def perplexity(self, text, *, window=512):
        """exp of the mean negative log-likelihood of each token after the first of its window. text: a string or token ids.

        The text is cut into windows of ``window`` tokens, each read on its own.
        """
        if window < 2:
            raise ValueError(f"window: {window}, wanted at least 2 tokens")
        ids = self.encode(text)
        total, count = 0.0, 0
        for start in range(0, len(ids) - 1, window):
            part = ids[start : start + window]
            if len(part) < 2:
                break
            scores = self.logits(part)[:-1]
            largest = scores.max(axis=-1)
            normaliser = np.log(np.exp(scores - largest[:, None]).sum(axis=-1, dtype=np.float64)) + largest
            total += float(np.sum(normaliser - scores[np.arange(len(part) - 1), part[1:]]))
            count += len(part) - 1
        if not count:
            raise ValueError("text: fewer than two tokens")
        return float(np.exp(total / count))


def _is_several(prompt):
    """Whether a prompt is a list of prompts: of strings, or of lists, which are chats or ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    if all(isinstance(one, str) for one in prompt):
        return True
    return all(isinstance(one, list | tuple) for one in prompt)


class _Sampler:
    """Chooses tokens on the device: greedy, or a draw whose counter lives there too."""

    def __init__(self, model, prompt_ids, options):
        self.options = options
        self.greedy = options.temperature == 0 and options.repetition_penalty == 1
        if not self.greedy:
            self.step = backend.zeros((1,), np.dtype(np.int32))
            self.seen = None
            if options.repetition_penalty != 1:
                seen = np.zeros((1, min(model.config.vocab, len(model.tokenizer))), np.uint8)
                seen[0, [i for i in prompt_ids if i < seen.shape[1]]] = 1
                self.seen = backend.place(seen)

    def choose(self, logits, token):
        """logits [1, vocab] -> the chosen token, written into ``token`` int32 [1]."""
        if self.greedy:
            ops.argmax(logits, out=token)
            return
        ops.sample(logits, seen=self.seen, step=self.step, out=token, **vars(self.options))
        ops.advance(self.step, 1)
