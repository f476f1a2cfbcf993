"""What a generation took."""

from dataclasses import dataclass


@dataclass
class Statistics:
    """What a generation took. first_token_seconds: from the call to the first token; memory_bytes: see backend.memory_bytes.

    Of an Engine's request also: reused_tokens of the prompt, whose keys and values another request had computed; drafted and
    accepted tokens of speculation; preemptions: how often it gave way to older requests. Its memory_bytes are 0: the memory is
    the Engine's.
    """

    device: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    memory_bytes: int = 0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0

    @property
    def tokens_per_second(self):
        """Tokens after the first, over the time they took; 0 where there was one at most."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 and self.decode_seconds else 0.0
