"""Memory that the ranks of one host map, exchanges through it, and collectives through it.

memory: torch gives it -> arena: flags, slots and signals in it -> p2p: the transport over an arena;
low_contention: all-gather and reduce-scatter over another
"""
