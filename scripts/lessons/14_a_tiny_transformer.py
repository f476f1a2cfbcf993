# # A tiny transformer that writes
#
# Everything of these lessons together: a transformer of two layers, of kernels you have read, that continues a text.
# Its weights are not trained but *written down*, so that you can say what each of them does: it is a pair of heads
# found in every trained model that continues a pattern, a head that looks back and an *induction head*.
import lesson
import numpy as np
import pictures
from lesson import Launch, compare, normal, picture, say, step
from numba import cuda, int32, types, uint32

import nbkernels as nbk
from nbkernels import ptx
from nbkernels.launch.compile import kernel
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.memory import empty, to_device, to_host

lesson.main(__name__, __file__)

# ## What it does
#
# It has seen "the tiles walk on" and reads "the til". Layer 1 gives each token the four letters before it, by four
# heads: the query of the first is "who stands one place before me?". Layer 2 asks: where before did I have *these four
# letters* before me? The letter that stands there is likely to come next; places where fewer of the four agree count
# for less.
#
# The residual stream of a token is a row of `WIDTH` numbers with places for: which letter it is, the four letters
# before, what comes next, and codes of its own position and of the four before it.
TEXT = "the tiles walk on, the lanes walk on, the t"
NEW = 24
LETTERS, SCORES = 16, 32  # places for letters, and scores: one for each lane of a warp
alphabet = sorted(set(TEXT))
DIM, HEADS = 64, 4  # lesson 11's kernels: four heads of queries, one of keys and values, 64 numbers each
NOW, NEXT = 0, 5 * LETTERS
BEFORE = [LETTERS * back for back in range(5)]  # the letter 0, 1, … 4 places back
PLACE = [6 * LETTERS + DIM * back for back in range(5)]  # the code of the position as far back
WIDTH = 6 * LETTERS + 5 * DIM
POSITIONS = len(TEXT) + NEW + 1

# Positions get codes of random signs, nearly at right angles to one another.
codes = np.sign(normal(POSITIONS + 4, DIM, seed=3)) / np.sqrt(DIM)
letters_table = np.zeros((LETTERS, WIDTH), np.float32)
letters_table[np.arange(LETTERS), NOW + np.arange(LETTERS)] = 1
positions_table = np.zeros((POSITIONS, WIDTH), np.float32)
for back in range(5):
    positions_table[:, PLACE[back] : PLACE[back] + DIM] = codes[np.arange(POSITIONS) + 4 - back]


# A weight is mostly zeros: it takes one place of the row to another. `route(rows, [(to, from, how many, factor), …])`.
def route(rows, columns, ways):
    weight = np.zeros((rows, columns), np.float32)
    for to, source, count, factor in ways:
        weight[to + np.arange(count), source + np.arange(count)] = factor
    return weight


SHARP = 120.0  # scores of a match lie so far above the rest
QUERIES = HEADS * DIM
KEY, VALUE = QUERIES, QUERIES + DIM
layers = [
    # head h looks h + 1 places back: the key is the position, the value the letter
    (
        [*((DIM * h, PLACE[h + 1], DIM, SHARP) for h in range(4)), (KEY, PLACE[0], DIM, 1), (VALUE, NOW, LETTERS, 1)],
        [(BEFORE[h + 1], DIM * h, LETTERS, 1) for h in range(4)],
    ),
    # head 0 asks with this letter and the three before for a key of the four before
    (
        [
            *((LETTERS * n, BEFORE[n], LETTERS, SHARP) for n in range(4)),
            *((KEY + LETTERS * n, BEFORE[n + 1], LETTERS, 1) for n in range(4)),
            (VALUE, NOW, LETTERS, 1),
        ],
        [(NEXT, 0, LETTERS, 1)],
    ),
]
quantise = lesson.definitions(7).quantise
weights = []
for ways_in, ways_out in layers:
    weights.append(quantise(route(QUERIES + 2 * DIM, WIDTH, ways_in) + 1e-30))
    weights.append(quantise(route(WIDTH, QUERIES, ways_out) + 1e-30))
head = quantise(route(SCORES, WIDTH, [(0, NEXT, LETTERS, 1)]) + 1e-30)

# ## The kernels
#
# From lesson 6 the residual with its norm, from 7 the product with int8 weights, from 11 the append to the cache and
# the attention of one query. New are two small ones: the embedding, and the choice of the letter with the largest
# score. That is a reduction over a warp of pairs (score, letter); of equal scores the first letter wins.
floats, integers = ptx.pointer("float32"), types.CPointer(int32)


def embed_kernel():
    @kernel(launch_bounds=WIDTH)
    def embed(token: integers, length: integers, letters: floats, positions: floats, x: floats):
        i = cuda.threadIdx.x
        x[i] = letters[token[0] * WIDTH + i] + positions[length[0] * WIDTH + i]

    return embed


def choose_kernel():
    @kernel(launch_bounds=32)
    def choose(scores: floats, token: integers):
        best, letter = scores[cuda.threadIdx.x], uint32(cuda.threadIdx.x)
        for stage in range(5):
            other = ptx.shfl_bfly(best, uint32(16 >> stage))
            its = ptx.shfl_bfly_u32(letter, uint32(16 >> stage))
            if other > best or (other == best and its < letter):
                best, letter = other, its
        if cuda.threadIdx.x == 0:
            token[0] = int32(letter)

    return choose


def embed_launch(token, length):
    x = letters_table[token] + positions_table[length]
    arguments = {
        "token": np.array([token], np.int32),
        "length": np.array([length], np.int32),
        "letters": letters_table,
        "positions": positions_table,
        "x": x,
    }
    return Launch(1, WIDTH, arguments, {"x": x})


def choose_launch():
    scores = normal(SCORES)
    scores[[5, 20]] = scores.max() + 1  # two are best: the first wins
    return Launch(1, 32, {"scores": scores, "token": np.zeros(1, np.int32)}, {"token": np.array([5], np.int32)})


step("embedding", embed_kernel, embed_launch, small=(3, 7))
step("the best letter", choose_kernel, choose_launch)


# ## A step
#
# Everything that changes (token, length) lies in the device's memory, as lesson 13 asks, but for the length that lesson
# 11's attention takes as a number.
int8_product, residual_norm, cache = (lesson.definitions(n) for n in (7, 6, 11))


class Model:
    """The transformer on a device; ``feed`` takes one token and gives the next."""

    def __init__(self, device):
        self.device = device
        self.tables = [to_device(letters_table), to_device(positions_table)]
        self.weights = [(to_device(q), to_device(s)) for q, s in (*weights, head)]
        self.caches = [[to_device(np.zeros((POSITIONS, DIM), np.float32)) for _ in range(2)] for _ in layers]
        self.ones, self.zeros = to_device(np.ones(WIDTH, np.float32)), to_device(np.zeros(WIDTH, np.float32))
        self.length, self.token = to_device(np.zeros(1, np.int32)), to_device(np.zeros(1, np.int32))
        sizes = (WIDTH, WIDTH, WIDTH, WIDTH, QUERIES + 2 * DIM, QUERIES, SCORES)
        buffers = [empty((size,), np.dtype(np.float32)) for size in sizes]
        self.x, self.out, self.added, self.normed, self.qkv, self.mixed, self.scores = buffers
        self.count = self.launched = 0

    def launch(self, factory, constants, grid, block, *arguments):
        addresses = tuple(a if isinstance(a, int) else a.pointer for a in arguments)
        launch(Plan(factory, constants, (grid, 1, 1), (block, 1, 1), early=False), addresses, self.device)
        self.launched += 1

    def product(self, x, number, y):
        """y = weight · x, the weight in int8."""
        q, scale = self.weights[number]
        rows, columns = q.shape
        self.launch(int8_product.wide_kernel, (), rows // int8_product.WARPS, 128, x, q, scale, y, columns)

    def feed(self, token):
        """Take a token -> the next: the one with the largest score."""
        given = to_device(np.array([token], np.int32))
        self.launch(embed_kernel, (), 1, WIDTH, given, self.length, *self.tables, self.x)
        x = self.x
        for n, (keys, values) in enumerate(self.caches):
            self.product(x, 2 * n, self.qkv)
            self.launch(cache.append_kernel, (), 1, DIM, self.qkv[KEY:], self.qkv[VALUE:], keys, values, self.length)
            self.launch(cache.warp_a_head_kernel, (), HEADS, 32, self.qkv, keys, values, self.mixed, self.count + 1)
            self.product(self.mixed, 2 * n + 1, self.out)
            # one row, so that one warp is enough of the four that the kernel allows
            outs = (self.added, self.normed)
            self.launch(residual_norm.fused_kernel, (WIDTH,), 1, 32, x, self.out, self.ones, self.zeros, *outs)
            x = self.added if n == 0 else self.normed
        self.product(x, 4, self.scores)
        self.launch(choose_kernel, (), 1, 32, self.scores, self.token)
        nbk.advance(self.length, 1)
        self.count += 1
        return int(to_host(self.token)[0])


def generate(device):
    """(the text that the model writes behind TEXT, the model)."""
    model = Model(device)
    for letter in TEXT:
        token = model.feed(alphabet.index(letter))
    written = ""
    for _ in range(NEW):
        written += alphabet[token] if token < len(alphabet) else "?"
        token = model.feed(token)
    return written, model


with nbk.device("emulator") as device:
    written, model = generate(device)
say(
    f"given   {TEXT!r}\nwritten {written!r}\n{model.launched} launches of the lessons' kernels for {model.count} tokens"
)

if lesson.on_gpu():
    with nbk.device("cuda") as device:
        say(f"the same on {device.name}: {generate(device)[0]!r}")


# ## Is it right?
#
# The same in NumPy, with float64 and the weights before they were rounded to int8 (which for zeros and ones is exact):
def numpy_step(token, place, memory):
    """One step with lists of keys and values a layer -> the next token."""
    x = letters_table[token].astype(np.float64) + positions_table[place]
    for n, (ways_in, ways_out) in enumerate(layers):
        qkv = route(QUERIES + 2 * DIM, WIDTH, ways_in) @ x
        memory[n][0].append(qkv[KEY:VALUE])
        memory[n][1].append(qkv[VALUE:])
        keys, values = (np.array(m) for m in memory[n])
        scores = qkv[:QUERIES].reshape(HEADS, DIM) @ keys.T / np.sqrt(DIM)
        power = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = (power / power.sum(axis=1, keepdims=True)) @ values
        x = x + route(WIDTH, QUERIES, ways_out) @ mixed.ravel()
    return int(np.argmax(x[NEXT : NEXT + LETTERS])), scores[0]


def numpy_text():
    memory = [([], []) for _ in layers]
    tokens = [alphabet.index(letter) for letter in TEXT]
    written, seen = "", None
    for place in range(len(TEXT) + NEW):
        token, scores = numpy_step(tokens[place], place, memory)
        if place == len(TEXT) - 1:
            seen = scores
        if place >= len(TEXT) - 1 and len(written) < NEW:
            written += alphabet[token]
        if place + 1 >= len(tokens):
            tokens.append(token)
    return written, seen


expected, seen = numpy_text()
say(f"NumPy   {expected!r}: {'the same' if expected == written else 'not the same'}")
assert expected == written

# What the induction head looked at, when the last letter of the given text had come: its scores over the letters
# before.
shown = [
    (f"{place}: {TEXT[place - 4 : place]!r}, then {TEXT[place]!r}", round(float(score)))
    for place, score in enumerate(seen)
    if place >= 4 and score > 0
]
best = sorted(shown, key=lambda pair: -pair[1])[:6]
picture(
    "induction",
    pictures.bars(best, f"scores when {TEXT[-4:]!r} had been read: place, the four letters before it, and its own"),
    "It finds where these letters stood before.",
)

# ## The package's own
#
# The same choice by `nbk.argmax`; its runtime (`nbk.load`) does for real checkpoints what `Model` does here, with these
# ideas in every kernel: try `nbkernels generate`.


def package_argmax(to_device, rows, columns):
    x = to_device(normal(rows, columns))
    return (lambda: nbk.argmax(x)), 4 * rows * columns


def right_argmax(rows, columns):
    return normal(rows, columns).argmax(axis=1)


lesson.operation("nbk.argmax", package_argmax, right_argmax, small=(1, SCORES), large=(64, 131072))
compare()

# ## What to take along
#
# - A transformer is a handful of kernels: embedding, norm, product, attention, choice. You have written each of them.
# - Attention is a search: the query says what to look for, the keys what there is, the values what to bring.
#
# *Sources.* N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021); C. Olsson et al., "In-context
# Learning and Induction Heads" (2022); A. Vaswani et al., "Attention Is All You Need" (2017).
