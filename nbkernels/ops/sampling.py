"""Choosing a token: the largest logit, or a draw among the likely ones."""

import numpy as np

from nbkernels import reference
from nbkernels.arrays import as_host_array
from nbkernels.launch import memory
from nbkernels.launch.replay import replayed
from nbkernels.ops.call import Call, check_out, finish_host, kernel_module, merge_rows
from nbkernels.ops.checks import (
    check_axes,
    check_contiguous_last,
    check_dtype,
    check_float,
    check_integer,
    check_no_jax,
    check_number,
    check_rows,
    check_shape,
    check_writable,
)


@replayed
def argmax(x, *, out=None, stream=None):
    """The first index of the largest element over the last axis, a NaN counting as largest. x [..., columns] -> int32 [...]."""
    call = Call(stream, ("out",), x=x, out=out)
    check_float(x=call.x)
    check_rows("x", call.x)
    shape = call.x.shape[:-1]
    if call.x.shape[-1] == 0:
        raise ValueError(f"x: shape {tuple(call.x.shape)}, wanted at least one column")
    dtype = np.dtype(np.int32)
    if call.on_host:
        check_out(call, shape, dtype)
        return finish_host(reference.argmax(call.x), x, out)
    check_contiguous_last(x=call.x)
    if call.out is not None and not call.out.is_contiguous:
        raise ValueError(f"out: strides {call.out.strides}, wanted a contiguous array")
    y = call.result(shape, dtype, out)
    if y.size:
        # one launch a run of rows at one stride; the results follow one another
        flat, start = y.reshape(-1), 0
        for (rows,) in merge_rows((call.x,)):
            kernel_module("argmax").run(rows, flat[start : start + rows.shape[0]], call.device, call.stream)
            start += rows.shape[0]
    return call.hand_out(y, call.returned)


@replayed
def sample(
    logits,
    *,
    temperature,
    top_k=None,
    top_p=None,
    min_p=None,
    repetition_penalty=1.0,
    seen=None,
    seed=0,
    step=None,
    out=None,
    stream=None,
):
    """Draw one token a row: repetition penalty, temperature, top-k, top-p, min-p, then the draw. -> int32 [rows]

    logits [rows, vocab] float. seen uint8 [rows, vocab]: a token with a mark is penalised, and the chosen one gets a mark.
    temperature 0 takes the largest. top_k: the k largest; top_p in (0, 1]: the smallest set of largest tokens that has this
    share of the probability; min_p in [0, 1]: those at least min_p as likely as the likeliest. The draw depends on seed
    (0 to 2^64 - 1), step (int32 [1]; default 0), row and token alone: the same on every device.
    """
    call = Call(stream, ("seen", "step", "out"), logits=logits, seen=seen, step=step, out=out)
    check_float(logits=call.logits)
    check_axes("logits", call.logits, ("rows", "vocab"))
    rows, vocab = call.logits.shape
    if vocab == 0:
        raise ValueError(f"logits: shape {tuple(call.logits.shape)}, wanted at least one column")
    check_number("temperature", temperature, least=0)
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)):
            raise TypeError(f"top_k: {type(top_k).__name__}, wanted an integer or None")
        check_number("top_k", top_k, least=1)
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None:
            check_number(name, value)
            if not (0 < value <= 1 if name == "top_p" else 0 <= value <= 1):
                raise ValueError(f"{name}: {value}, wanted {'(0, 1]' if name == 'top_p' else '[0, 1]'}")
    check_number("repetition_penalty", repetition_penalty, positive=True)
    check_integer("seed", seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: {seed}, wanted 0 to 2^64 - 1")
    check_dtype(np.uint8, seen=call.seen)
    check_shape("seen", call.seen, (rows, vocab))
    check_dtype(np.int32, step=call.step)
    check_shape("step", call.step, (1,))
    options = {
        "temperature": float(temperature),
        "top_k": None if top_k is None else int(top_k),
        "top_p": None if top_p is None else float(top_p),
        "min_p": None if min_p is None else float(min_p),
        "repetition_penalty": float(repetition_penalty),
        "seed": int(seed),
    }
    dtype = np.dtype(np.int32)
    if call.on_host:
        check_out(call, (rows,), dtype)
        check_writable(seen=call.seen)
        return finish_host(reference.sample(call.logits, seen=call.seen, step=call.step, **options), logits, out)
    check_contiguous_last(logits=call.logits, seen=call.seen, out=call.out)
    if call.copied:
        check_writable(seen=None if seen is None else as_host_array(seen))
    else:
        check_no_jax(seen=seen)
    y = call.result((rows,), dtype, out)
    if rows:
        kernel_module("sampling").run(call.logits, call.seen, call.step, y, options, call.device, call.stream)
    if call.copied and seen is not None:
        with memory.use_stream(call.stream):
            as_host_array(seen)[...] = memory.to_host(call.seen)
    return call.hand_out(y, call.returned)


_ROW_NUMBERS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "seed": np.uint64,
    "step": np.int32,
}


@replayed
def sample_rows(
    logits,
    *,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition_penalty,
    seed,
    step,
    seen=None,
    seen_row=None,
    out=None,
    stream=None,
):
    """``sample`` with numbers of its own for each row, drawn as that row would be alone. -> int32 [rows]

    logits [rows, vocab] float, up to 2^19 columns. Contiguous arrays [rows]: temperature, top_p, min_p and repetition_penalty
    float32, top_k (0: all) and step int32, seed uint64; top_p 1, min_p 0 and repetition_penalty 1 change nothing. seen uint8
    [masks, vocab], seen_row int32 [rows]: row i's mask is seen[seen_row[i]], read and marked where its penalty is not 1.
    The numbers themselves are not checked: they may lie on the device, and be another's at the next replay of a graph.
    """
    numbers = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "step": step,
    }
    call = Call(stream, ("seen", "seen_row", "out"), logits=logits, **numbers, seen=seen, seen_row=seen_row, out=out)
    check_float(logits=call.logits)
    check_axes("logits", call.logits, ("rows", "vocab"))
    rows, vocab = call.logits.shape
    if vocab == 0:
        raise ValueError(f"logits: shape {tuple(call.logits.shape)}, wanted at least one column")
    for name, dtype in _ROW_NUMBERS.items():
        check_dtype(dtype, **{name: getattr(call, name)})
        check_shape(name, getattr(call, name), (rows,))
    if (seen is None) != (seen_row is None):
        raise TypeError("seen, seen_row: one of the two is None, wanted both or neither")
    check_dtype(np.uint8, seen=call.seen)
    check_dtype(np.int32, seen_row=call.seen_row)
    if seen is not None:
        check_axes("seen", call.seen, ("masks", "vocab"))
        check_shape("seen", call.seen, (call.seen.shape[0], vocab))
        check_shape("seen_row", call.seen_row, (rows,))
    described = {name: getattr(call, name) for name in (*_ROW_NUMBERS, "seen_row")}
    dtype = np.dtype(np.int32)
    if call.on_host:
        check_out(call, (rows,), dtype)
        check_writable(seen=call.seen)
        return finish_host(reference.sample_rows(call.logits, seen=call.seen, **described), logits, out)
    if call.copied:
        raise TypeError("logits: a host array on a GPU; pass device arrays, or use sample")
    check_no_jax(seen=seen)
    check_contiguous_last(logits=call.logits, seen=call.seen, out=call.out)
    for name, array in described.items():
        if array is not None and not array.is_contiguous:
            raise ValueError(f"{name}: strides {array.strides}, wanted a contiguous array")
    described["seen_row"] = described["seen_row"] if seen is not None else described["top_k"]  # which nobody reads
    y = call.result((rows,), dtype, out)
    if rows:
        kernel_module("sampling").run_rows(call.logits, described, call.seen, y, call.device, call.stream)
    return call.hand_out(y, call.returned)
