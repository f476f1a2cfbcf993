"""Profiles: what decides the bound, plans and resources of cards that are not here, and the timing, by fakes and on a GPU."""

import gc
import json
import weakref
from contextlib import contextmanager
from xml.etree import ElementTree

import numpy as np
import pytest
from compare import random, to_device

import nbkernels as nbk
from nbkernels.arrays import Int8Weight
from nbkernels.cli import main
from nbkernels.kernels.elements import Cost
from nbkernels.launch import emulated
from nbkernels.launch.device import use
from nbkernels.launch.replay import Note, note_launch, noted
from nbkernels.profiling import timing
from nbkernels.profiling.cards import PUBLISHED, published
from nbkernels.profiling.launches import tail_of
from nbkernels.profiling.operations import DTYPES, OPERATIONS, DeviceMaker, SizeMaker, cost_of, operation
from nbkernels.profiling.profile import bound_of, limits_of, profile_operation
from nbkernels.profiling.resources import find_ptxas

H200 = published("H200")


@pytest.fixture
def assembler():
    try:
        find_ptxas()
    except FileNotFoundError as error:
        pytest.skip(str(error))


# ---- what decides the bound ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "microseconds, bound",
    [(None, "memory"), (12.0, "memory"), (16.0, "memory"), (30.0, "latency")],
)
def test_the_bound_is_the_limit_that_explains_the_time(microseconds, bound):
    found, because = bound_of({"memory": 10.0, "instruction issue": 7.0, "launch": 1.0}, microseconds)
    assert found == bound
    assert "memory 10.00 µs" in because and "instruction issue 7.00 µs" in because


@pytest.mark.parametrize("largest", ["memory", "tensor", "instruction issue", "launch"])
def test_each_limit_can_be_the_bound(largest):
    limits = {name: 5.0 if name == largest else 1.0 for name in ("memory", "tensor", "instruction issue", "launch")}
    assert bound_of(limits, 6.0)[0] == largest


def test_limits_by_hand():
    cost = Cost(bytes=48_000_000, flops=989_000_000)
    launches = profile_operation("gelu", shape=(4, 64), gpu="H200").launches
    limits = limits_of(cost, H200, "bfloat16", True, launches)
    assert limits["memory"] == pytest.approx(10.0)  # 48 MB at 4.8 TB/s
    assert limits["tensor"] == pytest.approx(1.0)
    assert limits["launch"] == len(launches) * H200.launch_microseconds
    assert limits["instruction issue"] == pytest.approx(launches[0].warp_instructions / (4 * 132 * 1.83e9) * 1e6)
    assert "tensor" not in limits_of(cost, H200, "bfloat16", False, launches)
    assert limits_of(cost, H200, "float32", True, launches)["arithmetic"] == pytest.approx(989 / 66.9)
    assert "memory" not in limits_of(None, H200, None, False, launches)


def test_tail_by_hand():
    assert tail_of(1.0) == 0 and tail_of(1.5) == 0.25 and tail_of(0.25) == 0.75


# ---- without a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_plans_of_a_card_take_no_memory_and_every_cost_is_known(name):
    entry = OPERATIONS[name]
    sizes, options = entry.make(SizeMaker(DTYPES["bfloat16"]), *entry.usual)
    cost = cost_of(entry, sizes, options)
    assert cost.bytes > 0
    # each array that is given is read, but for a cache and a table that is looked up in; tables of pages and lengths are small
    if name not in ("embedding", "rotary_append"):
        assert cost.bytes >= 0.99 * (timing.nbytes(sizes) + timing.nbytes(options))
    with use(H200.device()), emulated.planned() as done:
        args, kwargs = entry.make(DeviceMaker(DTYPES["bfloat16"]), *entry.usual)
        entry.call(*args, **kwargs)
    assert done and all(report is None for _, report in done)
    assert cost_of(entry, args, kwargs) == cost


def test_a_plan_is_that_of_a_launch():
    with nbk.device("emulator", arch="sm_90a") as on, emulated.observed() as launched:
        nbk.softmax(to_device(random((3, 5000), np.float32, 0)))
    with use(on), emulated.planned() as planned:
        nbk.softmax(to_device(random((3, 5000), np.float32, 0)))
    assert [plan for plan, _ in planned] == launched


@pytest.mark.parametrize("name, shape", [("softmax", (9, 1024)), ("layer_norm", (5, 700)), ("silu_mul", (7, 1024))])
def test_instructions_of_the_first_blocks_stand_for_all(name, shape):
    entry = OPERATIONS[name]
    args, kwargs = entry.make(SizeMaker(DTYPES["float32"]), *shape)
    with nbk.device("emulator", arch="sm_90a"), emulated.counted() as done:
        args, kwargs = entry.make(DeviceMaker(DTYPES["float32"]), *shape)
        entry.call(*args, **kwargs)
    ((plan, report),) = done
    (launch,) = profile_operation(name, shape=shape, dtype="float32", gpu="H200").launches
    assert launch.grid == plan.grid and launch.counted_blocks == 2
    assert launch.warp_instructions == report.total.warp_instructions


def test_resources_and_waves_of_a_card(assembler):
    found = profile_operation("softmax", shape="16384x4096", gpu="h200")
    (launch,) = found.launches
    assert launch.kernel == "softmax" and launch.grid == (16384, 1, 1) and launch.spill_bytes == 0
    places = launch.blocks_a_multiprocessor * 132
    assert launch.waves == pytest.approx(16384 / places)
    assert launch.occupancy == launch.blocks_a_multiprocessor * 128 / 2048
    assert found.bound == "memory" and found.cold is None
    assert found.intensity == found.cost.flops / found.cost.bytes
    smaller = profile_operation("softmax", shape="16384x4096", gpu="RTX 4090")
    assert smaller.limits["memory"] == pytest.approx(found.limits["memory"] * 4.8 / 1.008)


def test_without_an_assembler_the_rest_is_told(monkeypatch):
    def missing(*_):
        raise FileNotFoundError("ptxas was not found: pip install nvidia-cuda-nvcc")

    monkeypatch.setattr("nbkernels.profiling.launches.resources", missing)
    found = profile_operation("gelu", shape=(4, 64), gpu="H200")
    assert found.launches[0].registers is None and found.launches[0].warp_instructions > 0
    assert any("pip install nvidia-cuda-nvcc" in note for note in found.notes)
    found.print()


def test_a_function_of_one_s_own_on_arrays_of_the_host():
    x = random((8, 512), np.float32, 0)

    def twice(x, scale=1.0):
        return nbk.softmax(nbk.gelu(x), scale=scale)

    found = nbk.profile(twice, x, scale=2.0, gpu="A100")
    assert [launch.kernel for launch in found.launches] == ["gelu", "softmax"] and found.name == "twice"
    assert found.cost is None and "memory" not in found.limits and any("cost=" in note for note in found.notes)
    known = nbk.profile(twice, x, gpu="A100", cost=Cost(bytes=2.039e6, flops=1))
    assert known.limits["memory"] == pytest.approx(1.0)
    assert nbk.profile(nbk.softmax, x, gpu="A100").cost == Cost(bytes=2 * x.nbytes, flops=7 * x.size)


@pytest.mark.parametrize("name", ["softmax", "int8_matmul", "decode"])
def test_as_json_and_as_a_picture(name, tmp_path, capsys):
    picture = tmp_path / "roofline.svg"
    shape = "x".join(map(str, OPERATIONS[name].small))
    assert main(["profile", name, "--shape", shape, "--gpu", "A100", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["card"]["measured"] is False and found["limits"] and found["bound"] in found["limits"]
    assert len(found["launches"]) >= 1
    root = ElementTree.fromstring(picture.read_text())
    assert [e for e in root.iter() if e.tag.endswith("circle")]
    for e in root.iter():  # nothing lies outside of the picture
        for axis, extent in (("x", 560), ("y", 360), ("cx", 560), ("cy", 360), ("x1", 560), ("y2", 360)):
            if axis in e.attrib:
                assert 0 <= float(e.attrib[axis]) <= extent, e.attrib


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["softmx"], "did you mean softmax"),
        (["softmax", "--shape", "3x4x5"], "wanted rowsxcolumns"),
        (["softmax", "--shape", "big"], "wanted rowsxcolumns"),
        (["softmax", "--shape", "0x4"], "wanted rowsxcolumns"),
        (["softmax", "--dtype", "float8"], "wanted one of float32"),
        (["softmax", "--gpu", "H20"], "did you mean H200"),
        (["matmul", "--shape", "1000000x1000000x100000", "--gpu", "H200"], "GiB, and H200 SXM has"),
        (["advance", "--gpu", "H200", "--plot", "x.svg"], "roofline"),
        (["gelu", "--shape", "4x4", "--gpu", "H200", "--plot", "/nowhere/x.svg"], "/nowhere/x.svg"),
    ],
)
def test_errors_are_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "a picture that was not drawn leaves no file"


def test_names_of_operations_are_asked_for_by_value():
    with pytest.raises(ValueError, match="did you mean attention"):
        operation("atention")
    assert set(PUBLISHED) == {"A100", "H100", "H200", "RTX 4090"}


# ---- timing, by fakes ----------------------------------------------------------------------------------------------------


def test_a_replay_s_time_is_shared_by_its_calls():
    times = iter([900.0, 900.0, *(10.0 * n for n in (5, 1, 2, 4, 3))])  # the first two are warm-up
    order = []

    def clock(work):
        work()
        return next(times)

    timed = timing.time_replays(
        lambda: order.append("replay"), 10, clock, before=lambda: order.append("before"), replays=5
    )
    assert (timed.low, timed.microseconds, timed.high, timed.replays) == (2.0, 3.0, 4.0, 5)
    assert order == ["before", "replay"] * 7


def test_the_ring_exceeds_the_cache():
    assert timing.sets_for(1, 60 << 20) == timing.MOST_SETS
    assert timing.sets_for(16 << 20, 60 << 20) == 15
    assert timing.sets_for(1 << 40, 60 << 20) == 2


def test_arrays_of_a_ring_are_their_own():
    with nbk.device("emulator"):
        x = to_device(random((4, 6), np.float32, 0))
        weight = Int8Weight(to_device(np.ones((2, 3), np.int8)), to_device(np.ones((2, 1), np.float32)), None)
        given = (x[:, :4], {"weight": weight, "option": 3}, [None])
        view, options, rest = timing.copied(given)
        assert view.pointer != x.pointer and view.strides == x[:, :4].strides
        np.testing.assert_array_equal(emulated.host_view(view), emulated.host_view(x[:, :4]))
        assert options["weight"].values.pointer != weight.values.pointer and options["option"] == 3 and rest == [None]
        assert timing.nbytes(given) == 64 + 6 + 8


def test_every_call_of_a_cold_replay_has_arrays_of_its_own(monkeypatch):
    replayed, seen = [], []

    def captured(calls, stream, arguments):
        def replay():
            replayed.append(len(calls))
            return [call() for call in calls]

        return replay

    class Clock:
        def __init__(self, stream):
            pass

        def __call__(self, work):
            work()
            return 64.0

    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(timing, "EventClock", Clock)
    monkeypatch.setattr(timing, "_stream", lambda: type("Stream", (), {"handle": 0}))
    monkeypatch.setattr(timing.memory, "wait_for", lambda stream: None)
    with nbk.device("emulator"):
        x = to_device(np.ones((1024,), np.float32))

        def function(x, out):
            seen.append((x.pointer, out.pointer))
            return x

        # 8 KB of arguments and 4 KB of result against four times a cache of 24 KB: eight sets
        cold, warm = timing.time_call(
            function, (x,), {"out": to_device(np.zeros(1024, np.float32))}, l2_bytes=24 << 10, replays=3
        )
    assert (cold.microseconds, warm.microseconds) == (8.0, 64.0 / timing.WARM_CALLS)
    assert replayed == [8] * 5 + [timing.WARM_CALLS] * 5
    ring = seen[2:10]  # behind a first call for each of the two
    assert len({a for a, _ in ring}) == len({b for _, b in ring}) == 8
    assert seen[2:42] == ring * 5 and set(seen[42:]) == {ring[0]}
    with nbk.device("emulator"):
        x = to_device(np.ones((1024,), np.float32))
        behind = []
        time = timing.prepared(lambda x: x, (x,), l2_bytes=4 << 10, after=lambda *index: behind.append(index))
        assert not behind, "the call that is not captured"
        time(1)
    # 4 KB and 4 KB of result against four times 4 KB: two sets, two untimed replays and one
    assert behind == [(0, 2), (1, 2)] * 3


def test_a_graph_keeps_its_results_and_its_scratch_memory(monkeypatch):
    calls, replayed = [], []

    class Result:
        pass

    class Graph:
        @contextmanager
        def capture(self, stream):
            calls.append("capture")
            yield

        def replay(self, stream):
            replayed.append(stream)

    arenas, results = [], []

    class Arena:
        def __init__(self):
            arenas.append(weakref.ref(self))

    def call():
        calls.append("call")
        result = Result()
        results.append(weakref.ref(result))
        return result

    monkeypatch.setattr(timing, "Graph", Graph)
    monkeypatch.setattr(timing.memory, "Arena", Arena)
    monkeypatch.setattr(timing.memory, "wait_for", lambda stream: None)
    replay = timing.captured([call, call], type("Stream", (), {"handle": 7}))
    gc.collect()
    assert calls == ["call", "call", "capture", "call", "call"]
    assert [r() is not None for r in results] == [False, False, True, True] and arenas[0]() is not None
    replay()
    assert replayed == [7]
    del replay
    gc.collect()
    assert results[2]() is None and arenas[0]() is None


def test_launches_are_noted():
    with noted(Note()) as note:
        note_launch("kernel", "plan", (1,))
    note_launch("kernel", "another", ())
    assert note.launches == [("kernel", "plan", (1,))]


# ---- on a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_speed_of_a_copy_is_torch_s():
    torch = pytest.importorskip("torch")
    source = torch.ones(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    samples = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 5)
    assert timing.copy_speed() == pytest.approx(2 * source.nbytes / (np.median(samples) * 1e-3), rel=0.02)


@pytest.mark.gpu
def test_a_large_softmax_is_bound_by_memory_on_a_gpu():
    found = profile_operation("softmax", shape=(16384, 4096))
    assert found.card.measured and found.bound == "memory" and 0.6 < found.share("memory") < 1.1
    (launch,) = found.launches
    assert launch.registers > 0 and launch.spill_bytes == 0 and launch.warp_instructions > 0


@pytest.mark.gpu
def test_calls_on_torch_tensors_are_profiled():
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
    nbk.softmax(x), nbk.softmax(x)  # recorded: noted all the same
    found = nbk.profile(nbk.softmax, x)
    assert [launch.kernel for launch in found.launches] == ["softmax"]
    assert 0 < found.warm.microseconds < 1000 and 0 < found.cold.microseconds < 1000
