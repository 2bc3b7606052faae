"""What the command lines of the examples have in common."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from demo.config import DemoError

INTERRUPTED = 130  # exit status, as the shell gives it for Ctrl-C


def positive_integer(text: str) -> int:
    """The type of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def add_decoder(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options of a `Decoder` and of its batches; `defaults` where they are other ones."""
    defaults = {"layers": 4, "channels": 128, "heads": 4, "batch": 8, "context": 128} | defaults
    words = {"batch": "sequences per step, of all ranks", "context": "tokens per sequence"}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=words.get(name))


def add_corpus(parser: argparse.ArgumentParser, out_dir: str) -> None:
    """Options for where the text is, and where results go."""
    words = "folder of Python files; default: the standard library's"
    parser.add_argument("--corpus", type=Path, help=words)
    parser.add_argument("--out-dir", type=Path, default=Path(out_dir))


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish to stop; a second one stops at once."""

    def __enter__(self) -> StopSignals:
        self.received = False
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.previous = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self.received = True
        signal.signal(number, self.previous[number])


def exit_status(script: str, run: Callable[[], int], interrupted: str = "stopped") -> int:
    """What `run` returns; what the person at the terminal can put right is one line, and 2."""
    try:
        return run()
    except DemoError as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{script}: {error}; `make setup` installs what it needs", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{script}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
