"""How the next token is chosen: the options of a generation, checked before anything runs."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_DRAFTED = 7  # tokens a step
# Logits up to 10^5 times or by such numbers stay finite in float32, in which tokens are drawn.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-20, 1e20
LEAST_PENALTY, MOST_PENALTY = 1e-6, 1e6


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0 takes the likeliest token; else penalty, temperature, top-k, top-p and min-p, in this order.

    Raises TypeError or ValueError, naming the option. A seed of None draws one, so that the text can be had again.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        wanted = f"0, or a number from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
        _number("temperature", self.temperature, wanted, lambda v: v == 0 or LEAST_TEMPERATURE <= v <= MOST_TEMPERATURE)
        if self.top_k is not None:
            _integer("top_k", self.top_k, "at least 1", lambda v: v >= 1)
        if self.top_p is not None:
            _number("top_p", self.top_p, "a number in (0, 1]", lambda v: 0 < v <= 1)
        if self.min_p is not None:
            _number("min_p", self.min_p, "a number in [0, 1]", lambda v: 0 <= v <= 1)
        wanted = f"a number from {LEAST_PENALTY:g} to {MOST_PENALTY:g}"
        _number("repetition_penalty", self.repetition_penalty, wanted, lambda v: LEAST_PENALTY <= v <= MOST_PENALTY)
        if self.seed is not None:
            _integer("seed", self.seed, "0 to 2^64 - 1", lambda v: 0 <= v < 2**64)

    def with_seed(self):
        """The same options with a seed: the given one, or a fresh one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))


def _number(name, value, wanted, right):
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {type(value).__name__}, wanted {wanted}")
    if not right(value):  # a NaN is right for none
        raise ValueError(f"{name}: {value}, wanted {wanted}")


def _integer(name, value, wanted, right):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {type(value).__name__}, wanted an integer, {wanted}")
    if not right(value):
        raise ValueError(f"{name}: {value}, wanted {wanted}")


def check_new_tokens(max_new_tokens):
    """Raise TypeError or ValueError unless it is a number of tokens to write."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens: {type(max_new_tokens).__name__}, wanted an integer of at least 1")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens}, wanted an integer of at least 1")


def check_speculate(speculate):
    """Raise TypeError or ValueError unless it is a number of tokens to draft."""
    _integer("speculate", speculate, f"0 to {MOST_DRAFTED}", lambda v: 0 <= v <= MOST_DRAFTED)


def check_stop(stop):
    """Stop strings as a tuple, of one string or several. Raises TypeError or ValueError."""
    if not isinstance(stop, Iterable):
        raise TypeError(f"stop: {type(stop).__name__}, wanted a string or several")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stop:
        if not isinstance(text, str):
            raise TypeError(f"stop: {type(text).__name__}, wanted strings")
        if not text:
            raise ValueError("stop: an empty string, wanted some text")
    return stop
