"""The model families, as data: what their files call things, and where they differ from one another.

A family is one entry of FAMILIES. Its ``tensors`` say which parts a model is made of, by our names, and what a Hugging Face
file calls each; what is there decides the forward pass (a ``q_norm``, a ``post_attention_norm``, no ``gate``). The other
fields say what no tensor tells. To add a family: an entry here, a case in tests/test_families.py, and its recording by
scripts/record_families.py.

The parts, in a layer unless said otherwise; a bias stands beside its weight:

    embedding, positions, norm, head                              of the model
    attention_norm → q, k, v (or qkv) → q_norm, k_norm → output → post_attention_norm
    feed_forward_norm → gate, up (or gate_up) → down → post_feed_forward_norm
"""

import math
from dataclasses import dataclass, field

from nbkernels.model.config import CheckpointError, ModelConfig, Rotary

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
# what a GGUF file calls each part; the same for all families
GGUF_TENSORS = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "qkv": "blk.{}.attn_qkv",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "output": "blk.{}.attn_output",
    "post_attention_norm": "blk.{}.post_attention_norm",
    "feed_forward_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "gate_up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "post_feed_forward_norm": "blk.{}.post_ffw_norm",
}
OF_MODEL = ("embedding", "positions", "norm", "head")
# keys of config.json that most families share
KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "feed_forward": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
}


def _names(base, model, layer, **parts):
    """Names of the model's own parts, and those of a layer below ``base + layer``."""
    return {**model, **{part: f"{base}{layer}.{{}}.{name}" for part, name in parts.items()}}


LLAMA = _names(
    "model.",
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "layers",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    output="self_attn.o_proj",
    feed_forward_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
HEAD_NORMS = {"q_norm": "model.layers.{}.self_attn.q_norm", "k_norm": "model.layers.{}.self_attn.k_norm"}
POST_NORMS = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "post_feed_forward_norm": "model.layers.{}.post_feedforward_layernorm",
}
GEMMA2 = {**LLAMA, **POST_NORMS, "feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm"}
OLMO2 = {
    k: v for k, v in {**LLAMA, **HEAD_NORMS, **POST_NORMS}.items() if k not in ("attention_norm", "feed_forward_norm")
}
PHI3 = {
    **{k: v for k, v in LLAMA.items() if k not in ("q", "k", "v", "gate", "up")},
    "qkv": "model.layers.{}.self_attn.qkv_proj",
    "gate_up": "model.layers.{}.mlp.gate_up_proj",
}
GPT2 = _names(
    "transformer.",
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "h",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    output="attn.c_proj",
    feed_forward_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
GPT_NEOX = _names(
    "gpt_neox.",
    {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    "layers",
    attention_norm="input_layernorm",
    qkv="attention.query_key_value",
    output="attention.dense",
    feed_forward_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


@dataclass(frozen=True)
class Family:
    """What a family's files call things, and what its tensors do not tell.

    tensors: part -> its name in a Hugging Face file, {} standing for the layer. gguf: the architecture's name in GGUF files.
    keys: part of ModelConfig -> key of config.json, where it is not KEYS'; defaults: values of keys that a file may leave out.
    biases: parts that must have one (others may). required: keys of config.json whose other values change the computation.
    norm: as ModelConfig's. norm_offset: what is added to the weights of norms in a Hugging Face file. qk_norm: "row" where all
    heads are normalised at once. tied: whether the head is the embedding where config.json does not say.
    transposed: matrices are stored [in, out] in a Hugging Face file. qkv_by_heads: its rows are q, k, v of head 0, of head 1, …
    gguf_interleaved: GGUF files hold the rows of q and k for rotary pairs (0, 1), (2, 3), …
    rotates: False where positions are learned alone. partial_rotary: the share of a head that is rotated.
    full_every: of windowed layers, each so many'th sees everything (0: none does). local_base: of the rotary angles in windowed
    layers, where they have their own. scaled_embedding: by sqrt(hidden). query_scale: key of the number whose square root scores
    are divided by. gguf_wide_query: (layers, ) whose GGUF files mean hidden / heads by that, and others head_dim.
    """

    tensors: dict
    gguf: str
    keys: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    required: dict = field(default_factory=dict)
    biases: tuple = ()
    norm: str = "rms"
    norm_offset: float = 0.0
    qk_norm: str = "head"
    activation: str = "silu"
    tied: bool = False
    transposed: bool = False
    qkv_by_heads: bool = False
    gguf_interleaved: bool = False
    rotates: bool = True
    partial_rotary: float = 1.0
    full_every: int = 0
    local_base: float | None = None
    windowed: bool = False
    parallel_key: str | None = None
    scaled_embedding: bool = False
    query_scale: str | None = None
    gguf_wide_query: tuple = ()


FAMILIES = {
    # Llama 1 to 3.3, TinyLlama, SmolLM, SmolLM2, Yi, …
    "llama": Family(LLAMA, gguf="llama", gguf_interleaved=True),
    "mistral": Family(LLAMA, gguf="llama", gguf_interleaved=True, windowed=True),
    "smollm3": Family(
        LLAMA,
        gguf="smollm3",
        gguf_interleaved=True,
        tied=True,
        defaults={"no_rope_layer_interval": 4, "rope_theta": 2000000.0},
    ),
    "qwen2": Family(LLAMA, gguf="qwen2", biases=("q", "k", "v"), defaults={"max_window_layers": 28}),
    "qwen3": Family({**LLAMA, **HEAD_NORMS}, gguf="qwen3", defaults={"head_dim": 128, "max_window_layers": 28}),
    "phi3": Family(PHI3, gguf="phi3", windowed=True),
    "gemma2": Family(
        GEMMA2,
        gguf="gemma2",
        keys={"activation": "hidden_activation"},
        defaults={"head_dim": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        required={"use_bidirectional_attention": (None, False)},
        norm_offset=1.0,
        activation="gelu",
        tied=True,
        windowed=True,
        full_every=2,
        scaled_embedding=True,
        query_scale="query_pre_attn_scalar",
        gguf_wide_query=(46,),
    ),
    "gemma3_text": Family(
        {**GEMMA2, **HEAD_NORMS},
        gguf="gemma3",
        keys={"activation": "hidden_activation"},
        defaults={"head_dim": 256, "rope_theta": 1000000.0},
        required={"use_bidirectional_attention": (None, False)},
        norm_offset=1.0,
        activation="gelu",
        tied=True,
        windowed=True,
        full_every=6,
        local_base=10000.0,
        scaled_embedding=True,
        query_scale="query_pre_attn_scalar",
        gguf_wide_query=(62,),
    ),
    "olmo2": Family(OLMO2, gguf="olmo2", qk_norm="row"),
    "gpt2": Family(
        GPT2,
        gguf="gpt2",
        keys={
            "layers": "n_layer",
            "hidden": "n_embd",
            "heads": "n_head",
            "kv_heads": "n_head",
            "feed_forward": "n_inner",
            "context": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
        },
        required={"scale_attn_weights": (None, True), "scale_attn_by_inverse_layer_idx": (None, False)},
        biases=("attention_norm", "qkv", "output", "feed_forward_norm", "up", "down", "norm"),
        norm="layer",
        activation="gelu",
        tied=True,
        transposed=True,
        rotates=False,
    ),
    "gpt_neox": Family(  # Pythia
        GPT_NEOX,
        gguf="gptneox",
        keys={"norm_eps": "layer_norm_eps", "kv_heads": "num_attention_heads"},
        biases=("attention_norm", "feed_forward_norm", "up", "down", "norm"),
        norm="layer",
        activation="gelu_exact",
        qkv_by_heads=True,
        partial_rotary=0.25,
        parallel_key="use_parallel_residual",
    ),
}
# other names of the same: a model whose text part is what we take
ALIASES = {"gemma3": "gemma3_text", "smollm2": "llama"}
GGUF_FAMILIES = {family.gguf: name for name, family in reversed(FAMILIES.items())}


def _structure(family):
    """Fields of ModelConfig that the parts tell."""
    parts = family.tensors
    return {
        "norm": family.norm,
        "qk_norm": family.qk_norm if "q_norm" in parts else None,
        "pre_norm": "attention_norm" in parts,
        "post_norm": "post_attention_norm" in parts,
        "gated": "gate" in parts or "gate_up" in parts,
        "positions": "positions" in parts,
    }


def _is_number(value):
    """Whether a value of a stranger's file is a number that arithmetic can be done with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -(2**63) < value < 2**63


def _root(value):
    """The square root of a width."""
    if value <= 0:
        raise CheckpointError(f"a width of {value}, wanted a number above 0")
    return math.sqrt(value)


def _refuse_unknown(name, known):
    raise CheckpointError(f"architecture {name!r} is not supported; {', '.join(sorted(known))} are")


# ---- Hugging Face --------------------------------------------------------------------------------------------------------


class _Values:
    """config.json's values with the family's names and defaults, each checked for its kind."""

    def __init__(self, raw, family):
        self.raw = raw
        self.family = family

    def get(self, key, default=None):
        value = self.raw.get(key)
        return self.family.defaults.get(key, default) if value is None else value

    def number(self, key, default=None, *, whole=False):
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json: {key!r} is missing")
        if not _is_number(value):
            raise CheckpointError(f"config.json: {key!r} is {value!r}, wanted a number")
        if whole:
            if value != int(value):
                raise CheckpointError(f"config.json: {key!r} is {value!r}, wanted an integer")
            return int(value)
        return float(value)

    def field(self, name, default=None, *, whole=True):
        return self.number(self.family.keys.get(name, KEYS[name]), default, whole=whole)

    def number_or_none(self, key):
        return None if self.get(key) is None else self.number(key)


def huggingface_config(raw):
    """(name of the family, ModelConfig) of a config.json that was parsed. CheckpointError for what is not supported."""
    raw = _text_part(raw)
    name = raw.get("model_type")
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in FAMILIES:
        _refuse_unknown(raw.get("architectures") if name is None else name, FAMILIES)
    if raw.get("quantization_config"):
        method = (
            raw["quantization_config"].get("quant_method") if isinstance(raw["quantization_config"], dict) else None
        )
        raise CheckpointError(
            f"weights quantised by {method!r} are not supported; take the original ones and quantize="
        )
    family = FAMILIES[name]
    values = _Values(raw, family)
    for key, allowed in family.required.items():
        if not any(raw.get(key) is value for value in allowed):
            raise CheckpointError(f"config.json: {key!r} is {raw[key]!r}, which is not supported")
    hidden, heads, layers = (values.field(field_name) for field_name in ("hidden", "heads", "layers"))
    head_dim = values.field("head_dim", hidden // max(heads, 1))
    context = values.field("context")
    rotaries, rotations, rope_dim, context = _huggingface_rotary(values, layers, head_dim, context)
    activation = values.get(family.keys.get("activation", KEYS["activation"]))
    if activation is None:
        activation = family.activation
    elif isinstance(activation, str) and activation in ACTIVATIONS:
        activation = ACTIVATIONS[activation]
    else:
        raise CheckpointError(f"config.json: activation {activation!r} is not supported; {', '.join(ACTIVATIONS)} are")
    parallel = family.parallel_key is not None and bool(values.get(family.parallel_key, True))
    config = ModelConfig(
        architecture=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=values.field("kv_heads", heads),
        head_dim=head_dim,
        feed_forward=values.field("feed_forward", 4 * hidden),
        vocab=values.field("vocab"),
        context=context,
        rope_dim=rope_dim,
        norm_eps=values.field("norm_eps", whole=False),
        rotaries=rotaries,
        rotations=rotations,
        windows=_huggingface_windows(values, layers),
        activation=activation,
        parallel=parallel,
        tied=bool(values.get("tie_word_embeddings", family.tied)),
        embedding_scale=_root(hidden) if family.scaled_embedding else 1.0,
        attention_scale=1 / _root(values.number(family.query_scale, head_dim)) if family.query_scale else None,
        attention_soft_cap=values.number_or_none("attn_logit_softcapping"),
        logit_soft_cap=values.number_or_none("final_logit_softcapping"),
        **_structure(family),
    )
    return name, config


def _text_part(raw):
    """The part of a config.json that describes the text model."""
    text = raw.get("text_config")
    if isinstance(text, dict):
        return {**{k: v for k, v in raw.items() if k in ("tie_word_embeddings", "eos_token_id")}, **text}
    return raw


def _layer_types(values, layers):
    """Whether each layer has a window: the file's own list, or what its older keys mean."""
    types = values.get("layer_types")
    if types is not None:
        known = {"sliding_attention": True, "full_attention": False}
        if (
            not isinstance(types, list)
            or len(types) != layers
            or not all(isinstance(t, str) and t in known for t in types)
        ):
            raise CheckpointError(f"config.json: 'layer_types', wanted {layers} of {', '.join(known)}")
        return [known[t] for t in types]
    if values.family.full_every:
        every = values.number("sliding_window_pattern", values.family.full_every, whole=True)
        if every < 1:
            raise CheckpointError(f"config.json: 'sliding_window_pattern' is {every}, wanted at least 1")
        return [bool((i + 1) % every) for i in range(layers)]
    if values.family.windowed:
        return [True] * layers
    if values.get("use_sliding_window"):
        first = values.number("max_window_layers", 0, whole=True)
        return [i >= first for i in range(layers)]
    return [False] * layers


def _huggingface_windows(values, layers):
    if layers > 2**16:  # refused by ModelConfig
        return ()
    window = values.get("sliding_window")
    if window is None:
        return ()
    window = values.number("sliding_window", whole=True)
    return tuple(window if windowed else None for windowed in _layer_types(values, layers))


def _huggingface_rotary(values, layers, head_dim, context):
    """(rotaries, rotations, rope_dim, context) of a config.json, in the spellings of old and new ones."""
    family = values.family
    if not family.rotates:
        return (Rotary(),), (), 0, context
    given = values.get("rope_parameters")
    scaling = values.get("rope_scaling")
    by_type = None
    if isinstance(given, dict) and any(isinstance(v, dict) for v in given.values()):
        by_type = given
    elif given is None:
        given = scaling or {}
    if not isinstance(given, dict):
        raise CheckpointError("config.json: 'rope_parameters' or 'rope_scaling' is no object")
    base = values.number("rope_theta", values.get("rotary_emb_base", 10000.0))
    if by_type is None:
        share, context, rotary = _one_rotary(values, given, base, head_dim, context)
        rotaries = (rotary,)
        if family.local_base is not None:
            local = values.number("rope_local_base_freq", family.local_base)
            rotaries = (rotary, Rotary(local))
    else:
        kinds = [by_type.get(kind) for kind in ("full_attention", "sliding_attention")]
        if any(not isinstance(kind, dict) for kind in kinds):
            raise CheckpointError("config.json: 'rope_parameters', wanted full_attention and sliding_attention")
        (share, context, full), (_, _, local) = (_one_rotary(values, k, base, head_dim, context) for k in kinds)
        rotaries = (full, local)
    rotations = ()
    if len(rotaries) == 2 and layers <= 2**16:
        rotations = tuple(int(windowed) for windowed in _layer_types(values, layers))
    elif values.family.defaults.get("no_rope_layer_interval") and layers <= 2**16:
        rotations = _without_rotation(values, layers)
    return rotaries, rotations, int(head_dim * share), context


def _without_rotation(values, layers):
    """SmolLM3: layers that do not rotate; no_rope_layers has a 1 for each that does."""
    listed = values.get("no_rope_layers")
    if listed is None:
        every = values.number("no_rope_layer_interval", whole=True)
        listed = [int((i + 1) % every != 0) for i in range(layers)] if every > 0 else [1] * layers
    if not isinstance(listed, list) or len(listed) != layers:
        raise CheckpointError(f"config.json: 'no_rope_layers', wanted a list of {layers}")
    return tuple(0 if rotates else None for rotates in listed)


def _one_rotary(values, given, base, head_dim, context):
    """(share of a head that is rotated, context, Rotary) of one rope_parameters or rope_scaling."""
    given = _Values(given, Family({}, ""))
    kind = given.get("rope_type", given.get("type", "default"))
    share = given.get("partial_rotary_factor", values.get("partial_rotary_factor", values.get("rotary_pct")))
    if share is None:
        share = values.family.partial_rotary
    if not _is_number(share) or not 0 < share <= 1:
        raise CheckpointError(f"config.json: a share {share!r} of a head is rotated, wanted a number up to 1")
    base = given.number("rope_theta", base)
    if kind in ("default", "dynamic", "mrope"):
        if kind == "mrope":
            raise CheckpointError("rotary scaling 'mrope' is not supported")
        # dynamic scaling sets in beyond the context that the model was trained for, and nothing is read there
        return share, context, Rotary(base)
    original = given.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    if original is not None:
        original = _Values({"original_max_position_embeddings": original}, given.family).number(
            "original_max_position_embeddings", whole=True
        )
    if kind in ("longrope", "su"):
        return share, *_longrope(given, base, original, int(head_dim * share), context)
    factor = given.number("factor")
    if kind == "linear":
        return share, context, Rotary(base, "linear", factor)
    original = context if original is None else original
    if kind == "llama3":
        low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
        return share, context, Rotary(base, kind, factor, low, high, original_context=original)
    if kind == "yarn":
        magnitude = given.number_or_none("attention_factor")
        scales = [given.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
        if magnitude is None and all(scale > 0 for scale in scales):
            magnitude = _yarn_magnitude(factor, scales[0]) / _yarn_magnitude(factor, scales[1])
        elif magnitude is None:
            magnitude = _yarn_magnitude(factor, 1.0)
        rotary = Rotary(
            base,
            kind,
            factor,
            beta_fast=given.number("beta_fast", 32.0),
            beta_slow=given.number("beta_slow", 1.0),
            truncate=bool(given.get("truncate", True)),
            original_context=original,
            magnitude=float(magnitude),
        )
        return share, context, rotary
    raise CheckpointError(
        f"rotary scaling {kind!r} is not supported; default, linear, dynamic, llama3, yarn and longrope are"
    )


def _yarn_magnitude(factor, scale):
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(given, base, original, rope_dim, context):
    """The short factors, and the context that they are for: the long ones would change the angles of what is cached."""
    factors = given.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rope_dim // 2:
        raise CheckpointError(f"config.json: 'short_factor', wanted a list of {rope_dim // 2} numbers")
    if not all(map(_is_number, factors)):
        raise CheckpointError("config.json: 'short_factor', wanted numbers")
    original = context if original is None else original
    factor = given.number("factor", context / max(original, 1))
    magnitude = given.number_or_none("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    rotary = Rotary(base, "factors", factors=tuple(map(float, factors)), magnitude=float(magnitude))
    return min(context, original), rotary


# ---- GGUF ----------------------------------------------------------------------------------------------------------------


def gguf_config(metadata, shapes, factors):
    """(name of the family, ModelConfig) of a GGUF file.

    metadata: a function of a key and a default; shapes: tensor name -> shape; factors: the tensor rope_freqs, or None.
    """
    architecture = metadata("general.architecture", None)
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        _refuse_unknown(architecture, GGUF_FAMILIES)
    name = GGUF_FAMILIES[architecture]
    family = FAMILIES[name]

    def number(key, default=None, *, whole=True):
        full = f"{architecture}.{key}"
        value = metadata(full, default)
        if value is None:
            raise CheckpointError(f"metadata {full!r} is missing")
        if not _is_number(value):
            raise CheckpointError(f"metadata {full!r} is {value!r}, wanted a number")
        if whole and value != int(value):
            raise CheckpointError(f"metadata {full!r} is {value!r}, wanted an integer")
        return int(value) if whole else float(value)

    if metadata(f"{architecture}.expert_count", 0):
        raise CheckpointError("mixtures of experts are not supported")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("tensor 'token_embd.weight' is missing")
    layers, hidden, heads = number("block_count"), number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // max(heads, 1))
    context = number("context_length")
    rope_dim = number("rope.dimension_count", head_dim) if family.rotates else 0
    rotary, context = _gguf_rotary(metadata, number, architecture, factors, context)
    windows, rotations, rotaries = (), (), (rotary,)
    window = number("attention.sliding_window", 0)
    if layers <= 2**16:
        windowed = _gguf_windowed(
            metadata(f"{architecture}.attention.sliding_window_pattern", family.full_every), layers
        )
        # files of Mistral are of the llama architecture
        if window and (family.windowed or family.gguf == "llama"):
            windows = tuple(window if w else None for w in windowed)
        if family.local_base is not None:
            rotaries = (rotary, Rotary(number("rope.freq_base_swa", family.local_base, whole=False)))
            rotations = tuple(map(int, windowed))
        every = family.defaults.get("no_rope_layer_interval")
        if every:
            rotations = tuple(0 if (i + 1) % every else None for i in range(layers))
    caps = [number(f"{key}_logit_softcapping", 0.0, whole=False) or None for key in ("attn", "final")]
    if family.query_scale:
        divisor = hidden // max(heads, 1) if layers in family.gguf_wide_query else head_dim
    eps = "attention.layer_norm_rms_epsilon" if family.norm == "rms" else "attention.layer_norm_epsilon"
    return name, ModelConfig(
        architecture=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        feed_forward=number("feed_forward_length"),
        vocab=shapes["token_embd.weight"][0],
        context=context,
        rope_dim=rope_dim,
        norm_eps=number(eps, whole=False),
        rotaries=rotaries,
        rotations=rotations,
        windows=windows,
        activation=family.activation,
        parallel=family.parallel_key is not None and bool(metadata(f"{architecture}.{family.parallel_key}", True)),
        tied="output.weight" not in shapes,
        embedding_scale=_root(hidden) if family.scaled_embedding else 1.0,
        attention_scale=1 / _root(divisor) if family.query_scale else None,
        attention_soft_cap=caps[0],
        logit_soft_cap=caps[1],
        **_structure(family),
    )


def _gguf_windowed(pattern, layers):
    """Whether each layer has a window. pattern: a list that says so, or that each so many'th has none (0: all have one)."""
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise CheckpointError(f"a sliding window pattern of {len(pattern)} entries for {layers} layers")
        return [bool(windowed) for windowed in pattern]
    if not _is_number(pattern) or pattern < 0 or pattern != int(pattern):
        raise CheckpointError(f"a sliding window pattern of {pattern!r}, wanted a number of layers")
    return [bool(pattern == 0 or (i + 1) % int(pattern)) for i in range(layers)]


def _gguf_rotary(metadata, number, architecture, factors, context):
    """(Rotary, context) of a GGUF file's metadata."""
    base = number("rope.freq_base", 10000.0, whole=False)
    kind = metadata(f"{architecture}.rope.scaling.type", "none")
    if kind in (None, "none") and factors is None:
        return Rotary(base), context
    original = number("rope.scaling.original_context_length", context)
    if factors is not None:
        magnitude = number("rope.scaling.attn_factor", 1.0, whole=False)
        return Rotary(base, "factors", factors=tuple(map(float, factors)), magnitude=magnitude), min(context, original)
    factor = number("rope.scaling.factor", whole=False)
    if kind == "linear":
        return Rotary(base, "linear", factor), context
    if kind == "yarn":
        magnitude = number("rope.scaling.attn_factor", 1.0, whole=False) * _yarn_magnitude(factor, 1.0)
        fast = number("rope.scaling.yarn_beta_fast", 32.0, whole=False)
        slow = number("rope.scaling.yarn_beta_slow", 1.0, whole=False)
        rotary = Rotary(
            base, kind, factor, beta_fast=fast, beta_slow=slow, original_context=original, magnitude=magnitude
        )
        return rotary, context
    raise CheckpointError(f"rotary scaling {kind!r} is not supported; linear and yarn are")
