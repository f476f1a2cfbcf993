"""Why a call takes as long as it does: its time against what the card could do, and each launch's place on a multiprocessor.

    nbk.profile(nbk.softmax, x)         a call on arrays of any kind
    profile_operation("softmax", …)     an operation of a shape, as ``nbkernels profile`` does

Five limits are worked out in microseconds: bytes over the speed of a copy, products over the rate of the tensor cores (float32:
of the ordinary cores), instructions of warps over what the schedulers issue, and launches times that of an empty kernel; a call
that none of them explains is bound by latency. Without a GPU the limits are those of a card by its published figures.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from nbkernels.arrays import DeviceArray, Int8Weight, as_device_array, is_host
from nbkernels.kernels.elements import Cost
from nbkernels.launch import emulated, memory
from nbkernels.launch.device import cuda_device, device, use
from nbkernels.launch.replay import Note, noted
from nbkernels.profiling import timing
from nbkernels.profiling.cards import published
from nbkernels.profiling.launches import judge
from nbkernels.profiling.operations import (
    DTYPES,
    DeviceMaker,
    SizeMaker,
    checked_dtype,
    checked_shape,
    cost_of,
    has_gpu,
    operation,
    operation_of,
)

DEFAULT_CARD = "H200"  # where no GPU is at hand and none is named
EXPLAINED = 0.6  # a limit that is less of the time than this does not explain it: latency does
COUNTED_BLOCKS = 2
MOST_INSTRUCTIONS = 12_000_000  # summed over threads, on the emulator: a few seconds
MIRRORED_BYTES = 16 << 20  # arrays up to this size are copied to the emulator, larger ones are zeros there


@dataclass(frozen=True)
class Profile:
    """What a call does. Times in microseconds; cost's bytes and FLOPs are None where the function's cost is not known.

    cold, warm: Timings, or None without a GPU. limits: name -> microseconds that the call would take if nothing else counted.
    bound: the limit that it stands at, and because: the figures that say so. peers: name -> microseconds, cold.
    """

    name: str
    arguments: tuple
    card: object
    cost: Cost | None
    cold: object
    warm: object
    limits: dict
    bound: str
    because: str
    launches: tuple
    peers: dict = field(default_factory=dict)
    notes: tuple = ()

    @property
    def intensity(self):
        """FLOPs a byte, or None."""
        return self.cost.flops / self.cost.bytes if self.cost and self.cost.bytes else None

    def share(self, limit):
        """A limit over the cold time: 1 is as fast as that limit allows. None where one of them is not known."""
        if self.cold is None or limit not in self.limits:
            return None
        return self.limits[limit] / self.cold.microseconds

    def as_dict(self):
        """For JSON."""
        return {**asdict(self), "intensity": self.intensity, "shares": {name: self.share(name) for name in self.limits}}

    def print(self, console=None):
        """Print it as tables."""
        from nbkernels.profiling.report import print_profile

        print_profile(self, console)

    def svg(self):
        """A roofline with this call as a point in it, as SVG text. ValueError where cost or time is not known."""
        from nbkernels.profiling.report import roofline

        return roofline(self)


def limits_of(cost, card, dtype, products, launches):
    """name -> microseconds. dtype: of the products, a name; launches: LaunchProfiles."""
    limits = {}
    if cost is not None:
        limits["memory"] = cost.bytes / card.memory_bytes_a_second * 1e6
        if products and dtype in card.operations_a_second:
            name = "arithmetic" if dtype == "float32" else "tensor"
            limits[name] = cost.flops / card.operations_a_second[dtype] * 1e6
    counts = [launch.warp_instructions for launch in launches]
    if counts and None not in counts:
        limits["instruction issue"] = sum(counts) / card.issues_a_second * 1e6
    limits["launch"] = len(launches) * card.launch_microseconds
    return limits


def bound_of(limits, microseconds):
    """(bound, the figures that decide it). microseconds: measured, or None."""
    name = max(limits, key=limits.get)
    figures = ", ".join(f"{key} {value:.2f} µs" for key, value in sorted(limits.items(), key=lambda item: -item[1]))
    if microseconds is None:
        return name, f"no time was measured; the limits are {figures}"
    share = limits[name] / microseconds
    if share < EXPLAINED:
        return "latency", f"{microseconds:.2f} µs, of which the nearest limit explains {share:.0%}: {figures}"
    return name, f"{share:.0%} of {microseconds:.2f} µs: {figures}"


def profile(function, *args, gpu=None, cost=None, peers=True, **kwargs):
    """The Profile of ``function(*args, **kwargs)``: an operation of this package, or any function that calls some.

    On a GPU it is timed there. Without one (or with gpu= a name such as "H200") nothing runs but a few blocks on the emulator,
    and the limits are that card's published ones; arrays are then NumPy's. cost: a Cost, for a function whose own is not known.
    ValueError for an unknown card, and what the function raises.
    """
    if not callable(function):
        raise TypeError(f"function: {type(function).__name__}, wanted a function to call")
    entry = operation_of(function)
    if cost is None and entry is not None:
        try:
            cost = cost_of(entry, args, kwargs)
        except ValueError:  # lengths that lie on the device
            cost = None
    products = entry is not None and entry.products
    name = getattr(function, "__name__", type(function).__name__)
    dtype = _products_dtype(args)
    subject = _Subject(name, function, dtype, products, cost)
    if gpu is None and has_gpu():
        with device("cuda"):
            return _measured(subject, args, kwargs, entry if peers else None)
    with use(_card(gpu).device()), emulated.planned():
        placed, options = timing.on_device(args), timing.on_device(kwargs)
        return _planned(subject, _card(gpu), lambda: (placed, options), _without_gpu(gpu))


def profile_operation(name, *, shape=None, dtype="bfloat16", gpu=None, peers=True):
    """The Profile of an operation of a shape (a tuple, or a text such as "16384x4096"; default a usual one).

    ValueError for an operation (with near names), shape, dtype or card that is not known, and for a shape that does not fit.
    """
    entry = operation(name)
    shape = checked_shape(entry, entry.usual if shape is None else shape)
    dtype = checked_dtype(dtype)
    on_gpu = gpu is None and has_gpu()
    card = None if on_gpu else _card(gpu)
    limit = cuda_device().memory_bytes if on_gpu else card.memory_bytes
    args, kwargs = entry.make(SizeMaker(dtype), *shape)
    needed = timing.nbytes(args) + timing.nbytes(kwargs)
    if needed > limit:
        where = cuda_device().name if on_gpu else card.name
        raise ValueError(
            f"shape: {'x'.join(map(str, shape))} needs {needed / 2**30:.1f} GiB, and {where} has {limit / 2**30:.1f}"
        )
    cost, products_dtype = cost_of(entry, args, kwargs), _products_dtype(args)
    subject = _Subject(entry.name, entry.call, products_dtype, entry.products, cost)
    if on_gpu:
        with device("cuda"):
            args, kwargs = entry.make(DeviceMaker(dtype), *shape)
            return _measured(subject, args, kwargs, entry if peers else None)
    return _planned(subject, card, lambda: entry.make(DeviceMaker(dtype), *shape), _without_gpu(gpu))


@dataclass(frozen=True)
class _Subject:
    name: str
    function: object
    dtype: str | None
    products: bool
    cost: Cost | None

    def result(self, card, args, kwargs, launches, cold=None, warm=None, peers=None, notes=()):
        limits = limits_of(self.cost, card, self.dtype, self.products, launches)
        bound, because = bound_of(limits, cold.microseconds if cold else None)
        arguments = tuple(text for value in (*args, *kwargs.values()) if (text := _described(value)))
        if self.cost is None:
            notes = (*notes, "bytes and FLOPs of this function are not known: pass cost=")
        if "instruction issue" not in limits:
            notes = (*notes, "instructions were not counted: a block takes too long on the emulator")
        missing = next((launch.unknown for launch in launches if launch.unknown), None)
        if missing:
            notes = (*notes, f"registers and occupancy are not known: {missing}")
        return Profile(
            self.name,
            arguments,
            card,
            self.cost,
            cold,
            warm,
            limits,
            bound,
            because,
            tuple(launches),
            peers or {},
            notes,
        )


def _measured(subject, args, kwargs, entry):
    """On the GPU, which is the device in force."""
    args, kwargs = timing.on_device(args), timing.on_device(kwargs)
    with noted(Note()) as note:
        subject.function(*args, **kwargs)
    memory.wait_for(0)
    card = timing.measured_card((subject.dtype,) if subject.products and subject.dtype else ())
    reports = _first_blocks(subject.function, args, kwargs, card)
    if len(reports) != len(note.launches) or any(
        plan.constants != noted_plan.constants
        for (plan, _), (_, noted_plan, _) in zip(reports, note.launches, strict=True)
    ):
        reports = [(None, None)] * len(note.launches)  # another way than on the GPU: its counts would be another's
    launches = [
        judge(plan, card, kernel=kernel, report=report, blocks=COUNTED_BLOCKS)
        for (kernel, plan, _), (_, report) in zip(note.launches, reports, strict=True)
    ]
    cold, warm = timing.time_call(subject.function, args, kwargs)
    peers, notes = _peers(entry, args, kwargs)
    return subject.result(card, args, kwargs, launches, cold, warm, peers, notes)


def _planned(subject, card, make, note):
    """Without a GPU: plans for a card, their resources, and their first blocks on the emulator."""
    with use(card.device()), emulated.planned(COUNTED_BLOCKS, MOST_INSTRUCTIONS) as done:
        args, kwargs = make()
        subject.function(*args, **kwargs)
    launches = [judge(plan, card, report=report, blocks=COUNTED_BLOCKS) for plan, report in done]
    return subject.result(card, args, kwargs, launches, notes=(note,))


def _first_blocks(function, args, kwargs, card):
    """[(Plan, Report or None)] of the same call on the emulator; nothing where it cannot be made there."""
    host_args, host_kwargs = _to_host(args), _to_host(kwargs)
    try:
        with use(card.device()), emulated.planned(COUNTED_BLOCKS, MOST_INSTRUCTIONS) as done:
            function(*_place(host_args), **_place(host_kwargs))
    except (TypeError, ValueError, RuntimeError, MemoryError):  # a function of torch's own, say
        return []
    return done


@dataclass(frozen=True)
class _Zeros:
    shape: tuple
    dtype: np.dtype


def _to_host(value):
    """Arrays of the GPU as NumPy arrays, and large ones of floats as their shape."""
    if isinstance(value, Int8Weight):
        return value.group_size, _to_host(value.values), _to_host(value.scales)
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value), *map(_to_host, value)]
    if not hasattr(value, "shape") or is_host(value):
        return value
    array = as_device_array(value)
    if array.nbytes > MIRRORED_BYTES and array.dtype != np.int32:
        return _Zeros(array.shape, array.dtype)
    memory.wait_for(memory.current_stream(value))
    return memory.to_host(array)


def _place(value):
    """What ``_to_host`` made, on the device in force."""
    if isinstance(value, tuple):
        group_size, values, scales = value
        return Int8Weight(_place(values), _place(scales), group_size)
    if isinstance(value, dict):
        return {key: _place(item) for key, item in value.items()}
    if isinstance(value, list):
        return value[0](map(_place, value[1:]))
    if isinstance(value, _Zeros):
        return memory.empty(value.shape, value.dtype)
    return memory.to_device(value) if isinstance(value, np.ndarray) else value


def _peers(entry, args, kwargs):
    """({name: cold microseconds}, notes) of the same on torch, where it is installed."""
    if entry is None or entry.peer is None:
        return {}, ()
    try:
        import torch
    except ImportError:
        return {}, ("torch is not installed: no peer was timed",)
    if not torch.cuda.is_available():
        return {}, ("torch has no CUDA: no peer was timed",)
    try:
        own, options = as_tensors(args, kwargs)
        cold, _ = timing.time_call(lambda *a, **k: entry.peer(torch, a, k)(), own, options)
    except Exception as error:
        return {}, (f"torch's own could not be timed: {str(error).splitlines()[0]}",)
    return {"torch": cold.microseconds}, ()


def as_tensors(args, kwargs):
    """The arguments with torch's tensors in place of our arrays, which they share; an Int8Weight becomes a dense tensor."""
    import torch

    dtype = next((d for d in map(_dtype_name, args) if d in DTYPES), "bfloat16")

    def tensor(value):
        if isinstance(value, Int8Weight):
            return tensor(value.values).to(getattr(torch, dtype))
        return torch.from_dlpack(value) if type(value) is DeviceArray else value

    return tuple(map(tensor, args)), {key: tensor(value) for key, value in kwargs.items()}


def _dtype_name(value):
    if isinstance(value, Int8Weight):
        return "int8"
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def _products_dtype(args):
    """The dtype, by name, in which the products of two arrays are made: the first array's."""
    return next((name for name in map(_dtype_name, args) if name), None)


def _described(value):
    if isinstance(value, Int8Weight):
        return f"int8 {'×'.join(map(str, value.shape))}, scales {'×'.join(map(str, value.scales.shape))}"
    if hasattr(value, "shape") and not isinstance(value, np.dtype):
        return f"{_dtype_name(value)} {'×'.join(map(str, value.shape)) or 'scalar'}"
    return ""


def _card(gpu):
    return published(gpu or DEFAULT_CARD)


def _without_gpu(gpu):
    why = "as was asked" if gpu else "no GPU answers"
    return f"{why}: no times, and limits by the published figures of {_card(gpu).name} (--gpu names another)"
