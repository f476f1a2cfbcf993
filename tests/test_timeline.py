"""Timelines: how the measured times become spans and gaps, the trace file, and a real model on a GPU."""

import json

import numpy as np
import pytest

import nbkernels as nbk
from nbkernels.cli import main
from nbkernels.launch.launcher import Plan
from nbkernels.profiling.timeline import Mark, _Watch, assemble, chrome_trace, measure


def first_kernel():
    pass


def second_kernel():
    pass


ONE, TWO = (Plan(factory, (), (4, 1, 1), (64, 1, 1)) for factory in (first_kernel, second_kernel))
LAUNCHES = [(ONE, None), (TWO, 0), (ONE, 0), (TWO, 1), (ONE, None)]


def test_spans_and_gaps_add_up_to_the_whole():
    timeline = assemble("step", LAUNCHES, [5.0, 3.0, 1.5, 6.0, 2.0], 2.0, 12.0, 9.0)
    assert [span.busy for span in timeline.spans] == [3, 1, 0, 4, 0]  # what an empty kernel takes is taken off
    assert timeline.gaps == 4.0
    ends = [span.start + span.busy for span in timeline.spans]
    assert np.allclose(np.array([span.start for span in timeline.spans[1:]]) - ends[:-1], 4 / 5)
    assert ends[-1] + 4 / 5 == pytest.approx(timeline.whole)
    assert timeline.by_kernel() == [("second", 2, 5.0), ("first", 3, 3.0)]
    assert timeline.by_layer() == [(1, 1, 4.0), (None, 2, 3.0), (0, 2, 1.0)]


def test_a_trace_has_every_launch_inside_its_layer(capsys):
    timeline = assemble("step", LAUNCHES, [5.0, 3.0, 3.5, 6.0, 3.0], 2.0, 12.0)
    events = json.loads(chrome_trace([timeline, timeline]))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    layers, kernels = ([e for e in events if e["ph"] == "X" and e["tid"] == row and not e["pid"]] for row in (0, 1))
    assert [e["name"] for e in layers] == ["outside", "layer 0", "layer 1", "outside"]
    assert [e["name"] for e in kernels] == ["first", "second", "first", "second", "first"]
    for kernel, layer in zip(kernels, [layers[i] for i in (0, 1, 1, 2, 3)], strict=True):
        assert layer["ts"] <= kernel["ts"]
        assert kernel["ts"] + kernel["dur"] <= layer["ts"] + layer["dur"] + 1e-9
    timeline.print()
    assert "5 launches" in capsys.readouterr().out


def test_launches_are_seen_with_their_layer():
    mark, called = Mark(), []
    watch = _Watch(mark, lambda: called.append(mark.layer))
    watch.launched("kernel", ONE, ())
    mark.layer = 3
    watch.launched("kernel", TWO, ())
    assert watch.seen == [(ONE, None), (TWO, 3)] and called == [None, 3]


def test_a_model_that_is_not_on_a_gpu_is_refused(tmp_path):
    pytest.importorskip("gguf")
    import tiny_model

    from nbkernels.model.timeline import timelines

    model = nbk.load(tiny_model.write(tmp_path / "tiny.gguf"), device="cpu")
    with pytest.raises(ValueError, match="needs a GPU"):
        timelines(model)


def test_walking_the_layers_marks_them():
    from nbkernels.model.timeline import _Marked

    layers = _Marked("abc")
    layers.mark = Mark()
    seen = [(layer, layers.mark.layer) for layer, _ in zip(layers, range(3), strict=True)]
    assert seen == [("a", 0), ("b", 1), ("c", 2)] and layers.mark.layer is None


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "wanted an operation"),
        (["gelu", "--model", "x"], "wanted an operation"),
        (["gelu", "--trace", "x"], "--model"),
    ],
)
def test_errors(arguments, said, capsys):
    assert main(["profile", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_times_of_launches_on_a_gpu():
    from nbkernels.launch.graph import Stream
    from nbkernels.launch.memory import to_device, use_stream

    stream = Stream()
    with nbk.device("cuda"), use_stream(stream.handle):
        x = to_device(np.ones((4096, 8192), np.float32))

        def work():
            nbk.softmax(nbk.gelu(x[:1]))
            nbk.softmax(x)

        timeline = measure("three", work, mark=Mark())
    assert [span.kernel for span in timeline.spans] == ["gelu", "softmax", "softmax"]
    busy = [span.busy for span in timeline.spans]
    assert busy[2] > 10 * max(busy[:2]) and busy[2] > 0.7 * timeline.whole


@pytest.mark.gpu
def test_a_model_on_a_gpu(model_path, tmp_path):
    trace = tmp_path / "trace.json"
    assert main(["profile", "--model", model_path, "--trace", str(trace), "--context", "100"]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1} and any(e["name"] == "layer 29" for e in events)
