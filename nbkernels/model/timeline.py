"""A model's decode step and prefill as timelines: which layer and which kernel the time goes to."""

import numpy as np

from nbkernels.launch.overlap import overlapping
from nbkernels.model import backend
from nbkernels.model.session import PREFILL_TOKENS, Session
from nbkernels.profiling.timeline import Mark, measure

CONTEXT = 512  # tokens before the decode step


class _Marked(list):
    """Layers that tell a Mark which of them is being walked."""

    mark = Mark()

    def __iter__(self):
        for number, layer in enumerate(super().__iter__()):
            self.mark.layer = number
            yield layer
        self.mark.layer = None


def timelines(model, *, context=CONTEXT):
    """[Timeline of a decode step behind ``context`` tokens, Timeline of a prefill of as many, at most PREFILL_TOKENS].

    ValueError where the context does not fit the model's, or the model is not on a GPU.
    """
    if model.device.kind != "cuda":
        raise ValueError(f"model: on {model.device.name}; a timeline needs a GPU")
    if not 1 <= context < model.config.context:
        raise ValueError(f"context: {context} tokens, wanted 1 to {model.config.context - 1}")
    ids = np.resize(np.arange(model.config.vocab, dtype=np.int32), context)
    transformer, layers = model.transformer, model.transformer.layers
    with model.on_device():
        session = Session(transformer, context + 1)
        sequence = session.sequences[0]
        marked = _Marked(layers)
        marked.mark = mark = Mark()
        transformer.layers = marked
        try:
            session.start(ids)

            def step(placed, length):
                def back():
                    session.cache.truncate(sequence, length)
                    session.cache.reserve(session.sequences, placed.shape[1])

                def work():
                    hidden = transformer.hidden(placed, session.cache, session.sequences)
                    transformer.logits(hidden[:, -1], out=session.logits)

                def overlapped():
                    with overlapping():
                        work()

                return {"work": work, "overlapped_work": overlapped, "before": back, "mark": mark}

            decode = step(session.token.reshape(1, 1), context)
            found = [measure(f"decode step behind {context} tokens", **decode)]
            tokens = min(context, PREFILL_TOKENS)
            prefill = step(backend.place(ids[None, :tokens]), 0) | {"overlapped_work": None}
            found.append(measure(f"prefill of {tokens} tokens", **prefill))
        finally:
            transformer.layers = layers
    return found
