"""Adapters to other libraries, which are imported only when a function here is called."""
