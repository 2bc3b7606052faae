"""Who owns which matrix, and how its pieces travel there and back.

shards: what every rank holds -> ownership: who does what -> messages: what goes where
-> transport: it goes, under the computation that pipeline puts beside it
"""

from .messages import ALIGNMENT, Extra, Job, Message, Part, Route, make_route
from .ownership import assign, chunked
from .pipeline import Phases, in_flight, run_pipeline
from .shards import Box, Layout, Run, Split, boxes, splits_of
from .team import Team, Teams, alone, exchange
from .transport import Future, Identity, extremes, whole
from .unavailable import CommUnavailable

__all__ = [
    "ALIGNMENT",
    "Box",
    "CommUnavailable",
    "Extra",
    "Future",
    "Identity",
    "Job",
    "Layout",
    "Message",
    "Part",
    "Phases",
    "Route",
    "Run",
    "Split",
    "Team",
    "Teams",
    "alone",
    "assign",
    "boxes",
    "chunked",
    "exchange",
    "extremes",
    "in_flight",
    "make_route",
    "run_pipeline",
    "splits_of",
    "whole",
]
