"""Faults planted one by one: a wait that is left out is found, as a NaN, as a fault of streams, or as wrong numbers.

`work_wait` waits for a collective, `wait_event` lets one stream wait for another, `synchronize` lets the host wait.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(600)

#: Layout, what is left out, at which line of the package or as the how many-th; one of the ways in which it is found.
PLANTED = {
    "all-reduce of replicas": ("dp_replicate=2", "work_wait", "collectives/kept.py", "nan"),
    "gather of FSDP2": ("dp_shard=2", "wait_event", "#3", "stream"),
    "any wait of FSDP2's streams": ("dp_shard=2", "wait_event", "", "stream"),
    "a collective of FSDP2": ("dp_shard=2,zero_stage=0", "work_wait", "", "nan"),
    "overlap, forward": ("tp=2,tp_overlap=true", "work_wait", "axes/tensor/overlap.py:111", "nan"),
    "overlap, gradient": ("tp=2,tp_overlap=true", "work_wait", "axes/tensor/overlap.py:125", "nan"),
    "overlap, gathered again": ("tp=2,tp_overlap=true", "work_wait", "axes/tensor/overlap.py:138", "nan"),
    "gather of a sequence": ("tp=2", "work_wait", "collectives/asynchronous.py", "nan"),
}
