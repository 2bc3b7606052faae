"""The one exception of the local build."""


class BuildError(Exception):
    """A build that cannot go on; the message names the cause and the remedy."""
