"""Who owns which matrix, and how its pieces travel there and back.

shards: what every rank holds -> load_balance: who does what -> message_layout: what goes where
-> transport: it goes, under the computation that pipeline puts beside it

process_groups: which ranks these are
transport has collectives; choose_transport says why p2p or nccl_ce take their place
arena: memory that the ranks of one host map -> p2p: exchanges through it; low_contention:
all-gather and reduce-scatter through another
"""

# ruff: noqa: F401 - imported for the layers above, which see this file alone
from .choose_transport import TRANSPORTS, CommUnavailable, Planned, Traffic, TransportOptions
from .load_balance import assign, chunked
from .low_contention import all_gather_lc, reduce_scatter_lc
from .message_layout import ALIGNMENT, Extra, Job, Message, Part, Route, make_route
from .p2p import Lease
from .pipeline import Phases, in_flight, run_pipeline
from .process_groups import Team, Teams, alone, exchange
from .shards import Box, Layout, Run, Split, boxes, splits_of
from .transport import Future, Identity, Transport, extremes, whole
