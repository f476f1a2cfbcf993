"""Text to token ids and back, through ``tokenizers``: a tokenizer.json as it is, or what a GGUF file's vocabulary says.

Control tokens (``<|im_start|>`` and such) are cut out of a text before the vocabulary sees it, and only where the caller says
so: text that a user typed into a chat never becomes a control token.
"""

import codecs
import json
import re
from functools import cached_property

from nbkernels.model.config import CheckpointError

# token types of GGUF
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what stands for a space in a vocabulary of SentencePiece
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")

# How texts are split before byte-level BPE: GPT-2's pattern, and its descendants. What they cut off differs in digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2, GPT2_DIGITS, LLAMA3, QWEN2 = "gpt2", "gpt2-digits", _WORDS % "{1,3}", _WORDS % ""
# by their GGUF name
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "olmo", "mpt", "jais"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), GPT2_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3"), LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), QWEN2),
}


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
    """A vocabulary with its control tokens.

    backend: a ``tokenizers.Tokenizer`` whose special added tokens are the control tokens. bos, add_bos: the token that starts a
    text, and whether it must. end_ids: tokens that end a generation. names: what a chat template calls some of the tokens,
    "bos_token" and such -> their text.
    """

    def __init__(self, backend, *, bos=None, add_bos=False, end_ids=(), names=None):
        self.backend = backend
        self.bos = bos
        self.add_bos = add_bos
        self.end_ids = frozenset(end_ids)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            self.tokens[token] = text
        added = backend.get_added_tokens_decoder()
        self.control = {t.content: i for i, t in added.items() if t.special}
        self._always = {t.content: i for i, t in added.items() if not t.special}
        self._added = list(added.values())
        kind = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._bytes = _byte_of_character() if b"ByteLevel" in kind else None
        self._strips_space = b"Strip" in kind or (b"Metaspace" in kind and b'"never"' not in kind)
        self.names = {} if names is None else dict(names)
        if bos is not None and 0 <= bos < len(self.tokens):
            self.names.setdefault("bos_token", self.tokens[bos])
        if self.end_ids and 0 <= min(self.end_ids) < len(self.tokens):
            self.names.setdefault("eos_token", self.tokens[min(self.end_ids)])

    def __len__(self):
        return len(self.tokens)

    def encode(self, text, *, control=False, literal=None):
        """Token ids of a text (without a BOS).

        control: whether control tokens written in the text become control tokens. literal: a map of placeholders to the text
        they stand for, put back after control tokens have been cut out (how a chat keeps user text literal).
        """
        if not control:
            return self._literal_first.encode(text, add_special_tokens=False).ids
        if not literal:
            return self.backend.encode(text, add_special_tokens=False).ids
        ids = []
        for index, part in enumerate(self._split_control.split(text) if self._split_control else [text]):
            if index % 2:
                ids.append(self.control[part] if part in self.control else self.control[part.strip()])
            elif part:
                for placeholder, meant in literal.items():
                    part = part.replace(placeholder, meant)
                backend = self._literal_rest if index else self._literal_first
                ids.extend(backend.encode(part, add_special_tokens=False).ids)
        return ids

    @cached_property
    def _split_control(self):
        """A pattern that splits a text at its control tokens, the longest first, and keeps them; None where there are none."""
        tokens = sorted((t for t in self._added if t.special), key=lambda t: len(t.content), reverse=True)
        patterns = (r"\s*" * t.lstrip + re.escape(t.content) + r"\s*" * t.rstrip for t in tokens)
        return re.compile("(" + "|".join(patterns) + ")") if tokens else None

    @cached_property
    def _literal_first(self):
        """The backend as it treats the beginning of a text, control tokens being text."""
        return self._literal_backend(lambda step: step)

    @cached_property
    def _literal_rest(self):
        """The backend as it treats what follows a control token, control tokens being text."""

        def later(step):
            if isinstance(step, dict) and step.get("prepend_scheme") == "first":
                return {**step, "prepend_scheme": "never"}
            return step

        return self._literal_backend(later)

    def _literal_backend(self, change):
        """A copy whose control tokens are text; change: a function of each step of its pre-tokenizer."""
        from tokenizers import Tokenizer as Backend

        described = json.loads(self.backend.to_str())
        steps = described.get("pre_tokenizer")
        if steps and steps.get("type") == "Sequence":
            steps["pretokenizers"] = [change(step) for step in steps["pretokenizers"]]
        elif steps:
            described["pre_tokenizer"] = change(steps)
        copy = Backend.from_str(json.dumps(described))
        copy.encode_special_tokens = True
        return copy

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
        if self._bytes is None:
            piece = BYTE_PIECE.fullmatch(text)
            return bytes([int(piece[1], 16)]) if piece else text.replace(SPACE, " ").encode()
        return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in text)

    def decode(self, ids):
        """The text of token ids, control tokens left out; bytes that are no UTF-8 become U+FFFD.

        The space that a SentencePiece vocabulary puts before a text is left out too.
        """
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        return text.removeprefix(" ") if self._strips_space else text


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


# ---- GGUF ----------------------------------------------------------------------------------------------------------------


def tokenizer_from_gguf(checkpoint):
    """The Tokenizer of a GGUF checkpoint. CheckpointError for a kind that is not supported, or is damaged."""
    kind = checkpoint.metadata("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"tokenizer {kind!r} is not supported; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) are"
        )
    tokens = checkpoint.metadata("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise CheckpointError("the vocabulary's tokens are missing")
    types = checkpoint.metadata("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"token types that do not fit {len(tokens)} tokens")
    pre = checkpoint.metadata("tokenizer.ggml.pre", "default")
    if kind == "gpt2":
        merges = checkpoint.metadata("tokenizer.ggml.merges")
        if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
            raise CheckpointError("the vocabulary's merges are missing")
        backend = byte_level_backend(tokens, merges, types, pre)
        add_bos = PRE_TOKENIZERS[pre] == LLAMA3
    else:
        scores = checkpoint.metadata("tokenizer.ggml.scores")
        numbers = isinstance(scores, list) and all(isinstance(s, float) and s == s for s in scores)
        if not numbers or len(scores) != len(tokens):
            raise CheckpointError(f"the vocabulary's scores do not fit its {len(tokens)} tokens")
        prefix = bool(checkpoint.metadata("tokenizer.ggml.add_space_prefix", True))
        backend = sentencepiece_backend(tokens, scores, types, prefix)
        add_bos = True

    def token_id(name):
        value = checkpoint.metadata(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    ends = [token_id(name) for name in ("eos", "eot", "eom")]
    names = {f"{name}_token": tokens[token_id(name)] for name in ("bos", "eos") if token_id(name) is not None}
    return Tokenizer(
        backend,
        bos=token_id("bos"),
        add_bos=bool(checkpoint.metadata("tokenizer.ggml.add_bos_token", add_bos)),
        end_ids=[i for i in ends if i is not None],
        names=names,
    )


def byte_level_backend(tokens, merges, types, pre):
    """Byte-level BPE: tokens, merges "left right" in order of rank, GGUF's token types, the pre-tokenizer's name."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"pre-tokenizer {pre!r} is not supported; {', '.join(PRE_TOKENIZERS)} are")
    split = PRE_TOKENIZERS[pre]
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        vocabulary = {t: i for i, t in enumerate(tokens)}
        # Llama 3's vocabulary holds words that its merges do not reach
        model = models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=split == LLAMA3)
    except Exception as error:
        raise CheckpointError(f"the vocabulary's merges do not fit its tokens ({error})") from error
    backend = Backend(model)
    if split in (GPT2, GPT2_DIGITS):
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if split == GPT2_DIGITS:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types)
    return backend


def sentencepiece_backend(tokens, scores, types, prefix):
    """SentencePiece's BPE with byte fallback: of two neighbours those merge first whose joint piece has the highest score.

    scores: one a token; prefix: whether a text gets a space in front. Two pieces that make a third are a merge, whose rank is
    that of the third's score.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    ranks = {t: i for i, t in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        found = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges.extend((-score, ranks[token], *pair) for pair in sorted(found))
    merges.sort(key=lambda merge: merge[:4])
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    try:
        model = models.BPE(
            vocab=ranks,
            merges=[merge[4:] for merge in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    except Exception as error:
        raise CheckpointError(f"the vocabulary cannot be used ({error})") from error
    backend = Backend(model)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add_tokens(backend, tokens, types)
    return backend


def _add_tokens(backend, tokens, types):
    """Control tokens and the user's own, which are cut out of a text first."""
    from tokenizers import AddedToken

    kinds = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in kinds if kind == USER_DEFINED])


# ---- Hugging Face --------------------------------------------------------------------------------------------------------


def tokenizer_from_huggingface(checkpoint):
    """The Tokenizer of a Hugging Face folder: its tokenizer.json, and what the files beside it say of special tokens."""
    from tokenizers import Tokenizer as Backend

    path = checkpoint.path / "tokenizer.json"
    if not path.is_file():
        others = [n for n in ("tokenizer.model", "vocab.json", "vocab.txt") if (checkpoint.path / n).exists()]
        save = "save it with AutoTokenizer.from_pretrained(…).save_pretrained(folder) of transformers"
        raise CheckpointError("tokenizer.json is missing" + (f" ({others[0]} is there: {save})" if others else ""))
    try:
        backend = Backend.from_str(path.read_bytes().decode())
        backend.no_padding()
        backend.no_truncation()
    except Exception as error:
        raise CheckpointError(f"tokenizer.json cannot be used ({error})") from error
    settings = checkpoint.tokenizer_config
    names = {}
    for key, value in {**checkpoint.special_tokens, **settings}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text

    def token_id(name):
        return None if names.get(f"{name}_token") is None else backend.token_to_id(names[f"{name}_token"])

    def first(values):
        return next((v for v in values if v is not None), None)

    bos = first([token_id("bos"), *(_one_id(c.get("bos_token_id")) for c in checkpoint.generation_configs)])
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = bos is not None and backend.encode("").ids[:1] == [bos]
    ends = first([_ids(c.get("eos_token_id")) or None for c in checkpoint.generation_configs])
    if ends is None:
        ends = [] if token_id("eos") is None else [token_id("eos")]
    return Tokenizer(backend, bos=bos, add_bos=add_bos, end_ids=ends, names=names)


def _ids(value):
    """eos_token_id: one, several, or none."""
    given = value if isinstance(value, list) else [value]
    return [i for i in given if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _one_id(value):
    return next(iter(_ids(value)), None)
