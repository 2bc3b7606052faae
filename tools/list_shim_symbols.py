"""Print the stable-ABI functions that the installed torch declares, one per line.

The committed lists in tests/abi are outputs of this script, one torch release each:
``python tools/list_shim_symbols.py > tests/abi/torch-2.11-symbols.txt`` beside torch 2.11.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from local_build.errors import BuildError
from local_build.shim_symbols import declared_symbols
from local_build.toolchain import find_torch


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--include", type=Path, help="include folder of an unpacked torch instead of the installed"
    )
    parser.add_argument("--version", help="its version, with --include")
    options = parser.parse_args(arguments)
    try:
        if (options.include is None) != (options.version is None):
            raise BuildError("--include and --version go together")
        if options.include is not None:
            include, version = options.include, options.version
        else:
            torch = find_torch()
            include, version = torch.include, torch.version
        names = sorted(declared_symbols(include))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"# torch {version}: functions declared with AOTI_TORCH_EXPORT, by list_shim_symbols.py")
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
