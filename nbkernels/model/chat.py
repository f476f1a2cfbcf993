"""Chat messages to token ids, through the template that a checkpoint carries.

A template is data from a stranger: it runs in jinja2's immutable sandbox, in a process of its own that is ended when it takes
too long (``template``). Control tokens that stand in a message's content stay
text: they are hidden from the tokenizer behind placeholders while the template is cut at its own control tokens.
"""

import atexit
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from nbkernels.model.config import CheckpointError

TEMPLATE_SECONDS = 10.0  # a rendering takes a thousandth; starting the process some tenths
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


class _Worker:
    """The process that renders templates: started when it is first needed, ended when a template takes too long."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process = None

    def ask(self, request, seconds):
        """The worker's answer to a request, a dict. TimeoutError where it takes longer, OSError where it dies."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                # -P: the script's folder, whose files have common names, is not searched for modules
                command = [sys.executable, "-P", str(Path(__file__).with_name("template.py"))]
                pipe = subprocess.PIPE
                self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            late = threading.Timer(seconds, self.process.kill)
            late.start()
            started = time.monotonic()
            try:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
            finally:
                late.cancel()
            if not line:
                self.end()
                if time.monotonic() - started >= seconds:
                    raise TimeoutError
                raise OSError("the process that renders it ended")
            return json.loads(line)

    def end(self):
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


_worker = _Worker()
atexit.register(_worker.end)


def render(template, messages, names):
    """The text that a chat template makes of messages, ending where the assistant is to speak.

    names: what the template calls special tokens, "bos_token" and such -> their text. ValueError for what the template refuses,
    and where it is stopped because it takes longer than TEMPLATE_SECONDS or more memory than it may.
    """
    import jinja2  # noqa: F401  so that a missing package is told as such

    variables = {"bos_token": "", "eos_token": "", **names, "messages": messages, "add_generation_prompt": True}
    try:
        answer = _worker.ask({"template": template, "variables": variables}, TEMPLATE_SECONDS)
    except TimeoutError:
        raise ValueError(f"the model's chat template was stopped after {TEMPLATE_SECONDS} seconds") from None
    except OSError as error:
        raise ValueError(f"the model's chat template was stopped: {error}") from None
    if "error" in answer:
        raise ValueError(f"the model's chat template refuses these messages: {answer['error']}")
    return answer["text"]


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
