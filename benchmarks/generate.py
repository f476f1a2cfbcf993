"""Whole models from prompt to token: batch 1, a full batch through the Engine, and a long prompt.

Random weights of Llama-3-8B's and SmolLM2-135M's shapes, made on the device, and SmolLM2-135M itself where its file is at hand.
Each figure of a decode step stands beside the bytes that it must read (weights once, keys and values of the context) at the speed
of a device-to-device copy; that of a prompt beside the rate of a bf16 product. With torch and transformers, steps of theirs are
measured too (``generate_peers``), and how many times as many tokens ours are.

The start is that of a process of its own, from its first instruction to its first piece of text, kernels to be compiled and kept.
Behind a full batch stands by how much the device's memory in use has grown over STEPS_64 steps, some 10,000 tokens.

What has not begun after TIME_LIMIT_S is named, and left out. ``--match`` chooses by model and part, as in "Llama-3-8B int8,
batch 64"; ``--without torch.compile --without transformers`` leaves the peers out, which take minutes. On the CPU only the
demo's model is measured.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import nbkernels as nbk
from benchmarks import generate_peers, harness
from nbkernels import ops
from nbkernels.arrays import bfloat16
from nbkernels.launch.device import current
from nbkernels.model import backend, demo_model
from nbkernels.model.config import ModelConfig, Rotary
from nbkernels.model.engine import Engine
from nbkernels.model.generation import LanguageModel
from nbkernels.model.session import Session
from nbkernels.model.transformer import QUANTIZATIONS, Layer, Transformer, Weights

PROMPT = "Once upon a time, there was a little robot who"
NEW_TOKENS = 256
TEXT = Path(__file__).parent.parent / "tests" / "data" / "perplexity.txt"  # the beginning of Pride and Prejudice
VARIANTS = {
    "cuda": ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantize": "int8"}),
    "cpu": ({"dtype": "float32"},),
}
LLAMA = ModelConfig(
    architecture="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, feed_forward=14336, vocab=128256,
    context=8448, rope_dim=128, rotaries=(Rotary(base=500000.0),), norm_eps=1e-5,
)  # fmt: skip
SMOLLM2 = ModelConfig(
    architecture="llama", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, feed_forward=1536, vocab=49152,
    context=8448, rope_dim=64, rotaries=(Rotary(base=100000.0),), norm_eps=1e-5,
)  # fmt: skip
# (name, config, whether the head is the embedding, quantize)
MODELS = (
    ("Llama-3-8B int8", LLAMA, False, "int8"),
    ("Llama-3-8B int8-rows", LLAMA, False, "int8-rows"),
    ("Llama-3-8B bf16", LLAMA, False, None),
    ("SmolLM2-135M bf16", SMOLLM2, True, None),
    ("SmolLM2-135M int8", SMOLLM2, True, "int8"),
)
# of whom a peer is measured, and what: (sequences, context, function of (model, sequences, context, steps))
PEER_STEPS = {
    "torch.compile, batch 1": (1, 512, generate_peers.step_seconds),
    "transformers, batch 64": (64, 1024, generate_peers.generate_seconds),
}
PEERS = {"Llama-3-8B int8": tuple(PEER_STEPS), "SmolLM2-135M bf16": ("torch.compile, batch 1",)}
TIME_LIMIT_S = 420
RANDOM_ELEMENTS = 2**24  # made on the host once; every matrix is cut from them, beginning elsewhere
DEVIATION = 0.02
STEPS, STEPS_64 = 64, 160  # that are timed, of batch 1 and 64
START_TIMEOUT_S = 120
LONG_PROMPT = 8192


class NoTokenizer:
    """In the place of a Tokenizer, for models whose tokens mean nothing: no token ends a text."""

    end_ids = frozenset()

    def __init__(self, vocab):
        self.vocab = vocab

    def __len__(self):
        return self.vocab

    def token_bytes(self, token):
        """One character a token."""
        return b"x"


# ---- random models -----------------------------------------------------------------------------------------------------------


class RandomMatrices:
    """Matrices of a dtype on the current device, quantised if wanted: stretches of one random array."""

    def __init__(self, dtype, quantize, elements=RANDOM_ELEMENTS):
        rng = np.random.default_rng(0)
        self.values = backend.place((DEVIATION * rng.standard_normal(elements, np.float32)).astype(dtype))
        self.quantize = quantize
        self.at = 0

    def __call__(self, rows, columns):
        """One more matrix."""
        matrix = backend.zeros((rows, columns), self.values.dtype)
        flat, done, total = matrix.reshape(-1), 0, self.values.shape[0]
        while done < rows * columns:
            count = min(rows * columns - done, total - self.at)
            backend.copy(flat[done : done + count], self.values[self.at : self.at + count])
            done += count
            # the next stretch begins elsewhere in the array, and where rows divide it not at the same place of one
            self.at = (self.at + count + 8) % total
        if self.quantize is None:
            return matrix
        return backend.operations().quantize_int8(matrix, group_size=QUANTIZATIONS[self.quantize][0])


def random_transformer(config, tied, quantize, dtype=bfloat16, elements=RANDOM_ELEMENTS):
    """A Transformer of random weights on the current device; tied: whether the head is the embedding."""
    matrix = RandomMatrices(dtype, quantize, elements)
    norm = Weights(backend.place(np.ones(config.hidden, dtype)))
    layers = [
        Layer(
            attention_norm=norm,
            qkv=Weights(matrix(config.q_width + 2 * config.kv_width, config.hidden)),
            q_norm=None,
            k_norm=None,
            output=Weights(matrix(config.hidden, config.q_width)),
            post_attention_norm=None,
            feed_forward_norm=norm,
            gate_up=Weights(matrix(2 * config.feed_forward, config.hidden)),
            down=Weights(matrix(config.hidden, config.feed_forward)),
            post_feed_forward_norm=None,
        )
        for _ in range(config.layers)
    ]
    embedding = matrix(config.vocab, config.hidden)
    head = embedding if tied else matrix(config.vocab, config.hidden)
    return Transformer(config, dtype, embedding, layers, norm, head)


def step_bytes(transformer, rows, context):
    """What a decode step must read: every weight but the embedding (unless it is the head), and all keys and values."""
    config = transformer.config
    weights = transformer.nbytes
    if transformer.head is not transformer.embedding:
        weights -= transformer.embedding.nbytes
    return weights + rows * context * key_value_bytes(config, transformer.dtype)


def key_value_bytes(config, dtype):
    """Of a token."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def prompt_flops(config, tokens):
    """Products and attention of a prompt: 2 a weight and token, and 4 · head_dim a head and pair of a query and a key it sees."""
    width, kv_width = config.q_width, config.kv_width
    weights = config.hidden * (2 * width + 2 * kv_width + 3 * config.feed_forward)
    pairs = tokens * (tokens + 1) // 2
    return config.layers * (2 * weights * tokens + 4 * width * pairs)


def random_ids(config, count, seed):
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(0, config.vocab, count).tolist()


# ---- what is measured --------------------------------------------------------------------------------------------------------


def batch_1(model, speeds, context=512, steps=STEPS):
    """Tokens a second of one sequence, as ``generate`` makes them, and without the host's part.

    Where all layers are one launch, also those of a step with a launch an operation.
    """
    row, together = _lone_row(model, speeds, context, steps, one_launch=True)
    if together:
        apart, _ = _lone_row(model, speeds, context, steps, one_launch=False)
        kept = ("tokens_per_second", "step_ms", "replay_ms", "kernels_of_replay")
        row |= {f"{name}, a launch an operation": apart[name] for name in kept if name in apart}
    return row


def _lone_row(model, speeds, context, steps, one_launch):
    """(``decode_row`` of one sequence, whether its layers are one launch)."""
    transformer = model.transformer
    with model.on_device():
        session = Session(transformer, context + 6 * steps, one_launch=one_launch)
        ops.argmax(session.start(random_ids(transformer.config, context - steps // 2, 0)), out=session.token)
        session.post()

        def token():
            ops.argmax(session.extend(), out=session.token)
            session.post()
            session.take()  # the one before

        seconds = timed(token, steps, warm=3)
        replay = kernels = None
        if on_gpu(model):
            replay = timed(session.extend, steps, finish=lambda: backend.fetch(session.logits))
            kernels = kernel_seconds(session.extend)
    return decode_row(transformer, 1, context, seconds, replay, kernels, speeds), session.together is not None


def batch_64(model, speeds, context=1024, steps=STEPS_64, rows=64, chunk=8192):
    """Tokens a second of as many requests as a batch holds, each with a prompt of its own, through the Engine.

    ``context`` tokens stand before the first step that counts.

    chunk: of prompts a turn, whole ones here, so that the first of them don't end before the last is read.
    """
    config = model.config
    most = context + 3 * steps
    engine = Engine(model, pages=rows * -(-most // 64), context=most, max_batch=rows, prefill_tokens=chunk)
    requests = [engine.submit(random_ids(config, context, i), max_new_tokens=3 * steps) for i in range(rows)]
    start = time.perf_counter()
    while any(request.statistics.first_token_seconds == 0 for request in requests):
        engine.step()
    prefill = time.perf_counter() - start
    for _ in range(3):
        engine.step()
    before, memory = [len(request.ids) for request in requests], device_bytes(model)
    start = time.perf_counter()
    count = 0
    while count < steps and not any(request.done for request in requests):
        engine.step()
        count += 1
    elapsed = time.perf_counter() - start
    made = sum(len(request.ids) for request in requests) - sum(before)
    replay, kernels, grown = None, None, {}
    if on_gpu(model):
        grown = {"memory_growth_bytes": device_bytes(model) - memory, "tokens": made}
        runner = engine._runner
        with engine._on_device():  # the last step once more, and again
            replay = timed(runner.repeat, steps, finish=lambda: backend.fetch(runner.logits))
            kernels = kernel_seconds(runner.repeat)
    engine.close()
    row = decode_row(model.transformer, rows, context, elapsed * rows / max(made, 1), replay, kernels, speeds)
    return {**row, "prefill_tokens_per_second": rows * context / prefill, **grown}


def device_bytes(model):
    """Bytes of a GPU's memory in use; of other devices what ``backend.memory_bytes`` says."""
    with model.on_device():
        return backend.memory_bytes()


def long_prompt(model, speeds, tokens=LONG_PROMPT, chunks=(512, 2048, 8192)):
    """Seconds of a prompt, read in chunks of several sizes."""
    config, transformer = model.config, model.transformer
    flops = prompt_flops(config, tokens)
    row = {}
    ids = np.array([random_ids(config, tokens, 0)], np.int32)
    with model.on_device():
        session = Session(transformer, tokens)
        for chunk in chunks:

            def read(chunk=chunk):
                session.cache.truncate(session.sequences[0], 0)
                session.cache.reserve(session.sequences, tokens)
                for begin in range(0, tokens, chunk):
                    piece = backend.place(np.ascontiguousarray(ids[:, begin : begin + chunk]))
                    hidden = transformer.hidden(piece, session.cache, session.sequences)
                backend.fetch(transformer.logits(hidden[:, -1]))

            seconds = timed(read, 2, warm=1)
            row[f"prefill_tokens_per_second, chunks of {chunk}"] = tokens / seconds
            row[f"flops_a_second, chunks of {chunk}"] = flops / seconds
    best = max(value for name, value in row.items() if name.startswith("flops"))
    row["context"] = tokens
    if speeds.get("matmul_flops_a_second"):
        row["of_matmul"] = best / speeds["matmul_flops_a_second"]
    return row


PARTS = (("batch 1", batch_1), ("batch 64", batch_64), ("prompt", long_prompt))


def decode_row(transformer, rows, context, seconds, replay, kernels, speeds):
    """Figures of a decode step: seconds of a whole step; of its graph alone, and the sum of its kernels', or None."""
    nbytes = step_bytes(transformer, rows, context)
    row = {"context": context, "tokens_per_second": rows / seconds, "step_ms": seconds * 1e3, "step_bytes": nbytes}
    if speeds.get("copy_bytes_a_second"):
        row["of_copy"] = nbytes / seconds / speeds["copy_bytes_a_second"]
    if replay is not None:
        row["replay_ms"] = replay * 1e3
        if kernels is not None:
            row["kernels_of_replay"] = kernels / replay
    return row


def timed(function, count, *, warm=1, finish=lambda: None):
    """Mean seconds of a call, of so many after ``warm`` ones; finish: waits for the work, once behind all."""
    for _ in range(warm):
        function()
    finish()
    start = time.perf_counter()
    for _ in range(count):
        function()
    finish()
    return (time.perf_counter() - start) / count


def kernel_seconds(function, count=4):
    """Sum of the kernels' times of a call, by torch's profiler; None without torch and a GPU. Overlapping ones count twice."""
    torch = harness.torch
    if torch is None or not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            function()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if str(event.device_type).endswith("CUDA")]
    total = sum(event.time_range.elapsed_us() for event in kernels)
    return total * 1e-6 / count or None


def on_gpu(model):
    """Whether a model's steps are graphs."""
    return model.device.kind == "cuda"


# ---- what it is compared with ------------------------------------------------------------------------------------------------


def measure_speeds():
    """The speed of a copy, and the rate of a large bf16 product by our kernel and by torch's; what torch measures needs it."""
    speeds = {}
    x = backend.place(np.ones((LONG_PROMPT, 4096), bfloat16))
    weight = RandomMatrices(bfloat16, None)(14336, 4096)
    out = backend.zeros((LONG_PROMPT, 14336), bfloat16)
    flops = 2 * LONG_PROMPT * 4096 * 14336
    seconds = timed(lambda: ops.matmul(x, weight, out=out), 20, finish=lambda: backend.fetch(out[:1]))
    speeds["matmul_flops_a_second"] = flops / seconds
    torch = harness.torch
    if torch is not None and torch.cuda.is_available():
        speeds["copy_bytes_a_second"] = harness.copy_speed()
        a, b = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (LONG_PROMPT, 14336))
        microseconds = harness.time_call(lambda one: torch.nn.functional.linear(*one), [(a, b)])
        speeds["torch_matmul_flops_a_second"] = flops / (microseconds * 1e-6)
    return speeds


def measure_peers(label, names, steps=STEPS):
    """Yields (name, row) of transformers' steps with one of MODELS, or with "failed"; names: those wanted."""
    (model,) = (model for model in MODELS if model[0] == label)
    llama = None
    for peer in PEERS[label]:
        if f"{label}, {peer}" not in names:
            continue
        try:
            llama = llama or generate_peers.random_llama(*model[1:], harness.torch.device("cuda"))
            rows, context, function = PEER_STEPS[peer]
            seconds = function(llama, rows, context, steps)
            row = {"context": context, "tokens_per_second": rows / seconds, "step_ms": seconds * 1e3}
        except Exception as error:  # of another's package, of which there are many versions
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        yield f"{label}, {peer}", row


def ratios(rows):
    """A row for each of ours that has a peer: how many times as many tokens a second ours are. Peers' int8 has a scale a row."""
    speed = {row["model"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}
    found = []
    for label, peers in PEERS.items():
        alike = [name for name, *_ in MODELS if name.startswith(label)]
        for mine, peer in itertools.product(alike, peers):
            ours, theirs = f"{mine}, batch {PEER_STEPS[peer][0]}", f"{label}, {peer}"
            if ours in speed and theirs in speed:
                found.append({"model": f"{ours}, of {peer}", "times": speed[ours] / speed[theirs]})
    return found


# ---- the demo's model --------------------------------------------------------------------------------------------------------


def measure(options):
    """One row: seconds and figures of the demo's model loaded with ``options``."""
    start = time.perf_counter()
    model = nbk.load(demo_model.path(), **options)
    loaded = time.perf_counter() - start
    for _ in range(2):  # the first one compiles kernels
        generation = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, stream=True)
        for _ in generation:
            pass
    statistics = generation.statistics
    return {
        "load_seconds": loaded,
        "first_token_seconds": statistics.first_token_seconds,
        "new_tokens": statistics.new_tokens,
        "tokens_per_second": statistics.tokens_per_second,
        "weight_bytes": model.transformer.nbytes,
        "memory_bytes": statistics.memory_bytes,
        "perplexity": model.perplexity(TEXT.read_text()),
    }


def start(path, kind):
    """Seconds from the start of a process to the first piece of a model's text: with no kernels kept, and then with all."""
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            seconds.append(first_piece_seconds(path, kind, cache))
    return {"first_token_seconds, empty cache": seconds[0], "first_token_seconds, kernels kept": seconds[1]}


def first_piece_seconds(path, kind, cache):
    """Of ``nbkernels generate`` with a model; cache: the folder of its compiled kernels."""
    options = ["--model", path, "--device", kind, "--max-new-tokens", "8", "--no-summary"]
    command = [sys.executable, "-m", "nbkernels.cli", "generate", PROMPT, *map(str, options)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "NBKERNELS_CACHE": cache})
    try:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.communicate(timeout=START_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode or not first:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


# ---- the run -----------------------------------------------------------------------------------------------------------------


def jobs(kind, match="", without=()):
    """(names of the rows, function of ``speeds`` that yields (name, row)) of all that is to be measured on a kind of device."""
    found = []
    if demo_model.path().exists():
        for options in VARIANTS[kind]:
            name = f"SmolLM2-135M-Instruct {options.get('quantize', options['dtype'])}, generate"
            found.append(([name], lambda speeds, name=name, options=options: [(name, {**options, **measure(options)})]))
    if kind == "cuda":
        for model in MODELS:
            names = [f"{model[0]}, {part}" for part, _ in PARTS]
            found.append((names, lambda speeds, model=model: measure_model(model, speeds, match)))
    if demo_model.path().exists():  # it takes long, and peers longer
        name = "SmolLM2-135M-Instruct, start"
        found.append(([name], lambda speeds: [(name, start(demo_model.path(), kind))]))
    if kind == "cuda" and generate_peers.available():
        for label, peers in PEERS.items():
            names = [f"{label}, {peer}" for peer in peers if not any(other in peer for other in without)]
            wanted = [name for name in names if match in name]
            found.append((names, lambda speeds, label=label, wanted=wanted: measure_peers(label, wanted)))
    return [(names, job) for names, job in found if any(match in name for name in names)]


def measure_model(model, speeds, match):
    """Yields (name, row) of the parts of a random model that match."""
    label, config, tied, quantize = model
    chosen = [(f"{label}, {part}", function) for part, function in PARTS if match in f"{label}, {part}"]
    if chosen:
        start = time.perf_counter()
        on = current()
        loaded = LanguageModel(random_transformer(config, tied, quantize), NoTokenizer(config.vocab), None, on)
        making = time.perf_counter() - start
        for name, function in chosen:
            yield name, {**function(loaded, speeds), "making_seconds": making}


def run(report, options=None):
    """Measure what there is time for; ``report(rows)`` keeps the rows. options: match and without, of the command line."""
    match, without = (options.match, options.without) if options is not None else ("", ())
    began = time.perf_counter()
    wanted = jobs(current().kind, match, without)
    rows = []
    speeds = measure_speeds() if current().kind == "cuda" else {}
    if speeds:
        rows.append({"model": "speeds", **speeds})
        show(rows[-1])
    for names, job in wanted:
        left = [name for name in names if match in name]
        for name, row in job(speeds) if time.perf_counter() - began < TIME_LIMIT_S else ():
            rows.append({"model": name, **row})
            show(rows[-1])
            left.remove(name)
            if time.perf_counter() - began >= TIME_LIMIT_S:
                break
        if left:
            rows.append({"model": ", ".join(left), "left_out": f"no time in {TIME_LIMIT_S} s"})
            show(rows[-1])
    for row in ratios(rows):
        rows.append(row)
        show(row)
    report(rows)


def show(row):
    """One line as soon as it is measured."""
    figures = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    print("  ".join(list(figures)[1:]).join((f"{row['model']}:  ", "")), flush=True)
