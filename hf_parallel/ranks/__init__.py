"""Differentiable collectives: each names what it does forward and backward. Some that only start. Who is here."""

from hf_parallel.ranks.all_to_all import exchange, exchange_counts, exchange_during, exchange_equally, scale_gradient
from hf_parallel.ranks.desync import AloneError, ask, assert_all_ranks, watch
from hf_parallel.ranks.differentiable import (
    Started,
    all_reduce,
    begin_gather_sequence,
    copy_to_group,
    copy_weight_to_group,
    gather_last_dim,
    gather_sequence,
    join_last_dim,
    join_sequence,
    parts_of_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    split_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    whole_sequence,
)
from hf_parallel.ranks.messages import OneBatch

__all__ = [
    "AloneError",
    "OneBatch",
    "Started",
    "all_reduce",
    "ask",
    "begin_gather_sequence",
    "copy_to_group",
    "copy_weight_to_group",
    "exchange",
    "exchange_counts",
    "exchange_during",
    "exchange_equally",
    "gather_last_dim",
    "gather_sequence",
    "join_last_dim",
    "join_sequence",
    "assert_all_ranks",
    "parts_of_sequence",
    "reduce_from_group",
    "reduce_scatter_sequence",
    "scale_gradient",
    "split_sequence",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
    "watch",
    "whole_sequence",
]
