"""Python programs as processes of their own, forked from one that has imported what they all need.

A new interpreter takes seconds of a core to import torch and its compiler before it does anything;
a fork has them. Everything else is as for a new one: arguments, environment, folder, exit status.
Whether a program imports what it needs is seen where it runs in a new interpreter, once each.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# `torch.optim.Optimizer` imports torch's compiler at the first construction.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "kernels", "pytest")

# Reads a job per line; answers with the process and, when that has ended, with its exit status.
SERVER = """
import gc, importlib, json, os, runpy, sys

for name in sys.argv[1:]:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # no collection of a fork walks, and so copies, what all of them share
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

for number, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
os.environ.clear()
os.environ.update(job["environment"])
os.chdir(job["folder"])
program, *sys.argv = job["arguments"]
if program == "-c":
    code, sys.argv[0] = sys.argv[0], "-c"
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
elif program == "-m":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv.insert(0, program)
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")
"""


class Forks:
    """Runs one program at a time."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *PRELOADED],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer that is not read yet stays where `select` sees it
        )

    def run(
        self,
        *arguments: object,
        folder: Path = Path(),
        environment: Mapping[str, str] = os.environ,
        timeout: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        """``python *arguments`` with its output captured.

        Args:
            arguments: A script, ``-m`` and a module or ``-c`` and code, and what follows it.
            folder: Working directory; by default this process's, like
            environment: all of its variables.
            timeout: Seconds after which it is killed.

        Raises:
            subprocess.TimeoutExpired: It was.
        """
        command = [*map(str, arguments)]
        with tempfile.TemporaryDirectory() as place:
            outputs = [Path(place, name) for name in ("stdout", "stderr")]
            job = {
                "arguments": command,
                "folder": str(folder.resolve()),
                "environment": dict(environment),
            }
            job |= {path.name: str(path) for path in outputs}
            self.server.stdin.write(json.dumps(job).encode() + b"\n")
            process = int(self.server.stdout.readline())
            with selectors.DefaultSelector() as selector:
                selector.register(self.server.stdout, selectors.EVENT_READ)
                late = not selector.select(timeout)
            if late:
                os.kill(process, signal.SIGKILL)
            status = int(self.server.stdout.readline())
            stdout, stderr = (path.read_text() for path in outputs)
        if late:
            raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
        return subprocess.CompletedProcess(command, status, stdout, stderr)

    def pytest(
        self, *arguments: object, folder: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """pytest in a folder, without the options of this run, such as workers of pytest-xdist."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        options = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
        return self.run(*options, *arguments, folder=folder, environment=kept | environment)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()
