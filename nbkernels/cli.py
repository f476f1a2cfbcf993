"""The console command: ``nbkernels generate``, ``serve``, ``profile``, ``inspect``, ``learn`` and their like."""

import argparse
import json
import os
import signal
import socket
import sys

from nbkernels import __version__
from nbkernels.launch import compile as compiling
from nbkernels.launch.device import KINDS, DeviceError
from nbkernels.learn import add_learn_arguments, learn_command

QUANTIZATIONS = ("int8", "int8-rows", "int8-activations")


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
    add_serve_command(commands)
    inspect = commands.add_parser("inspect", help="what an operation's kernels do, line by line, without a GPU")
    inspect.add_argument(
        "operation", help="softmax, attention, decode, int8_matmul, …, or a kernel of yours: path.py:function"
    )
    inspect.add_argument(
        "--shape", metavar="AxBx…", help="the extents (default: a small shape, which the emulator runs)"
    )
    inspect.add_argument("--signature", metavar="TYPES", help="of your kernel's arguments: 'float32[::1], int32'")
    inspect.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="float32, float16 or bfloat16 (default)")
    inspect.add_argument("--arch", default="sm_90a", help="sm_80, sm_86, sm_89, sm_90a (default), sm_100a, …")
    views = inspect.add_mutually_exclusive_group()
    views.add_argument("--ptx", action="store_true", help="the PTX, beside the Python line it came from")
    views.add_argument("--sass", action="store_true", help="the machine code, with live registers")
    views.add_argument("--source", action="store_true", help="a line of Python a row, with all that is known of it")
    inspect.set_defaults(run=inspect_command)
    learn = commands.add_parser("learn", help="lessons in CUDA, with or without a GPU: list, run, check an exercise")
    add_learn_arguments(learn)
    learn.set_defaults(run=learn_command)
    convert = commands.add_parser("convert", help="write a checkpoint quantised, which loads faster, or as safetensors")
    convert.add_argument("model", metavar="MODEL", help="a Hugging Face folder or a GGUF file")
    convert.add_argument("out", metavar="OUT", help="a new folder")
    convert.add_argument(
        "--quantize",
        choices=("int8", "int8-rows", "int8-activations"),
        help="as of generate; without it OUT is a plain Hugging Face folder",
    )
    convert.add_argument("--device", choices=KINDS, default=os.environ.get("NBKERNELS_DEVICE") or "auto")
    convert.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of what is not quantised")
    convert.set_defaults(run=convert_command)
    add_profile_command(commands)
    tune = commands.add_parser(
        "tune", help="measure an operation's launches on this GPU, and keep the fastest for later runs"
    )
    tune.add_argument("operation", nargs="?", help="matmul or int8_matmul (default: both)")
    tune.add_argument("--shape", metavar="AxBx…", help="one shape (default: some usual ones)")
    tune.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="float16 or bfloat16 (default)")
    tune.set_defaults(run=tune_command)
    doctor = commands.add_parser(
        "doctor", help="what is wrong with this installation, or what a checkpoint is, and what mends it"
    )
    doctor.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face folder, a GGUF file or what convert wrote"
    )
    doctor.set_defaults(run=doctor_command)
    return parser


def add_profile_command(commands):
    """``profile``."""
    profile = commands.add_parser(
        "profile", help="which limit an operation stands at, and how its launches fill the card"
    )
    profile.add_argument("operation", nargs="?", help="softmax, attention, decode, matmul, …")
    profile.add_argument("--model", metavar="PATH", help="a whole model: a decode step and a prefill, on a GPU")
    profile.add_argument("--quantize", choices=QUANTIZATIONS, help="of the model's matrices, as for generate")
    profile.add_argument("--context", type=int, default=512, metavar="N", help="tokens before the model's decode step")
    profile.add_argument("--trace", metavar="FILE", help="write the model's timelines for chrome://tracing or Perfetto")
    profile.add_argument("--shape", metavar="AxBx…", help="the extents, as 16384x4096 (default: a usual shape)")
    profile.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="float32, float16 or bfloat16 (default)")
    profile.add_argument(
        "--gpu", metavar="NAME", help="judge by a card's published figures: A100, H100, H200, RTX 4090"
    )
    profile.add_argument("--json", action="store_true", help="print JSON in place of tables")
    profile.add_argument("--plot", metavar="FILE.svg", help="draw a roofline")
    profile.add_argument("--no-peers", action="store_true", help="time nothing but ours")
    profile.set_defaults(run=profile_command)


def add_generate_arguments(parser):
    """The arguments of ``generate``."""
    parser.add_argument("prompt", nargs="?", help="text to continue; read from standard input where it is left out")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder or a GGUF file (default: the demo's SmolLM2-135M-Instruct)",
    )
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
        choices=QUANTIZATIONS,
        help="matrices in int8: a scale a group of 32, a scale a row, or that with activations in int8 too",
    )


SERVE_DESCRIPTION = """\
An HTTP server for one model, with OpenAI's endpoints:

  POST /v1/chat/completions    messages, through the model's template
  POST /v1/completions         prompts: strings or token ids
  GET  /v1/models, /health

Many requests are decoded at once; what one says does not depend on the others. There is neither a password nor
encryption: it listens to this machine alone unless --host says otherwise. Ctrl-C lets texts under way end first.
"""
SERVE_EXAMPLE = """\
for example:
  nbkernels serve --port 8000
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "prompt": "The capital of France is", "temperature": 0}'
"""


def add_serve_command(commands):
    """``serve``."""
    parser = commands.add_parser(
        "serve",
        help="a small HTTP server with OpenAI-compatible endpoints",
        description=SERVE_DESCRIPTION,
        epilog=SERVE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder or a GGUF file (default: the demo's SmolLM2-135M-Instruct)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, metavar="N", help="default: 8000")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer to this name too, such as a proxy's (default: to loopback's names on loopback, elsewhere to any)",
    )
    parser.add_argument("--name", help="what clients call the model (default: the file's name)")
    add_load_arguments(parser)
    parser.add_argument(
        "--cache-dtype", choices=("int8",), help="of keys and values; twice as many tokens fit (default: the model's)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of a prompt and its text (default: the model's)"
    )
    parser.add_argument(
        "--max-prompt", type=int, metavar="N", help="tokens of a prompt (default: what the context holds)"
    )
    parser.add_argument(
        "--max-batch", type=int, default=64, metavar="N", help="requests that are decoded at once (default: 64)"
    )
    parser.add_argument(
        "--max-queue", type=int, default=1024, metavar="N", help="requests that may wait, beyond it 429 (default: 1024)"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        default=512,
        metavar="N",
        help="prompts are read, and shared, in chunks of so many, a multiple of 64 (default: 512)",
    )
    parser.set_defaults(run=serve_command)


def _port(text):
    if not text.isdecimal() or not int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text}, wanted 0 to 65535")
    return int(text)


def serve_command(options):
    """Load a model and serve it until interrupted. Returns the exit status."""
    from nbkernels.model.engine import Engine
    from nbkernels.model.loading import load
    from nbkernels.server import serve

    path = _model_path(options.model)
    _check_address(options.host, options.port)  # told before a model is loaded
    _announce_compiling()
    model = load(path, device=options.device, dtype=options.dtype, quantize=options.quantize)
    names = ("max_batch", "max_queue", "max_prompt", "prefill_tokens", "context", "cache_dtype")
    engine = Engine(model, **{name: getattr(options, name) for name in names})
    name = options.name or os.path.basename(os.path.normpath(path))
    serve(engine, name=name, host=options.host, port=options.port, allowed_hosts=options.allow_host)
    return 0


def _check_address(host, port):
    """OSError where nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            found.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen at {host}, port {port} ({error.strerror}): --host and --port name another"
        ) from error


def _model_path(given):
    """The path given, or where it is None the demo's. FileNotFoundError where that one has not been fetched."""
    from nbkernels.model import demo_model

    path = given or demo_model.path()
    if given is None and not path.exists():
        raise FileNotFoundError(
            f"no model was given and the demo's is not at {path}: run python scripts/fetch_model.py"
        )
    return path


def generate_command(options):
    """Load a model and stream what it says to standard output; a summary goes to standard error. Returns the exit status."""
    from nbkernels.model.loading import load
    from nbkernels.model.sampling import SamplingOptions

    interactive = options.chat and options.prompt is None and sys.stdin.isatty()
    sampling = {
        name: getattr(options, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    }
    SamplingOptions(**sampling)  # a wrong option is told before a model is loaded
    path = _model_path(options.model)
    _announce_compiling()
    prompt = options.prompt
    if prompt is None and not interactive:
        if sys.stdin.isatty():
            print("the prompt, ended by Ctrl-D on a line of its own:", file=sys.stderr)
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


def convert_command(options):
    """Write a checkpoint in another form. Returns the exit status."""
    import numpy as np

    from nbkernels.arrays import bfloat16
    from nbkernels.model import saved
    from nbkernels.model.loading import load, naming, open_checkpoint, read_tokenizer

    saved.check_new_folder(options.out)  # told before a model is loaded
    if options.quantize:
        model = load(options.model, device=options.device, dtype=options.dtype, quantize=options.quantize)
        saved.save(model, options.out, quantize=options.quantize)
    else:
        dtype = bfloat16 if options.dtype == "bfloat16" else np.dtype(options.dtype or "float32")
        with naming(options.model):
            checkpoint = open_checkpoint(options.model)
            saved.write_huggingface(checkpoint, read_tokenizer(checkpoint), options.out, dtype=dtype)
    print(f"wrote {options.out}")
    return 0


def _examine_checkpoint(path):
    """Print what a checkpoint is. Returns the exit status: 0 where it runs."""
    from rich.console import Console
    from rich.table import Table

    from nbkernels.model.doctor import examine

    facts, faults = examine(path)
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(name, value)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for fault in faults:
        console.print(f"does not run: {fault}")
    if not faults:
        console.print("runs")
    return 1 if faults else 0


def inspect_command(options):
    """Print what each source line of some kernels does, or their PTX or SASS. Returns the exit status."""
    from nbkernels.emulator.counters import print_table
    from nbkernels.profiling import inspect

    _announce_compiling()
    own = ".py:" in options.operation
    if not own and options.signature:
        raise ValueError("--signature is for a kernel of yours: path.py:function")
    if own:
        found = [inspect.own_kernel(options.operation, options.signature, arch=options.arch)]
    else:
        choice = {"dtype": options.dtype, "arch": options.arch, "shape": options.shape}
        if not (options.ptx or options.sass or options.source):
            done = inspect.launches(options.operation, **choice)
            _clear_announced()
            for plan, report in done:
                print(f"grid {plan.grid}, block {plan.block}, {plan.shared_bytes} bytes of dynamic shared memory")
                report.print()
            return 0
        found = inspect.kernels(options.operation, **choice, run=options.source)
    _clear_announced()
    for kernel in found:
        if options.ptx:
            print(inspect.ptx_listing(kernel))
        elif options.sass:
            print(inspect.sass_listing(kernel))
        else:
            print_table(inspect.source_table(kernel))
    return 0


def profile_command(options):
    """Profile an operation or a model and print what was found. Returns the exit status."""
    if (options.operation is None) == (options.model is None):
        raise ValueError("wanted an operation (nbkernels profile softmax) or --model PATH")
    if options.model is not None:
        return _profile_model(options)
    if options.trace:
        raise ValueError("--trace is for a whole model: --model PATH")
    if options.plot:
        _check_writable(options.plot)  # told before anything is measured
    from nbkernels.profiling.profile import profile_operation

    _announce_compiling()
    found = profile_operation(
        options.operation, shape=options.shape, dtype=options.dtype, gpu=options.gpu, peers=not options.no_peers
    )
    picture = found.svg() if options.plot else None
    _clear_announced()
    if options.json:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        found.print()
    if options.plot:
        with open(options.plot, "w") as file:
            file.write(picture)
    return 0


def tune_command(options):
    """Measure candidates on the GPU and print what was kept. Returns the exit status."""
    from nbkernels.profiling.tune import summary, tune

    if options.shape and options.operation is None:
        raise ValueError("--shape is of one operation: nbkernels tune matmul --shape …")
    found = []
    _announce_compiling()
    for choice in tune(options.operation, shape=options.shape, dtype=options.dtype):
        found.append(choice)
        _clear_announced()
        timed = choice.best_timing
        print(
            f"{choice.heuristic.factory.__name__.removesuffix('_kernel')} {choice.call}: {timed.microseconds:.2f} µs "
            f"({timed.low:.2f} to {timed.high:.2f}), {choice.gain:.1%} less than the heuristic's "
            f"{choice.heuristic_timing.microseconds:.2f}, which took {choice.ratio:.3f} times as long; "
            f"{choice.tried} tried, {choice.stopped} stopped early",
            flush=True,
        )
    print(summary(found) if found else "nothing to choose: on this GPU other kernels serve these shapes")
    return 0


def doctor_command(options):
    """Print what is right and wrong with the installation, or a checkpoint. Returns the exit status, 1 for what is wrong."""
    if options.model is not None:
        return _examine_checkpoint(options.model)
    from nbkernels.profiling.doctor import examine, report

    return report(examine())


def _profile_model(options):
    from nbkernels.model.loading import load
    from nbkernels.model.timeline import timelines
    from nbkernels.profiling.timeline import chrome_trace

    found = timelines(load(options.model, device="cuda", quantize=options.quantize), context=options.context)
    if options.json:
        print(json.dumps([timeline.as_dict() for timeline in found], indent=1))
    else:
        for timeline in found:
            timeline.print()
    if options.trace:
        with open(options.trace, "w") as file:
            file.write(chrome_trace(found))
    return 0


def _say_compiling(name):
    """One line on the terminal that the next one overwrites: the first run on a GPU compiles for some seconds."""
    shown = name.removesuffix("_kernel")
    print(f"\r\033[Kcompiling {shown} (once; kept for the next run)\r", end="", file=sys.stderr, flush=True)


def _check_writable(path):
    """OSError where a file cannot be written. One that is not there yet is not left behind."""
    there = os.path.exists(path)
    with open(path, "a"):
        pass
    if not there:
        os.remove(path)


def _announce_compiling():
    if sys.stderr.isatty():
        compiling.announce = _say_compiling


def _clear_announced():
    if compiling.announce is not None:
        print("\033[K", end="", file=sys.stderr, flush=True)


def _stream(generation):
    for number, piece in enumerate(generation):
        if number == 0:
            _clear_announced()
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return generation


def _converse(model, messages, settings, options):
    """Read messages and answer them until the input ends."""
    print("Ctrl-D ends the conversation", file=sys.stderr)
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
        _clear_announced()
        print(f"nbkernels: {_explain(error, hasattr(options, 'device'))}", file=sys.stderr)
        return 2


def _explain(error, device_option):
    if type(error).__name__ == "DynamicLibNotFoundError":  # of cuda.pathfinder
        return f"{compiling.NO_COMPILER}; {str(error).partition(':')[0]}"
    if isinstance(error, DeviceError):
        # the messages speak of the argument that Python's callers have
        other = ", or use device='cpu'"
        if device_option:
            return str(error).replace(other, ", or use --device cpu")
        return str(error).replace(other, "; this command measures on a GPU")
    if isinstance(error, ModuleNotFoundError) and error.name in ("tokenizers", "gguf", "jinja2", "safetensors"):
        return f"the package {error.name!r} is missing: pip install 'nbkernels[llm]'"
    if isinstance(error, ModuleNotFoundError) and error.name in ("starlette", "uvicorn"):
        return f"the package {error.name!r} is missing: pip install 'nbkernels[serve]'"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
