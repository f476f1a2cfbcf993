"""Chat messages to token ids, through the template that a checkpoint carries.

A template is data from a stranger: it runs in jinja2's immutable sandbox. Control tokens that stand in a message's content stay
text: they are hidden from the tokenizer behind placeholders while the template is cut at its own control tokens.
"""

from nbkernels.model.config import CheckpointError

ROLES = ("system", "user", "assistant", "tool")


def check_messages(messages):
    """Raise TypeError or ValueError unless messages is a list of {"role": …, "content": text}."""
    if not messages:
        raise ValueError("messages: an empty list, wanted at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise TypeError(f"messages[{i}]: {message!r}, wanted a dict with 'role' and 'content'")
        if not isinstance(message["content"], str):
            raise TypeError(f"messages[{i}]['content']: {type(message['content']).__name__}, wanted a string")
        if message["role"] not in ROLES:
            raise ValueError(f"messages[{i}]['role']: {message['role']!r}, wanted one of {', '.join(ROLES)}")


def render(template, messages, names):
    """The text that a chat template makes of messages, ending where the assistant is to speak."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text):
        raise TemplateError(text)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    try:
        compiled = environment.from_string(template)
        return compiled.render(
            messages=messages, add_generation_prompt=True, **{"bos_token": "", "eos_token": "", **names}
        )
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def encode_chat(tokenizer, template, messages):
    """Token ids of a conversation, ending where the assistant is to speak.

    messages: a list of {"role": …, "content": …}. CheckpointError where the model has no template, TypeError or ValueError
    for messages that are none or that the template refuses.
    """
    check_messages(messages)
    if not template:
        raise CheckpointError("this model carries no chat template; pass a prompt string")
    placeholders = {}
    everything = "".join(m["content"] for m in messages)
    # private-use characters that nobody typed
    unused = (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in everything)
    for token in sorted(tokenizer.control, key=len, reverse=True):
        if token in everything:
            placeholders[next(unused)] = token
    hidden = []
    for message in messages:
        content = message["content"]
        for placeholder, token in placeholders.items():
            content = content.replace(token, placeholder)
        hidden.append({**message, "content": content})
    text = render(template, hidden, tokenizer.names)
    return tokenizer.encode(text, control=True, literal=placeholders)
