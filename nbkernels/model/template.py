"""Renders chat templates in a process of its own: a template is a program from a stranger, and may loop or grow for ever.

Run as a script (``chat`` starts it, and ends it when it takes too long) it reads a line of JSON {"template", "variables"} and
writes a line {"text"} or {"error"}. Inside, jinja2's immutable sandbox keeps the template from Python's attributes; its
memory and the length of its output are limited. Nothing of this package is imported, so that the process is small.
"""

import json
import sys

MEMORY = 2**30  # bytes of address space
MOST_TEXT = 2**24  # characters of output


def environment():
    """The sandbox, with what published templates expect in it."""
    import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(text):
        raise TemplateError(text)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    made.filters["tojson"] = tojson
    return made


def render(sandbox, template, variables):
    """The template's text; an error of any kind is a ValueError that tells it."""
    pieces, length = [], 0
    try:
        for piece in sandbox.from_string(template).generate(**variables):
            length += len(piece)
            if length > MOST_TEXT:
                raise ValueError(f"it writes more than {MOST_TEXT} characters")
            pieces.append(piece)
    except MemoryError:
        raise ValueError(f"it takes more than {MEMORY >> 20} MiB") from None
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return "".join(pieces)


def serve():
    """Answer the lines of standard input until it ends."""
    sandbox = environment()
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # not a Unix system, or one that does not allow it
        pass
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"text": render(sandbox, asked["template"], asked["variables"])}
        except ValueError as error:
            answer = {"error": str(error)[:1000]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
