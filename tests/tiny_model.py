"""A tiny random llama in a GGUF file: what the checkpoint and generation tests read, and spoil."""

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS, CONTEXT = 32, 4, 2, 8, 64, 2, 64
# single bytes as a byte-level vocabulary writes them, a few merges, and control tokens at the end
LETTERS = [*"abcdefghijklmnopqrstuvwxyz.,!?<>|_0123456789", "Ġ", "Ċ", "Ã", "©", "ł", "Ģ"]
MERGES = ["t h", "th e", "Ġ a", "Ã ©"]
MERGED = ["th", "the", "Ġa", "Ã©"]
CONTROL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
TOKENS = LETTERS + MERGED + CONTROL
VOCAB = len(TOKENS)
BOS, START, END = (TOKENS.index(t) for t in CONTROL)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tensors(seed=0, vocab=VOCAB, tied=True):
    """Name -> float32 array of every weight, with shapes as GGUF stores them (outermost first)."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    result = {"token_embd.weight": matrix(vocab, HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    if not tied:
        result["output.weight"] = matrix(vocab, HIDDEN)
    for i in range(LAYERS):
        layer = {
            "attn_norm": np.ones(HIDDEN, np.float32),
            "attn_q": matrix(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": matrix(HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": np.ones(HIDDEN, np.float32),
            "ffn_gate": matrix(FEED_FORWARD, HIDDEN),
            "ffn_up": matrix(FEED_FORWARD, HIDDEN),
            "ffn_down": matrix(HIDDEN, FEED_FORWARD),
        }
        result.update({f"blk.{i}.{name}.weight": value for name, value in layer.items()})
    return result


def write(path, *, arrays=None, architecture="llama", add_bos=False, pre="gpt-2", template=TEMPLATE, extra=None):
    """Write a GGUF file; returns its path. extra: a function that may add to the writer."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3 if t in CONTROL else 1 for t in TOKENS])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(add_bos)
    if template:
        writer.add_chat_template(template)
    for name, array in (tensors() if arrays is None else arrays).items():
        writer.add_tensor(name, array)
    if extra:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
