# # A CUDA graph: the launches of a step as one
#
# A decode step is dozens of kernels of a few microseconds each, and each launch costs the host some microseconds too.
# The launches of all steps are alike, so they can be recorded once and replayed by a single call: a *CUDA graph*. What
# is recorded is recorded with its arguments, and that changes how a step must be written.
import time

import lesson
import numpy as np
import pictures
from lesson import Launch, compare, picture, say, step, table
from numba import cuda, int32, types

import nbkernels as nbk
from nbkernels.launch.compile import kernel
from nbkernels.launch.emulated import observed
from nbkernels.launch.launcher import Plan, launch
from nbkernels.launch.memory import to_device, to_host

lesson.main(__name__, __file__)

# ## A toy step
#
# A step of a "model" that takes a token to the next by a rule, and writes it behind the others. First with the position
# as a number that the host passes:
integers = types.CPointer(int32)
MODULUS, FIRST = 97, 11


def rule(token):
    return (5 * token + 3) % MODULUS


def next_token_kernel():
    @kernel(launch_bounds=32)
    def next_token(token: integers):
        if cuda.threadIdx.x == 0:
            token[0] = (5 * token[0] + 3) % MODULUS

    return next_token


def write_at_kernel():
    @kernel(launch_bounds=32)
    def write_at(token: integers, text: integers, position: int32):
        if cuda.threadIdx.x == 0:
            text[position] = token[0]

    return write_at


def number(value):
    return np.array([value], np.int32)


def next_launch():
    return Launch(1, 32, {"token": number(FIRST)}, {"token": number(rule(FIRST))}, keep=("token",))


def write_launch(position):
    text = np.zeros(8, np.int32)
    want = text.copy()
    want[3] = FIRST
    return Launch(1, 32, {"token": number(FIRST), "text": text, "position": position}, {"text": want}, keep=("text",))


step("the next token", next_token_kernel, next_launch)
step("write it, position an argument", write_at_kernel, write_launch, small=(3,))

# ## Recording
#
# A recording is a list of launches with their arguments; replaying launches them again. On a GPU the driver keeps that
# list (as the class `Graph` of `nbkernels.launch.graph`), here we keep one ourselves: the same rules hold.


class Recording:
    """Launches with their arguments."""

    def __init__(self, device):
        self.device, self.launches = device, []

    def launch(self, factory, *arguments):
        """Launch a kernel of one warp now, and keep the launch. arguments: device arrays and numbers."""
        addresses = tuple(a if isinstance(a, int) else a.pointer for a in arguments)
        self.launches.append((Plan(factory, (), (1, 1, 1), (32, 1, 1), early=False), addresses))
        self.replay_one(self.launches[-1])

    def replay_one(self, kept):
        launch(*kept, self.device)

    def replay(self):
        for kept in self.launches:
            self.replay_one(kept)


STEPS = 6


def right_text():
    text, token = [], FIRST
    for _ in range(STEPS):
        token = rule(token)
        text.append(token)
    return text


with nbk.device("emulator") as device:
    token, text = to_device(number(FIRST)), to_device(np.zeros(STEPS, np.int32))
    recording = Recording(device)
    recording.launch(next_token_kernel, token)
    recording.launch(write_at_kernel, token, text, 0)
    for _ in range(STEPS - 1):
        recording.replay()
    frozen = to_host(text).tolist()
table(["", *(f"place {i}" for i in range(STEPS))], [["wanted", *right_text()], ["position an argument", *frozen]])

# Every replay wrote to the place of the recording. The argument is *frozen*.
#
# ## What changes lives in memory
#
# So the position goes into the GPU's memory, where the step itself moves it on. Addresses may be frozen; what lies
# there may not.


def write_kernel():
    @kernel(launch_bounds=32)
    def write(token: integers, text: integers, position: integers):
        if cuda.threadIdx.x == 0:
            text[position[0]] = token[0]

    return write


def advance_kernel():
    @kernel(launch_bounds=32)
    def advance(position: integers):
        if cuda.threadIdx.x == 0:
            position[0] += 1

    return advance


def write_from_memory_launch(position):
    launch = write_launch(position)
    launch.arguments["position"] = number(position)
    return launch


step("write it, position in memory", write_kernel, write_from_memory_launch, small=(3,))
step(
    "advance",
    advance_kernel,
    lambda: Launch(1, 32, {"position": number(3)}, {"position": number(4)}, keep=("position",)),
)

with nbk.device("emulator") as device:
    token, text, position = to_device(number(FIRST)), to_device(np.zeros(STEPS, np.int32)), to_device(number(0))
    recording = Recording(device)
    recording.launch(next_token_kernel, token)
    recording.launch(write_kernel, token, text, position)
    recording.launch(advance_kernel, position)
    for _ in range(STEPS - 1):
        recording.replay()
    moving = to_host(text).tolist()
rows = [["wanted", *right_text()], ["position an argument", *frozen], ["position in memory", *moving]]
table(["", *(f"place {i}" for i in range(STEPS))], rows)
assert moving == right_text() and frozen != right_text()


# ## What it saves
#
# The host's time, which only a machine with a GPU can show: here the launches one by one against a replay of the graph.
def replays_on_a_gpu(repeats):
    """(microseconds of a step launched one by one, microseconds of a replay) on the GPU, each kernel ``repeats`` times a step."""
    from nbkernels.launch.graph import Graph, Stream
    from nbkernels.launch.memory import wait_for

    with nbk.device("cuda") as device:
        token, text, position = to_device(number(FIRST)), to_device(np.zeros(1 << 20, np.int32)), to_device(number(0))
        plans = [
            (Plan(factory, (), (1, 1, 1), (32, 1, 1), early=False), tuple(a.pointer for a in arguments))
            for factory, *arguments in (
                (next_token_kernel, token),
                (write_kernel, token, text, position),
                (advance_kernel, position),
            )
        ] * repeats
        stream, graph = Stream(), Graph()

        def one_by_one():
            for plan, arguments in plans:
                launch(plan, arguments, device, stream.handle)

        one_by_one()
        wait_for(stream.handle)
        with graph.capture(stream.handle):
            one_by_one()
        times = []
        for call in (one_by_one, lambda: graph.replay(stream.handle)):
            call()
            wait_for(stream.handle)
            start = time.perf_counter()
            for _ in range(50):
                call()
            wait_for(stream.handle)
            times.append((time.perf_counter() - start) / 50 * 1e6)
        return times


if lesson.on_gpu():
    apart, together = replays_on_a_gpu(20)
    say(f"a step of 60 kernels: {apart:.0f} µs launched one by one, {together:.0f} µs as a graph")
else:
    say("no GPU here: the timing is left out")

# ## The package's own
#
# Its decode step is one graph; lengths of the KV cache live on the device, and `nbk.advance` moves them on. How many
# launches a step of a small model replays, counted by running one layer's worth of operations:


def package_advance(to_device):
    lengths = to_device(np.array([3, 9], np.int32))

    def run():
        nbk.advance(lengths, 1)
        return lengths

    return run, 2 * 4 * 2


lesson.operation("nbk.advance", package_advance, lambda: np.array([4, 10]))


def one_layer():
    x = to_device(np.ones((1, 64), np.float32))
    q = to_device(np.ones((1, 1, 2, 32), np.float32))
    cache = to_device(np.ones((1, 16, 2, 32), np.float32))
    weight = to_device(np.ones((64, 64), np.float32))
    return {
        "norm": lambda: nbk.rms_norm(x),
        "q, k, v": lambda: nbk.matmul(x, weight),
        "attention": lambda: nbk.attention(q, cache, cache),
        "output": lambda: nbk.matmul(x, weight, residual=x),
        "second norm": lambda: nbk.rms_norm(x),
        "gate and up": lambda: nbk.matmul(x, weight),
        "silu": lambda: nbk.silu_mul(x, x),
        "down": lambda: nbk.matmul(x, weight, residual=x),
    }


with nbk.device("emulator") as device:
    counts = []
    for name, call in one_layer().items():
        with observed() as plans:
            call()
        counts.append((name, len(plans)))
picture(
    "launches",
    pictures.bars(counts, "launches of one layer of a decode step", "launches"),
    "Each is recorded once, and replayed with the rest.",
)
layer = sum(n for _, n in counts)
say(f"{layer} launches a layer; a model of 30 layers replays {30 * layer} by one call")
compare()

# ## What to take along
#
# - A graph repeats launches with the arguments they had: addresses and numbers are frozen, memory is not.
# - What changes from step to step must be in memory, and changed there by the step itself.
# - Nothing in a recorded step may wait for the host or allocate.
#
# *Sources.* NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs"; A. Gray, "Getting Started with CUDA Graphs" (2019).
