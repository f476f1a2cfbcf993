"""Choosing a token: argmax, and the draw with its filters, against statements by sorting and against the reference."""

import numpy as np
import pytest
from compare import DTYPES, poisoned, random, to_device, to_host
from kernel_cases import row_numbers

import nbkernels as nbk
from nbkernels import reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 33, 1000, 9001])
def test_argmax(device, dtype, columns):
    x = random((4, columns), dtype, 0)
    out = poisoned((4,), np.int32)
    nbk.argmax(to_device(x), out=out)
    np.testing.assert_array_equal(to_host(out), np.argmax(x.astype(np.float32), axis=-1))


def test_argmax_takes_the_first_of_equals_and_a_nan_before_all(device):
    x = np.zeros((6, 500), np.float32)
    x[1, [100, 400]] = 2
    x[2, [300, 450]] = np.nan
    x[3] = -np.inf
    x[4, 0] = -0.0
    x[5] = -1
    np.testing.assert_array_equal(to_host(nbk.argmax(to_device(x))), [0, 100, 300, 0, 0, 0])


OPTIONS = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 10**6, "top_p": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_equal_the_reference(device, dtype, options):
    logits = 3 * random((3, 1500), np.float32, 0)
    logits = logits.astype(dtype)
    for seed in (0, 2**40 + 3):
        for number in (0, 7):
            step = np.array([number], np.int32)
            got = nbk.sample(to_device(logits), temperature=0.8, seed=seed, step=to_device(step), **options)
            want = reference.sample(logits, temperature=0.8, seed=seed, step=step, **options)
            np.testing.assert_array_equal(to_host(got), want)


def test_penalty_marks_what_is_chosen(device):
    logits = random((2, 300), np.float32, 0)
    seen = np.zeros((2, 300), np.uint8)
    marked = to_device(seen)
    for _ in range(3):
        got = to_host(nbk.sample(to_device(logits), temperature=0.0, repetition_penalty=5.0, seen=marked))
        np.testing.assert_array_equal(got, reference.sample(logits, temperature=0.0, repetition_penalty=5.0, seen=seen))
    np.testing.assert_array_equal(to_host(marked), seen)
    assert seen.sum() == 6, "three tokens a row, each penalised after it was taken"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1e-4},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_extremes_are_greedy(device, options):
    logits = random((4, 700), np.float32, 3)
    np.testing.assert_array_equal(to_host(nbk.sample(to_device(logits), seed=9, **options)), np.argmax(logits, axis=-1))


def test_masked_tokens_and_one_column(device):
    logits = np.full((2, 400), -np.inf, np.float32)
    logits[:, [17, 33]] = 0
    for seed in range(3):
        assert set(to_host(nbk.sample(to_device(logits), temperature=1.0, seed=seed, top_p=0.9))) <= {17, 33}
    assert to_host(nbk.sample(to_device(logits[:, 17:18]), temperature=1.0)).tolist() == [0, 0]


def test_a_row_draws_as_it_would_alone(device):
    """Every number of ``sample_rows``, and what ``sample`` says of each row by itself."""
    rows, vocab = 24, 700
    logits = 3 * random((rows, vocab), np.float32, 5)
    numbers = row_numbers(rows)
    seen = (random((rows, vocab), np.float32, 1) > 1).astype(np.uint8)
    marked = to_device(seen)
    out = poisoned((rows,), np.int32)
    nbk.sample_rows(to_device(logits), seen=marked, out=out, **{n: to_device(x) for n, x in numbers.items()})
    want = []
    for i in range(rows):
        options = {name: x[i].item() for name, x in numbers.items() if name not in ("step", "seen_row")}
        options["top_k"] = options["top_k"] or None
        mask = None
        if options["repetition_penalty"] != 1:
            mask = seen[numbers["seen_row"][i], None]
        step = numbers["step"][i : i + 1]
        want.append(int(reference.sample(logits[i : i + 1], seen=mask, step=step, **options)[0]))
    assert to_host(out).tolist() == want
    np.testing.assert_array_equal(to_host(marked), seen)


# ---- the reference itself -------------------------------------------------------------------------------------------


def test_philox_equals_its_published_vectors():
    """The known answers that come with Salmon et al.'s Random123: counters and keys of zeros, and of ones."""
    assert int(reference.philox((0, 0, 0, 0), (0, 0))) == 0x6627E8D5
    ones = 0xFFFFFFFF
    assert int(reference.philox((ones,) * 4, (ones, ones))) == 0x408F276D


def test_filters_against_sorting():
    scores = 2 * random((5, 200), np.float32, 1)
    share = np.exp(scores - scores.max(-1, keepdims=True)).astype(np.float64)
    for row, weights in enumerate(share):
        order = np.argsort(-weights)
        np.testing.assert_array_equal(
            np.sort(order[:9]), np.flatnonzero(reference.sampling_filter(scores, top_k=9)[row])
        )
        enough = np.searchsorted(np.cumsum(weights[order]), 0.8 * weights.sum()) + 1
        np.testing.assert_array_equal(
            np.sort(order[:enough]), np.flatnonzero(reference.sampling_filter(scores, top_p=0.8)[row])
        )
        np.testing.assert_array_equal(
            np.flatnonzero(weights >= 0.05), np.flatnonzero(reference.sampling_filter(scores, min_p=0.05)[row])
        )


def test_draws_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.2, 0.15, 0.1, 0.05]], np.float32))
    draws = 4000
    counts = np.bincount(
        [int(reference.sample(logits, temperature=1.0, seed=11, step=np.array([i]))[0]) for i in range(draws)],
        minlength=5,
    )
    expected = draws * np.exp(logits[0])
    # chi-square with 4 degrees of freedom: 18.5 is passed by chance once in a thousand
    assert np.sum((counts - expected) ** 2 / expected) < 18.5
