"""What `get_kernel` finds in a checkout none of whose built variants serves: what to do about it.

The client takes the checkout itself for a variant, as its root has a metadata.json, once it has
found no other; what that file names is this module.
"""

from .error_message import error_message, here

raise ImportError(error_message(*here()))
