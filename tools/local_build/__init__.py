"""The steps of ``tools/build_local.py``, one module each.

project  build.toml and git -> what is to be built, under which name
toolchain  which compilers and which torch build it
compilation  sources -> objects (cached) -> one shared library
package  library + Python sources -> ``build/<variant>/``
audit  the binary rules that every shared library must satisfy
"""


class BuildError(Exception):
    """A build that cannot go on; the message names the cause and the remedy."""
