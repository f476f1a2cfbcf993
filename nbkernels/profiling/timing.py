"""Timing on the GPU: a call is captured into a CUDA graph, and the replay is timed between two events of the driver.

A graph holds one call a set of arguments, so that the host's work is in no figure. Cold: the sets together are several times
the L2 cache, each is used once a replay, and the cache is overwritten before. Warm: one set again and again. torch is not needed;
calls on its tensors are captured by its own graphs, since their results come from its allocator.
"""

import statistics
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np

from nbkernels.arrays import DeviceArray, Int8Weight, bfloat16, library
from nbkernels.launch import memory
from nbkernels.launch.compile import kernel
from nbkernels.launch.device import cuda_device
from nbkernels.launch.graph import Graph, Stream
from nbkernels.launch.launcher import Plan, check, launch
from nbkernels.profiling.cards import Card

REPLAYS = 20
RING = 4  # times the L2 cache
FEWEST_SETS, MOST_SETS = 2, 64
WARM_CALLS = 20
COPY_BYTES = 2 << 30
MATRIX = 8192


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: the median of some replays, and the quartiles beside it."""

    microseconds: float
    low: float
    high: float
    replays: int

    @staticmethod
    def of(samples):
        """The Timing of microseconds a call, one a replay."""
        if len(samples) == 1:
            return Timing(samples[0], samples[0], samples[0], 1)
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(middle, low, high, len(samples))


def sets_for(bytes_of_a_set, l2_bytes):
    """How many sets of arguments and results are RING times the cache, within reason."""
    return max(FEWEST_SETS, min(MOST_SETS, -(-RING * l2_bytes // max(bytes_of_a_set, 1))))


def time_replays(replay, calls, clock, *, before=None, replays=REPLAYS):
    """The Timing of one of the ``calls`` that a replay makes.

    clock(work): run work() on the GPU -> microseconds between its begin and end. before(): done ahead of each replay, untimed.
    """
    samples = []
    for turn in range(replays + 2):
        if before is not None:
            before()
        microseconds = clock(replay) / calls
        if turn >= 2:  # the first ones load code and raise the clock
            samples.append(microseconds)
    return Timing.of(samples)


class EventClock:
    """Times work by two events on a stream handle."""

    def __init__(self, stream):
        from cuda.bindings import driver

        self.driver = driver
        self.stream = stream
        self.start, self.end = (check(driver.cuEventCreate(0))[0] for _ in range(2))

    def __call__(self, work):
        driver = self.driver
        check(driver.cuEventRecord(self.start, self.stream))
        work()
        check(driver.cuEventRecord(self.end, self.stream))
        check(driver.cuEventSynchronize(self.end))
        return float(check(driver.cuEventElapsedTime(self.start, self.end))[0]) * 1e3

    def __del__(self):
        driver = self.driver
        driver.cuEventDestroy(self.start)
        driver.cuEventDestroy(self.end)


# ---- arguments -----------------------------------------------------------------------------------------------------------


def nbytes(value):
    """Bytes of all arrays in a value: an array, an Int8Weight, a tuple, list or dict of them; 0 for anything else."""
    if isinstance(value, Int8Weight):
        return nbytes(value.values) + nbytes(value.scales)
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return int(getattr(value, "nbytes", 0))


def copied(value):
    """The same with arrays of their own; what is no array (or an array of a library that is not known) stays."""
    if isinstance(value, Int8Weight):
        return Int8Weight(copied(value.values), copied(value.scales), value.group_size)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    if type(value) is DeviceArray:
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True)) if value.size else 0
        flat = memory.empty((span,), value.dtype)
        memory.copy(flat, DeviceArray(value.pointer, (span,), (1,), value.dtype, value.owner))
        return DeviceArray(flat.pointer, value.shape, value.strides, value.dtype, flat.owner)
    kind = library(value)
    if kind == "torch" and hasattr(value, "clone"):
        return value.clone()
    if kind in ("cupy", "numpy") and hasattr(value, "copy"):
        return value.copy()
    return value


def on_device(value):
    """The same with NumPy arrays copied to the device."""
    if isinstance(value, Int8Weight):
        return Int8Weight(on_device(value.values), on_device(value.scales), value.group_size)
    if isinstance(value, dict):
        return {key: on_device(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(on_device, value))
    return memory.to_device(value) if type(value) is np.ndarray else value


def _of_torch(value):
    if isinstance(value, Int8Weight):
        return _of_torch(value.values)
    if isinstance(value, dict):
        return any(map(_of_torch, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_of_torch, value))
    return library(value) == "torch"


# ---- graphs --------------------------------------------------------------------------------------------------------------


def captured(calls, stream, arguments=()):
    """Functions without arguments, captured one after another -> a function that replays them on a Stream.

    Their results live as long as the graph, so that none is written over another. arguments: a value that tells by its arrays
    whether torch must capture. They run twice before; DeviceError (or torch's RuntimeError) where they cannot be captured.
    """
    if _of_torch(arguments):
        return _captured_by_torch(calls, stream)
    arena = memory.Arena()
    graph = Graph()
    with memory.use_stream(stream.handle), memory.use_arena(arena):
        kept = [call() for call in calls]
        del kept  # back to the arena, where the capture finds it
        memory.wait_for(stream.handle)
        with graph.capture(stream.handle):
            kept = [call() for call in calls]

    def replay(held=(kept, arena)):  # the results, and the scratch memory that waits in the arena, live as long as this
        graph.replay(stream.handle)

    return replay


def _captured_by_torch(calls, stream):
    import torch

    outside = torch.cuda.ExternalStream(stream.handle)
    torch.cuda.synchronize()
    with torch.cuda.stream(outside):
        for _ in range(2):
            kept = [call() for call in calls]
        del kept
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay(held=kept):
        with torch.cuda.stream(outside):
            graph.replay()

    return replay


def time_call(function, args=(), kwargs=None, *, l2_bytes=None, replays=REPLAYS):
    """(cold Timing, warm Timing) of ``function(*args, **kwargs)`` on the GPU. The ring is of copies of its arrays."""
    cold = prepared(function, args, kwargs, l2_bytes=l2_bytes)
    warm = prepared(function, args, kwargs, l2_bytes=l2_bytes, warm=True)
    return cold(replays), warm(replays)


def prepared(function, args=(), kwargs=None, *, l2_bytes=None, warm=False, after=None):
    """A function of a number of replays -> Timing of ``function(*args, **kwargs)``, with a cold or a warm cache.

    It holds its graph and the arrays of its ring. after(index, count): more work behind each call of a cold ring, in its time.
    """
    l2_bytes = l2_bytes or l2_cache_bytes()
    stream = _stream()
    args, kwargs = on_device(args), on_device(kwargs or {})
    result = function(*args, **kwargs)
    memory.wait_for(0)
    clock = EventClock(stream.handle)
    if warm:
        calls = [lambda: function(*args, **kwargs)] * WARM_CALLS
        replay = captured(calls, stream, (args, kwargs))
        return lambda replays=REPLAYS: time_replays(replay, len(calls), clock, replays=replays)
    count = sets_for(nbytes(args) + nbytes(kwargs) + nbytes(result), l2_bytes)
    del result
    ring = [(args, kwargs), *((copied(args), copied(kwargs)) for _ in range(count - 1))]
    memory.wait_for(0)
    trash = memory.empty((2 * l2_bytes,), np.dtype(np.uint8))

    def overwrite():
        with memory.use_stream(stream.handle):
            memory.fill_bytes(trash, 0)

    def call(index):
        own, options = ring[index]
        result = function(*own, **options)
        if after is not None:
            after(index, count)
        return result

    calls = [partial(call, index) for index in range(count)]
    replay = captured(calls, stream, (args, kwargs))
    return lambda replays=REPLAYS: time_replays(replay, len(calls), clock, before=overwrite, replays=replays)


@lru_cache(maxsize=1)
def _stream():
    return Stream()


# ---- the card ------------------------------------------------------------------------------------------------------------


def _attribute(name):
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(driver.cuDeviceGetAttribute(attribute, driver.cuDeviceGet(0)[1]))[0])


@cache
def l2_cache_bytes():
    """Bytes of the L2 cache, as the device says."""
    cuda_device()
    return _attribute("L2_CACHE_SIZE")


def clock_hz():
    """The highest clock of a multiprocessor, as the device says."""
    return _attribute("CLOCK_RATE") * 1e3


@cache
def copy_speed():
    """``prepared_copy``'s speed, once a process: the ceiling of what is bound by memory."""
    return prepared_copy()()


def prepared_copy():
    """A function -> bytes a second, read and written, of a device-to-device copy of 2 GiB: what torch's ``copy_`` reaches."""
    device = cuda_device()
    size = min(COPY_BYTES, device.memory_bytes // 8)
    source, target = (memory.empty((size,), np.dtype(np.uint8)) for _ in range(2))
    memory.fill_bytes(source, 1)
    stream = _stream()

    def copies():  # by launches: a graph's copy nodes may go through another engine
        with memory.use_stream(stream.handle):
            for _ in range(5):
                memory.copy(target, source)

    clock = EventClock(stream.handle)
    return lambda: 2 * size / (time_replays(copies, 5, clock, replays=10).microseconds * 1e-6)


@cache
def tensor_rate(dtype):
    """Operations a second of our own product of 8192³: "bfloat16", "float16", "float32" (no tensor cores) or "int8"."""
    from nbkernels import ops

    side = MATRIX if dtype != "float32" else MATRIX // 4
    random = np.random.default_rng(0)
    if dtype == "int8":
        rows = random.integers(-127, 128, (2, side, side), dtype=np.int8)
        scales = np.full((side, 1), 2.0**-14, np.float32)
        args = tuple(Int8Weight(memory.to_device(x), memory.to_device(scales)) for x in rows)
        product, kwargs = ops.int8_matmul, {"dtype": bfloat16}
    else:
        tile = random.standard_normal((2, 256, side), np.float32).astype(bfloat16 if dtype == "bfloat16" else dtype)
        args = tuple(memory.to_device(np.tile(x, (side // 256, 1))) for x in tile)
        product, kwargs = ops.matmul, {}
    cold, warm = time_call(product, args, kwargs, replays=5)
    return 2 * side**3 / (min(cold.microseconds, warm.microseconds) * 1e-6)


def nothing_kernel():
    """A kernel that does nothing."""

    @kernel(launch_bounds=32)
    def nothing():
        pass

    return nothing


@cache
def launch_floor():
    """Microseconds of an empty kernel among others in a graph: no launch takes less."""
    device = cuda_device()
    plan = Plan(nothing_kernel, (), (1, 1, 1), (32, 1, 1))
    stream = _stream()
    calls = [lambda: launch(plan, (), device, stream.handle)] * 200
    return time_replays(captured(calls, stream), len(calls), EventClock(stream.handle)).microseconds


def measured_card(dtypes=("bfloat16",)):
    """The Card of the GPU at hand, each figure measured once a process; DeviceError where there is none.

    dtypes: those whose rate is wanted.
    """
    device = cuda_device()
    return Card(
        name=device.name,
        arch=device.arch,
        sm_count=device.sm_count,
        memory_bytes=device.memory_bytes,
        l2_bytes=l2_cache_bytes(),
        clock_hz=clock_hz(),
        memory_bytes_a_second=copy_speed(),
        operations_a_second={dtype: tensor_rate(dtype) for dtype in dtypes},
        launch_microseconds=launch_floor(),
        measured=True,
    )
