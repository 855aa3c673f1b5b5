"""The ``guarddcp`` command: arguments, exit codes and error messages.

Exit codes: 0 fine, 1 a promise violated or a checkpoint corrupt, 2 wrong usage. What a subcommand needs is imported
when it runs, so ``guarddcp --help`` costs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from guarddcp.errors import GuardError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except GuardError as error:
        print(f"guarddcp: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (OSError, ImportError) as error:  # a file or server that is not there, a filesystem's missing library
        print(f"guarddcp: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="guarddcp",
        description="Certified compression of Adam moments in torch.distributed.checkpoint checkpoints.",
        epilog="Exit codes: 0 fine, 1 promise violated or checkpoint corrupt, 2 wrong usage.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_path_command(commands, "inspect", "show what a checkpoint holds, per parameter and in total", _inspect)
    _add_path_command(commands, "verify", "check every byte of a checkpoint and prove its certificates again", _verify)
    _add_bench(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train, save, restore on another number of ranks, and measure the promise (about a minute)",
        description="Train a small GPT on 2 ranks, restore it on 3 ranks and on 1, and measure the promise.",
    )
    demo.add_argument("--keep", metavar="DIR", help="keep both checkpoints in DIR (must not hold any yet)")
    demo.add_argument("--tolerance", type=float, default=0.01, metavar="T", help="in units of lr (0.01)")
    demo.add_argument(
        "--horizon", type=_horizon, default="all", metavar="H", help='later steps covered: "all" or a number'
    )
    demo.add_argument(
        "--steps", type=_positive_int, default=120, metavar="N", help="training steps before the save (120)"
    )
    demo.add_argument("--more-steps", type=_positive_int, default=50, metavar="N", help="steps after the restore (50)")
    demo.add_argument(
        "--size", choices=("tiny", "demo", "full"), default="demo", help="model size (demo: 1.9 M parameters)"
    )
    demo.add_argument("--json", action="store_true", help="print the result as JSON")
    demo.set_defaults(run=_demo)


def _add_path_command(commands: Any, name: str, text: str, run: Any) -> None:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("path", metavar="PATH", help="checkpoint: a folder or any fsspec URL")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--storage-options", type=_json_object, default=None, metavar="JSON", help="options for the file system"
    )
    command.set_defaults(run=run)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure size and speed", description="Measure size and speed.")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    codec = kinds.add_parser(
        "codec",
        help="encode and decode real Adam moments",
        description="Encode and decode real Adam moments. Without a file, train the demo's GPT first.",
    )
    codec.add_argument("--state", action="append", default=[], metavar="FILE", help="a saved state; may be repeated")
    codec.add_argument("--json", action="store_true", help="print JSON")
    codec.set_defaults(run=_bench_codec)


def _demo(arguments: argparse.Namespace) -> int:
    from guarddcp.config import Guard

    try:
        guard = Guard(tolerance=arguments.tolerance, horizon=arguments.horizon)
    except ValueError as error:
        print(f"guarddcp demo: error: {error}", file=sys.stderr)
        return 2
    from guarddcp.cli.demo import run_demo

    return run_demo(
        guard=guard,
        keep=arguments.keep,
        steps=arguments.steps,
        more=arguments.more_steps,
        size=arguments.size,
        as_json=arguments.json,
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from guarddcp.cli.show import run_inspect

    return run_inspect(arguments.path, as_json=arguments.json, storage_options=arguments.storage_options)


def _verify(arguments: argparse.Namespace) -> int:
    from guarddcp.cli.show import run_verify

    return run_verify(arguments.path, as_json=arguments.json, storage_options=arguments.storage_options)


def _bench_codec(arguments: argparse.Namespace) -> int:
    from guarddcp.cli.bench import run_bench_codec

    return run_bench_codec(arguments.state, as_json=arguments.json)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text}")
    return int(text)


def _horizon(text: str) -> Literal["all"] | int:
    return "all" if text == "all" else _positive_int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value
