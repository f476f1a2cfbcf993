"""The console command: ``nbkernels generate``, ``nbkernels serve`` and ``nbkernels inspect``."""

import argparse
import os
import signal
import sys

from nbkernels import __version__
from nbkernels.launch import compile as compiling
from nbkernels.launch.device import KINDS


def build_parser():
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="nbkernels", description="CUDA kernels for transformer inference, and a small runtime, in pure Python."
    )
    parser.add_argument("--version", action="version", version=f"nbkernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="continue a prompt, or chat, with a model on disk")
    add_generate_arguments(generate)
    generate.set_defaults(run=generate_command)
    serve = commands.add_parser("serve", help="a small HTTP server with OpenAI-compatible endpoints")
    add_serve_arguments(serve)
    serve.set_defaults(run=serve_command)
    inspect = commands.add_parser("inspect", help="what an operation's kernels do, line by line, without a GPU")
    inspect.add_argument("operation", help="softmax, attention, decode, int8_matmul, …")
    inspect.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    inspect.add_argument("--arch", default="sm_90a", help="sm_80, sm_86, sm_89 or sm_90a (default)")
    inspect.add_argument("--ptx", action="store_true", help="print the compiled PTX in place of the counts")
    inspect.set_defaults(run=inspect_command)
    return parser


def add_generate_arguments(parser):
    """The arguments of ``generate``."""
    parser.add_argument("prompt", nargs="?", help="text to continue; read from standard input where it is left out")
    parser.add_argument("--model", metavar="PATH", help="a GGUF file (default: the demo's SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--chat", action="store_true", help="a conversation: the prompt is the first message, or type them"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message for --chat")
    add_load_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--min-p", type=float, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--no-summary", action="store_true", help="print the text alone")


def add_load_arguments(parser):
    """Where a model runs and in which form, for ``load``."""
    parser.add_argument("--device", choices=KINDS, default=os.environ.get("NBKERNELS_DEVICE") or "auto")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="default: bfloat16 on a GPU, else float32"
    )
    parser.add_argument(
        "--quantize",
        choices=("int8", "int8-rows", "int8-activations"),
        help="matrices in int8: a scale a group of 32, a scale a row, or that with activations in int8 too",
    )


def add_serve_arguments(parser):
    """The arguments of ``serve``."""
    parser.add_argument("model", metavar="MODEL", help="a model that nbkernels.load takes")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=int, default=8000, metavar="N")
    parser.add_argument("--name", help="what clients call the model (default: the file's name)")
    add_load_arguments(parser)
    parser.add_argument("--max-batch", type=int, default=64, metavar="N", help="requests that are decoded at once")
    parser.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that may wait")
    parser.add_argument(
        "--max-prompt", type=int, metavar="N", help="tokens of a prompt (default: what the context holds)"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        default=512,
        metavar="N",
        help="prompts are read, and shared, in chunks of so many",
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a prompt and its text (default: the model's)"
    )


def serve_command(options):
    """Load a model and serve it until interrupted. Returns the exit status."""
    from nbkernels.model.engine import Engine
    from nbkernels.model.generation import load
    from nbkernels.server import serve

    if sys.stderr.isatty():
        compiling.announce = _say_compiling
    model = load(options.model, device=options.device, dtype=options.dtype, quantize=options.quantize)
    names = ("max_batch", "max_queue", "max_prompt", "prefill_tokens", "context")
    limits = {name: getattr(options, name) for name in names}
    engine = Engine(model, **limits)
    serve(engine, name=options.name or os.path.basename(options.model), host=options.host, port=options.port)
    return 0


def generate_command(options):
    """Load a model and stream what it says to standard output; a summary goes to standard error. Returns the exit status."""
    from nbkernels.model import demo_model
    from nbkernels.model.generation import load
    from nbkernels.model.sampling import SamplingOptions

    interactive = options.chat and options.prompt is None and sys.stdin.isatty()
    sampling = {
        name: getattr(options, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    }
    SamplingOptions(**sampling)  # a wrong option is told before a model is loaded
    path = options.model or demo_model.path()
    if options.model is None and not path.exists():
        raise FileNotFoundError(
            f"no --model was given and the demo's is not at {path}: run python scripts/fetch_model.py"
        )
    if sys.stderr.isatty():
        compiling.announce = _say_compiling
    prompt = options.prompt
    if prompt is None and not interactive:
        # the line end that a shell's echo adds is not meant
        prompt = sys.stdin.read().removesuffix("\n")
    model = load(path, device=options.device, dtype=options.dtype, quantize=options.quantize)
    settings = {**sampling, "max_new_tokens": options.max_new_tokens, "stop": tuple(options.stop), "stream": True}
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if interactive:
        return _converse(model, messages, settings, options)
    if options.chat:
        prompt = [*messages, {"role": "user", "content": prompt}]
    generation = _stream(model.generate(prompt, **settings))
    if not options.no_summary:
        _summarise(generation.statistics)
    return 0


def inspect_command(options):
    """Print what each source line of an operation's kernels did on the emulator, or their PTX. Returns the exit status."""
    from nbkernels.profiling.inspect import launches, ptx_of

    if options.ptx:
        for text in ptx_of(options.operation, dtype=options.dtype, arch=options.arch):
            print(text)
        return 0
    for plan, report in launches(options.operation, dtype=options.dtype, arch=options.arch):
        print(f"grid {plan.grid}, block {plan.block}, {plan.shared_bytes} bytes of dynamic shared memory")
        report.print()
    return 0


def _say_compiling(name):
    """One line on the terminal that the next one overwrites: the first run on a GPU compiles for some seconds."""
    shown = name.removesuffix("_kernel")
    print(f"\r\033[Kcompiling {shown} (once; kept for the next run)\r", end="", file=sys.stderr, flush=True)


def _stream(generation):
    for number, piece in enumerate(generation):
        if number == 0 and compiling.announce is not None:
            print("\033[K", end="", file=sys.stderr, flush=True)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return generation


def _converse(model, messages, settings, options):
    """Read messages and answer them until the input ends."""
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        generation = _stream(model.generate(messages, **settings))
        messages.append({"role": "assistant", "content": generation.text})
        if not options.no_summary:
            _summarise(generation.statistics)


def _summarise(statistics):
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("device", statistics.device)
    table.add_row(
        "prompt", f"{statistics.prompt_tokens} tokens, first token after {statistics.first_token_seconds:.2f} s"
    )
    table.add_row("decode", f"{statistics.new_tokens} tokens, {statistics.tokens_per_second:.1f} tokens/s")
    table.add_row("memory", f"{statistics.memory_bytes / 2**20:.0f} MiB")
    Console(stderr=True, highlight=False).print(table, style="dim")


def main(arguments=None):
    """Entry point of the console command. Returns the exit status: 2 for what the user can mend, 130 after Ctrl-C."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader has gone; Python must not try to flush into the pipe when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"nbkernels: {_explain(error)}", file=sys.stderr)
        return 2


def _explain(error):
    if isinstance(error, ModuleNotFoundError) and error.name in ("tokenizers", "gguf", "jinja2", "safetensors"):
        return f"the package {error.name!r} is missing: pip install 'nbkernels[llm]'"
    if isinstance(error, ModuleNotFoundError) and error.name in ("starlette", "uvicorn"):
        return f"the package {error.name!r} is missing: pip install 'nbkernels[serve]'"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
