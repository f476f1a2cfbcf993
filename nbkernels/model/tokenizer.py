"""Text to token ids and back: byte-level BPE through the ``tokenizers`` package, built from a checkpoint's vocabulary.

Control tokens (``<|im_start|>`` and such) are cut out of a text before the BPE sees it, and only where the caller says so:
text that a user typed into a chat never becomes a control token.
"""

import codecs
import re

from nbkernels.model.config import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
# pre-tokenizers by their GGUF name: whether digits are cut off one by one before the GPT-2 split
PRE_TOKENIZERS = {"smollm": True, "gpt-2": False, "gpt2": False, "default": False}


def _byte_of_character():
    """GPT-2's map from the printable character that stands for a byte in a vocabulary back to the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {chr(b): b for b in printable}
    spare = iter(range(256, 512))
    for byte in range(256):
        if byte not in printable:
            characters[chr(next(spare))] = byte
    return characters


class Tokenizer:
    """Byte-level BPE with control tokens.

    tokens: the vocabulary; merges: "left right" in order of rank; token_types: GGUF's, one a token; pre: name of the
    pre-tokenizer; bos, add_bos: the token that starts a text and whether it must.
    """

    def __init__(self, tokens, merges, token_types, *, pre="gpt-2", bos=None, add_bos=False, end_ids=()):
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        if pre not in PRE_TOKENIZERS:
            raise CheckpointError(f"pre-tokenizer {pre!r} is not supported; {', '.join(PRE_TOKENIZERS)} are")
        self.tokens = tokens
        self.bos = bos
        self.add_bos = add_bos
        self.end_ids = frozenset(end_ids)
        self.control = {t: i for i, (t, kind) in enumerate(zip(tokens, token_types, strict=True)) if kind == CONTROL}
        always = {t: i for i, (t, kind) in enumerate(zip(tokens, token_types, strict=True)) if kind == USER_DEFINED}
        self._always = always
        try:
            pairs = [tuple(merge.split(" ", 1)) for merge in merges]
            model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, fuse_unk=False)
        except Exception as error:
            raise CheckpointError(f"the vocabulary's merges do not fit its tokens ({error})") from error
        self.backend = Backend(model)
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if PRE_TOKENIZERS[pre]:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        self.backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self.backend.decoder = decoders.ByteLevel()
        self._split_always = _splitter(always)
        self._split_control = _splitter({**self.control, **always})
        self._bytes = _byte_of_character()

    def __len__(self):
        return len(self.tokens)

    def encode(self, text, *, control=False, literal=None):
        """Token ids of a text (without a BOS).

        control: whether control tokens written in the text become control tokens. literal: a map of placeholders to the text
        they stand for, put back after control tokens have been cut out (how a chat keeps user text literal).
        """
        ids = []
        split = self._split_control if control else self._split_always
        for index, part in enumerate(split.split(text) if split else [text]):
            if index % 2:
                ids.append(self.control[part] if part in self.control else self._always[part])
            elif part:
                for placeholder, meant in (literal or {}).items():
                    part = part.replace(placeholder, meant)
                ids.extend(self.backend.encode(part, add_special_tokens=False).ids)
        return ids

    def encode_prompt(self, text):
        """Ids of a prompt as it is written, control tokens included, behind the one BOS that the model wants."""
        return self.with_bos(self.encode(text, control=True))

    def with_bos(self, ids):
        """ids behind a BOS, where the model wants one and none is there yet."""
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def token_bytes(self, token):
        """The bytes that a token stands for; a control token stands for none."""
        text = self.tokens[token] if 0 <= token < len(self.tokens) else ""
        if text in self.control:
            return b""
        if text in self._always:
            return text.encode()
        return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in text)

    def decode(self, ids):
        """The text of token ids, control tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


def _splitter(tokens):
    """A pattern that splits a text at these tokens, the longest first, and keeps them; None where there are none."""
    if not tokens:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")


class TextStream:
    """Token ids in, text out: never half a character, never the beginning of a stop string.

    ``push(token)`` returns what may be shown; ``finish()`` the rest. Once ``stopped`` is True a stop string was met, and it
    and what follows it are left out.
    """

    def __init__(self, tokenizer, stop=()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""
        self.stopped = False

    def push(self, token):
        """The text that this token lets out, possibly none."""
        return self._release(self.decoder.decode(self.tokenizer.token_bytes(token)))

    def finish(self):
        """What was held back when the tokens ended."""
        if self.stopped:
            return ""
        text = self._release(self.decoder.decode(b"", final=True))
        rest, self.held = ("" if self.stopped else self.held), ""
        return text + rest

    def _release(self, text):
        if self.stopped:
            return ""
        self.held += text
        found = [at for at in (self.held.find(s) for s in self.stop) if at >= 0]
        if found:
            self.stopped = True
            shown, self.held = self.held[: min(found)], ""
            return shown
        keep = max((_overlap(self.held, s) for s in self.stop), default=0)
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown


def _overlap(text, stop):
    """How many characters at the end of text are a beginning of stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def tokenizer_from_gguf(checkpoint):
    """The Tokenizer of a GGUF checkpoint. CheckpointError for a kind that is not byte-level BPE."""
    kind = checkpoint.metadata("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"tokenizer {kind!r} is not supported yet; 'gpt2' (byte-level BPE) is")
    tokens = checkpoint.metadata("tokenizer.ggml.tokens")
    merges = checkpoint.metadata("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise CheckpointError("the vocabulary's tokens or merges are missing")
    types = checkpoint.metadata("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{len(types)} token types for {len(tokens)} tokens")
    ends = [checkpoint.metadata(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        tokens,
        merges,
        types,
        pre=checkpoint.metadata("tokenizer.ggml.pre", "default"),
        bos=checkpoint.metadata("tokenizer.ggml.bos_token_id"),
        add_bos=bool(checkpoint.metadata("tokenizer.ggml.add_bos_token", False)),
        end_ids=[i for i in ends if i is not None],
    )
