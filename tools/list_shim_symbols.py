"""Print the stable-ABI functions that the installed torch declares, one per line.

The committed lists in tests/abi are outputs of this script, one torch release each:
``python tools/list_shim_symbols.py > tests/abi/torch-2.11-symbols.txt`` beside torch 2.11.
"""

from __future__ import annotations

import sys

from local_build.errors import BuildError
from local_build.shim_symbols import declared_symbols
from local_build.toolchain import find_torch


def main() -> int:
    try:
        torch = find_torch()
        names = sorted(declared_symbols(torch.include))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    how = "functions declared with AOTI_TORCH_EXPORT, by list_shim_symbols.py"
    print(f"# torch {torch.version}: {how}")
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
