"""The Engine: whatever comes and goes beside a request, its text is the one it has alone, and every page comes back."""

import asyncio
import random
import sys
import threading
from collections import deque

import numpy as np
import pytest
import tiny_model

import nbkernels as nbk
from nbkernels.model import backend
from nbkernels.model.engine import Engine
from nbkernels.model.kv_cache import KVCache, OutOfPages
from nbkernels.model.prompt_lookup import PromptLookup
from nbkernels.model.runner import Choice, _RowArrays
from nbkernels.model.sampling import SamplingOptions
from nbkernels.model.scheduler import PrefixCache

pytest.importorskip("gguf")
SMALL = {"page_size": 16, "prefill_tokens": 16}
WORDS = ["the", " a", "fox", "quick ", "zz", ".", "é", " the", "brown", "1", "dog ", "aaa"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return nbk.load(tiny_model.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), device="cpu")


def whole(engine):
    """Nobody has a page, and no request is known."""
    return (
        engine.cache.pages_in_use == engine.prefixes.pages == engine.prefixes.evictable_pages
        and not engine.busy
        and not engine._scheduler.running
    )


def random_request(rng):
    """(prompt, options) of a request whose prompt often begins as another's does."""
    prompt = rng.choice(["", "the quick fox jumps over", "a" * 33, "zz the brown dog. the"])
    prompt += "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    options = {"max_new_tokens": rng.choice([1, 2, 5, 12, 40]), "seed": rng.randrange(50)}
    if rng.random() < 0.5:
        options["temperature"] = rng.choice([0.5, 1.0, 2.0])
        options["top_k"] = rng.choice([None, 3, 20])
        options["top_p"] = rng.choice([None, 0.8])
        options["min_p"] = rng.choice([None, 0.05])
    if rng.random() < 0.2:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.4:
        options["stop"] = [rng.choice("abcdefgh4é"), "the"]
    return prompt, options


def alone(engine, kept, prompt, options):
    """(ids, text, finish reason) of the only request, which finds no other's pages; kept: of those asked for before."""
    key = (prompt, repr(sorted(options.items())))
    if key not in kept:
        engine.prefixes.clear()
        request = engine.submit(prompt, **options)
        kept[key] = (request.ids, request.result(), request.finish_reason)
        assert request.statistics.reused_tokens == request.statistics.preemptions == 0
    return kept[key]


def said(request):
    """What ``alone`` says of a request that is done."""
    return request.ids, request.text, request.finish_reason


def assert_in_order(engine):
    """Who came first runs: nobody waits while a younger one runs, and both stand in the order of their arrival."""
    running, waiting = ([r.number for r in some] for some in (engine._scheduler.running, engine._scheduler.waiting))
    assert [*running, *waiting] == sorted([*running, *waiting])


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
def test_a_thousand_requests_that_come_and_go(tiny, ahead):
    """Few pages, so that requests give way to each other; cancellations, callbacks that raise, and speculation in between."""
    rng = random.Random(1)
    settings = {**SMALL, "max_batch": 6, "pages": 5}
    engine, lone = Engine(tiny, **settings), Engine(tiny, **settings)
    engine._ahead = ahead  # as on a GPU
    sent, kept, cancelled, failing = [], {}, set(), set()

    def callback(number, text):
        if number in failing and rng.random() < 0.5:
            raise OSError(f"callback {number}")
        assert text

    while len(sent) < 1000:
        for _ in range(rng.randint(0, 6)):
            number = len(sent)
            prompt, options = random_request(rng)
            if rng.random() < 0.05:
                failing.add(number)
            extra = {"speculate": rng.choice([0, 0, 3, 7]), "on_text": lambda text, n=number: callback(n, text)}
            sent.append((prompt, options, engine.submit(prompt, **options, **extra)))
        for _ in range(rng.randint(0, 8)):
            engine.step()
            assert_in_order(engine)
        if rng.random() < 0.1 and sent:
            number = rng.randrange(max(0, len(sent) - 20), len(sent))
            sent[number][2].cancel()
            cancelled.add(number)
    engine.run()
    reasons = {"end": 0, "stop": 0, "length": 0, "cancelled": 0, "error": 0}
    for number, (prompt, options, request) in enumerate(sent):
        ids, text, reason = alone(lone, kept, prompt, options)
        reasons[request.finish_reason] += 1
        assert request.ids == ids[: len(request.ids)], number
        if request.finish_reason == "cancelled":
            assert number in cancelled and text.startswith(request.text)
            with pytest.raises(nbk.Cancelled):
                request.result()
        elif request.finish_reason == "error":
            assert number in failing and text.startswith(request.text)
            with pytest.raises(OSError, match=f"callback {number}"):
                request.result()
        else:
            assert said(request) == (ids, text, reason), number
            assert "".join(request) == text
    assert all(reasons.values()), reasons
    statistics = [request.statistics for *_, request in sent]
    assert sum(s.preemptions for s in statistics) > 20, "the pages were meant to run out"
    assert sum(s.reused_tokens for s in statistics) > 1000
    assert sum(s.accepted_tokens for s in statistics) > 50
    assert whole(engine)
    engine.close()
    assert engine.cache.pages_in_use == 0


def test_texts_are_those_of_generate(tiny):
    """With the chunks of a Session."""
    rng = random.Random(2)
    with Engine(tiny, max_batch=8) as engine:
        sent = [(*random_request(rng),) for _ in range(40)]
        requests = [engine.submit(prompt, **options) for prompt, options in sent]
        for (prompt, options), request in zip(sent, requests, strict=True):
            assert request.result(timeout=60) == tiny.generate(prompt, **options)


def test_an_int8_cache(tiny):
    """Scales come and go with the pages."""
    rng = random.Random(5)
    settings = {**SMALL, "max_batch": 6, "pages": 7, "cache_dtype": np.int8}
    engine, lone, kept = Engine(tiny, **settings), Engine(tiny, **settings), {}
    sent = [random_request(rng) for _ in range(80)]
    requests = [engine.submit(prompt, **options) for prompt, options in sent]
    engine.run()
    for (prompt, options), request in zip(sent, requests, strict=True):
        assert said(request) == alone(lone, kept, prompt, options)
    assert sum(request.statistics.preemptions for request in requests) and whole(engine)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_callback_may_close_the_engine(tiny, threaded):
    engine = Engine(tiny, **SMALL, max_batch=4)
    others = [engine.submit("zz", max_new_tokens=60, temperature=2.0, seed=2) for _ in range(2)]
    closing = engine.submit("the", max_new_tokens=20, on_text=lambda _: engine.close())
    if threaded:
        engine.start()
    for request in (closing, *others):
        with pytest.raises(nbk.Cancelled):
            request.result(20)
    if threaded:
        engine._thread.join(20)
    assert not engine.busy and engine.cache.pages_in_use == 0


def test_a_callback_that_exits_its_thread(tiny):
    """Of the Engine's own thread it ends the one request, as any error does."""
    with Engine(tiny, **SMALL, max_batch=4) as engine:
        other = engine.submit("zz", max_new_tokens=30)
        leaving = engine.submit("the", max_new_tokens=20, on_text=lambda _: sys.exit(3))
        with pytest.raises(SystemExit):
            leaving.result(20)
        assert other.result(20) == tiny.generate("zz", max_new_tokens=30)


def test_a_turn_that_is_interrupted_forgets_nobody(tiny):
    """Ctrl-C in a callback: texts whose last tokens were chosen in the same turn, and have no memory any more, end with it."""

    def interrupt(_):
        raise KeyboardInterrupt

    engine = Engine(tiny, **SMALL, max_batch=4)
    requests = [engine.submit("the", max_new_tokens=1, on_text=on_text) for on_text in (interrupt, None)]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert [request.finish_reason for request in requests] == ["error"] * 2
    assert not engine.busy and engine.cache.pages_in_use == engine.prefixes.pages


def test_an_error_while_a_request_is_admitted_reaches_it(tiny, monkeypatch):
    engine = Engine(tiny, **SMALL, max_batch=4)
    requests = [engine.submit("the", max_new_tokens=3) for _ in range(2)]
    monkeypatch.setattr(engine.cache, "add", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert [request.finish_reason for request in requests] == ["error"] * 2


def test_the_last_piece_is_not_lost(tiny):
    """The text may come to its end between an iterator's look for pieces and its look for the end."""
    engine = Engine(tiny, **SMALL)

    class Late(deque):
        def __bool__(self):
            there = len(self) > 0
            engine.run()
            return there

    request = engine.submit("the", max_new_tokens=3)
    request._pieces = Late()
    assert "".join(request) == request.text == tiny.generate("the", max_new_tokens=3)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_callback_that_waits_for_a_request_is_told(tiny, threaded):
    """It would wait for its own thread: the request whose callback it is ends, the other one does not."""
    engine = Engine(tiny, **SMALL, max_batch=4)
    waiting = [engine.submit(prompt, on_text=lambda _: other.result()) for prompt in ("the", "fox")]
    other = engine.submit("zz", max_new_tokens=30)
    if threaded:
        engine.start()
    for request in waiting:
        with pytest.raises(RuntimeError, match="on_text must not wait"):
            request.result(20)
    assert other.result(20) == tiny.generate("zz", max_new_tokens=30)
    engine.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_how_long_a_result_is_waited_for(tiny, threaded):
    engine = Engine(tiny, **SMALL)
    if threaded:
        engine.start()
    with pytest.raises(TimeoutError):
        engine.submit("the", max_new_tokens=3).result(-1)
    assert engine.submit("the", max_new_tokens=3).result(float("inf")) == tiny.generate("the", max_new_tokens=3)
    engine.close()


def test_threads_submit_and_cancel(tiny):
    with Engine(tiny, **SMALL, max_batch=4, pages=10) as engine:
        texts = {}

        def ask(number):
            request = engine.submit("the fox " + str(number % 10), max_new_tokens=20, temperature=1.0, seed=number)
            if number % 4 == 3:
                next(iter(request), None)
                request.cancel()
            else:
                texts[number] = "".join(request)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert sorted(texts) == [n for n in range(32) if n % 4 < 3]
        for number, text in texts.items():
            again = engine.submit("the fox " + str(number % 10), max_new_tokens=20, temperature=1.0, seed=number)
            assert again.result(60) == text
    assert engine.cache.pages_in_use == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit("a")


def test_asyncio(tiny):
    async def main():
        with Engine(tiny, **SMALL, max_batch=4) as engine:

            async def read(prompt):
                return "".join([piece async for piece in engine.stream(prompt, max_new_tokens=15)])

            texts = await asyncio.gather(*(read(p) for p in ("the", "fox", "zz")))
            assert texts == [engine.submit(p, max_new_tokens=15).result() for p in ("the", "fox", "zz")]
            pieces = engine.stream("the quick", max_new_tokens=40)
            async for _ in pieces:
                break
            await pieces.aclose()
            for _ in range(500):
                if whole(engine):
                    break
                await asyncio.sleep(0.01)
            assert whole(engine), "who leaves the loop cancels the request"
        engine = Engine(tiny, **SMALL)
        done, left = (engine.submit("the", max_new_tokens=n) for n in (3, 30))
        text = done.result()
        engine.close()
        assert "".join([piece async for piece in engine.pieces(done)]) == text, "what came before the end is there"
        assert text.startswith("".join([piece async for piece in engine.pieces(left)]))
        assert left.finish_reason == "cancelled"

    asyncio.run(main())


def test_speculation_says_the_same_in_fewer_steps(tiny):
    """A text that repeats itself, as a greedy tiny model's does."""
    engine = Engine(tiny, **SMALL, max_batch=8)
    plain = engine.submit("a" * 30, max_new_tokens=30)
    plain.result()
    drafted = engine.submit("a" * 30, max_new_tokens=30, speculate=7)
    steps = 0
    while engine.step():
        steps += 1
    assert drafted.ids == plain.ids and drafted.text == plain.text
    accepted = drafted.statistics.accepted_tokens
    assert accepted > 5 and steps <= len(plain.ids) - accepted + 3
    assert whole(engine)


def test_steps_that_run_ahead(tiny):
    """Every step but the first is launched before the tokens of the one before it are taken; ends come as surprises."""
    engine = Engine(tiny, **SMALL, max_batch=4)
    engine._ahead = True
    calls = []
    runner = engine._runner
    for name in ("launch", "launch_again", "tokens"):
        method = getattr(runner, name)
        setattr(runner, name, lambda *args, name=name, method=method: (calls.append(name), method(*args))[1])
    request = engine.submit("the", max_new_tokens=6, seed=1, temperature=1.0)
    assert request.result() == tiny.generate("the", max_new_tokens=6, seed=1, temperature=1.0)
    assert calls == ["launch", *["launch_again", "tokens"] * 4, "tokens"]
    plain = tiny.generate("the", max_new_tokens=20)
    stopped = engine.submit("the", max_new_tokens=20, stop=plain[6:8])
    assert stopped.result() == tiny.generate("the", max_new_tokens=20, stop=plain[6:8])
    engine.run()
    assert whole(engine) and not engine._flight and not runner._tokens


def test_prompt_lookup():
    lookup = PromptLookup([1, 2, 3, 4, 5, 2, 3])
    assert lookup.draft(3) == [4, 5, 2], "behind (2, 3)"
    lookup.push(9)
    assert lookup.draft(3) == []
    for token in (1, 2, 3, 9):
        lookup.push(token)
    assert lookup.draft(7) == [1, 2, 3, 9], "behind the last (2, 3, 9), not further than there is text"


def test_a_prompt_is_read_once(tiny):
    engine = Engine(tiny, **SMALL, max_batch=4)
    first = engine.submit("a" * 40, max_new_tokens=3)
    first.result()
    second = engine.submit("a" * 40 + "b", max_new_tokens=3)
    second.result()
    assert first.statistics.reused_tokens == 0 and second.statistics.reused_tokens == 32
    both = [engine.submit("zz" * 20, max_new_tokens=3) for _ in range(2)]
    engine.run()
    assert [r.statistics.reused_tokens for r in both] == [0, 32], "also where both came at once"


def test_the_oldest_prefix_goes_first():
    with nbk.device("cpu"):
        cache = KVCache(1, 1, 4, np.float32, pages=4, page_size=16, max_sequences=2)
        prefixes = PrefixCache(cache, 16)
        sequence = cache.add()
        cache.reserve((sequence,), 48)
        cache.count((sequence,), 48)
        pages = cache.page_numbers(sequence)
        parent = prefixes.keep(0, [1], pages[:1])
        prefixes.keep(parent, [2], pages[1:2])
        other = prefixes.keep(0, [3], pages[2:])
        assert not prefixes.evict(), "a sequence has all of them"
        cache.free(sequence)
        assert prefixes.evictable_pages == 3 and cache.pages_in_use == 3
        assert prefixes.find(0, [1]).number == parent and prefixes.find(0, [4]) is None
        assert prefixes.evict() and prefixes.find(parent, [2]) is None, "no parent before its child"
        assert prefixes.evict() and prefixes.find(0, [3]) is None, "used longest ago"
        assert prefixes.keep(other, [5], pages[:1]) == other and prefixes.pages == 1, "behind what was evicted: nothing"
        prefixes.clear()
        assert cache.pages_in_use == 0


def test_what_can_be_evicted():
    """A chunk that only the cache has stays while somebody has one behind it: a sequence whose own pages came back elsewhere."""
    with nbk.device("cpu"):
        cache = KVCache(1, 1, 4, np.float32, pages=6, page_size=16, max_sequences=2)
        prefixes = PrefixCache(cache, 16)
        sequence = cache.add()
        cache.reserve((sequence,), 16)
        cache.count((sequence,), 16)
        parent = prefixes.keep(0, [1], cache.page_numbers(sequence))
        saved = cache.save(sequence)
        cache.free(sequence)
        assert prefixes.evictable_pages == 1
        again = cache.restore(saved)
        cache.reserve((again,), 16)
        cache.count((again,), 16)
        prefixes.keep(parent, [2], cache.page_numbers(again)[1:])
        assert prefixes.pages == 2 and prefixes.evictable_pages == 0 and not prefixes.evict()
        cache.free(again)
        assert prefixes.evictable_pages == 2


@pytest.mark.parametrize("dtype", [np.float32, np.int8], ids=["float32", "int8"])
def test_a_sequence_is_saved_and_restored(dtype):
    rng = np.random.default_rng(0)
    with nbk.device("cpu"):
        cache = KVCache(2, 1, 4, dtype, pages=4, page_size=16, max_sequences=3)
        first = cache.add()
        cache.reserve((first,), 20)
        cache.count((first,), 20)
        for array in cache._arrays:
            array[...] = (100 * rng.standard_normal(array.shape)).astype(array.dtype)
        saved = cache.save(first)
        want = [array[cache.page_numbers(first)].copy() for array in cache._arrays]
        blocker = cache.add()
        cache.reserve((blocker,), 16)
        with pytest.raises(OutOfPages):
            cache.restore(saved)
        assert cache.free_pages == 1
        cache.free(first)
        for array in cache._arrays:
            array[:] = 0
        again = cache.restore(saved)
        assert cache.length(again) == 20
        for array, values in zip(cache._arrays, want, strict=True):
            np.testing.assert_array_equal(array[cache.page_numbers(again)], values)
        with pytest.raises(ValueError, match="wanted 2 full pages"):
            cache.adopt(again, [0])
        with pytest.raises(ValueError, match="which no sequence has"):
            cache.hold([cache._free[0]])


def test_limits(tiny):
    engine = Engine(tiny, **SMALL, max_batch=2, max_queue=2, pages=3, max_prompt=40)
    with pytest.raises(ValueError, match="prompt: 41 tokens, wanted at most 40"):
        engine.submit("b" * 41)
    with pytest.raises(ValueError, match="prompt: 40 tokens and 24 new ones, wanted at most the 48"):
        engine.submit("b" * 40)
    engine.submit("a", max_new_tokens=2)
    engine.submit("a", max_new_tokens=2)
    with pytest.raises(nbk.QueueFull, match="2 requests"):
        engine.submit("a", max_new_tokens=2)
    engine.run()
    assert engine.submit("a", max_new_tokens=2).result() == tiny.generate("a", max_new_tokens=2)
    assert whole(engine)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"max_batch": 0}, ValueError, "max_batch: 0"),
        ({"pages": 1.5}, TypeError, "pages: float"),
        ({"page_size": 0}, ValueError, "page_size: 0"),
        ({"page_size": "64"}, TypeError, "page_size: str"),
        ({"prefill_tokens": 100}, ValueError, "prefill_tokens: 100, wanted a multiple of page_size 64"),
        ({"context": 10**6}, ValueError, f"context: 1000000, wanted at most the model's {tiny_model.CONTEXT}"),
    ],
)
def test_wrong_settings_name_themselves(tiny, options, error, message):
    with pytest.raises(error, match=message):
        Engine(tiny, **options)


def test_a_path_is_no_model():
    with pytest.raises(TypeError, match=r"model: str, wanted a LanguageModel, as nbkernels\.load gives it"):
        Engine("model.gguf")


@pytest.mark.parametrize(
    "options, error",
    [
        ({"speculate": 8}, ValueError),
        ({"speculate": True}, TypeError),
        ({"on_text": "print"}, TypeError),
        ({"max_new_tokens": 0}, ValueError),
        ({"temperature": -1}, ValueError),
        ({"stop": [""]}, ValueError),
    ],
)
def test_wrong_options_name_themselves(tiny, options, error):
    with pytest.raises(error, match=next(iter(options))):
        Engine(tiny).submit("the", **options)


def test_options_at_their_limits_on_a_device():
    """What the checks let through fits into the numbers that the kernels read."""
    extreme = [SamplingOptions(1e20, 2**70, 1e-300, 1e-300, 1e6, 2**64 - 1), SamplingOptions(1e-20, seed=0)]
    with nbk.device("emulator", arch="sm_90a"):
        rows = _RowArrays(2, 1)
        for i, options in enumerate(extreme):
            rows.set_choice(i, Choice(options, 0))
    assert rows.host["top_k"].tolist() == [2**31 - 1, 0] and rows.host["seed"].tolist() == [2**64 - 1, 0]
    assert (rows.host["temperature"] > 0).all() and np.isfinite(rows.host["temperature"]).all()


def test_an_error_in_the_work_reaches_every_request(tiny, monkeypatch):
    engine = Engine(tiny, max_batch=2)
    requests = [engine.submit("the") for _ in range(3)]
    monkeypatch.setattr(engine._runner, "launch", lambda rows: 1 / 0)
    with engine:
        for request in requests:
            with pytest.raises(ZeroDivisionError):
                request.result(10)
        with pytest.raises(RuntimeError, match="stopped after an error"):
            engine.submit("the")


# ---- on a device: steps of a batch in one pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, dtype, quantize", [("sm_90a", "bfloat16", "int8"), ("sm_80", "float32", None)])
def test_a_batch_on_the_emulator(tmp_path, arch, dtype, quantize):
    """A neighbour of every kind: other lengths, a draw, a penalty, drafts, a prompt that begins alike."""
    prompts = ["the quick", "fox jumps over the lazy dog a the", "fox jumps over the lazy dog"]
    options = [{}, {"temperature": 0.8, "top_k": 9}, {"repetition_penalty": 1.3}]
    options = [{"max_new_tokens": 4, "seed": i, **more} for i, more in enumerate(options)]
    with nbk.device("emulator", arch=arch):
        model = nbk.load(tiny_model.write(tmp_path / "t.gguf"), device="emulator", dtype=dtype, quantize=quantize)
    engine = Engine(model, **SMALL, max_batch=4, pages=12)
    engine._ahead = arch == "sm_90a"  # as on a GPU
    together = [
        engine.submit(p, speculate=3 * (i == 0), **o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))
    ]
    engine.run()
    assert together[2].statistics.reused_tokens == 16
    for request, prompt, chosen in zip(together, prompts, options, strict=True):
        lone = engine.submit(prompt, **chosen)
        lone.result()
        assert request.ids == lone.ids
    assert whole(engine)


@pytest.mark.parametrize("kind", ["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_neighbour_of_many_pages(tmp_path, monkeypatch, kind):
    """The table is as wide as its context: the other's keys are walked in two splits, one of them empty, with the same bits."""
    monkeypatch.setattr(tiny_model, "CONTEXT", 320)
    with nbk.device(kind, arch="sm_90a" if kind == "emulator" else None):
        model = nbk.load(tiny_model.write(tmp_path / "t.gguf"), device=kind, dtype="bfloat16")
    engine = Engine(model, max_batch=4, pages=10)
    found = []
    for neighbours in ((), ("fox " * 70,)):
        options = {"max_new_tokens": 3, "temperature": 1.0, "seed": 5}
        request, *_ = [engine.submit(prompt, **options) for prompt in ("the quick", *neighbours)]
        engine.run()
        with engine._on_device():
            found.append((request.ids, backend.fetch(engine._runner.logits)[0].tolist()))
    assert engine._runner._last[:2] == (2, 5) and found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, quantize", [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int8-activations")]
)
def test_requests_on_a_gpu(tmp_path, dtype, quantize):
    """Graphs of all sizes, as they come; the same texts alone. Chunks are larger than a product's few rows."""
    rng = random.Random(3)
    model = nbk.load(tiny_model.write(tmp_path / "t.gguf"), device="cuda", dtype=dtype, quantize=quantize)
    settings = {**SMALL, "max_batch": 24, "pages": 40}
    engine, lone, kept = Engine(model, **settings), Engine(model, **settings), {}
    sent = []
    while len(sent) < 300:
        for _ in range(rng.randint(0, 12)):
            prompt, options = random_request(rng)
            sent.append((prompt, options, engine.submit(prompt, **options, speculate=rng.choice([0, 5]))))
        for _ in range(rng.randint(0, 10)):
            engine.step()
    engine.run()
    for prompt, options, request in sent:
        assert said(request) == alone(lone, kept, prompt, options)
    assert whole(engine)


@pytest.mark.gpu
def test_a_gpu_says_what_the_cpu_says(tmp_path):
    path = tiny_model.write(tmp_path / "t.gguf")
    cpu, gpu = (nbk.load(path, device=kind, dtype="float32") for kind in ("cpu", "cuda"))
    rng = random.Random(4)
    sent = [random_request(rng) for _ in range(40)]
    with Engine(gpu, **SMALL, max_batch=16) as engine:
        requests = [engine.submit(prompt, **options) for prompt, options in sent]
        texts = [request.result(60) for request in requests]
    # float32 sums in another order: a near tie may turn, seldom
    alike = sum(text == cpu.generate(prompt, **options) for text, (prompt, options) in zip(texts, sent, strict=True))
    assert alike >= len(sent) - 2


@pytest.mark.gpu
def test_a_mailbox():
    from nbkernels.launch.memory import Mailbox, to_device

    with nbk.device("cuda"):
        mailbox = Mailbox(16)
        arrays = [np.arange(4, dtype=np.int32) + i for i in range(6)]
        placed = [to_device(array) for array in arrays]
        mailbox.post(placed[0])
        for before, array in zip(arrays, placed[1:], strict=False):
            mailbox.post(array)
            with pytest.raises(ValueError, match="mailbox of 2 times 16 bytes"):
                mailbox.post(array)
            np.testing.assert_array_equal(mailbox.take(), before)
        mailbox.clear()
        mailbox.post(placed[2][:1])
        assert mailbox.take().tolist() == [2]


@pytest.mark.gpu
def test_steady_decode_takes_no_memory(tmp_path):
    from nbkernels.launch.memory import used_bytes

    model = nbk.load(tiny_model.write(tmp_path / "t.gguf"), device="cuda")
    engine = Engine(model, **SMALL, max_batch=8, pages=64)

    def ask(count):
        for i in range(count):
            engine.submit("the quick " + "a" * (i % 20), max_new_tokens=30, temperature=float(i % 2), seed=i % 7)
        engine.run()

    ask(60)
    with model.on_device():
        before = used_bytes()
    ask(400)
    with model.on_device():
        assert used_bytes() <= before
