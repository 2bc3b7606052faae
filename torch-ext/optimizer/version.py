"""The package's version, and what is said where `get_kernel` asks a checkout for another one.

The client compares `version` with branches of the Hub, but with nothing in a folder that
LOCAL_KERNELS names. So its call is looked at here, at the import. Of a client that is written
otherwise nothing is found, and nothing said.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__version__ = "1"  # as in build.toml


def check_asked_version() -> None:
    """Raise ValueError if a `get_kernel` that imports this checkout asks for another version."""
    local = dict(
        e.split("=", 1) for e in os.environ.get("LOCAL_KERNELS", "").split(":") if "=" in e
    )
    frame = sys._getframe()
    while frame := frame.f_back:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) != (
            "kernels.load",
            "get_kernel",
        ):
            continue
        repo, asked = (frame.f_locals.get(name) for name in ("repo_id", "version"))
        # A repository that is not this checkout only depends on it.
        checkout = repo in local and Path(local[repo]).resolve() in Path(__file__).resolve().parents
        if checkout and asked is not None and str(asked) != __version__:
            raise ValueError(
                f"version={asked} of {repo} was asked for, and {local[repo]}, which LOCAL_KERNELS "
                f"names, has version {__version__}. Write version={__version__}; or check out and "
                "build the other one, or unset LOCAL_KERNELS to load it from the Hub"
            )


check_asked_version()
