"""Faults planted one by one. A wait that is left out is found: as a NaN, as a fault of streams that names two lines,
or by the numbers, where the host has overwritten what had not arrived. Stages that misread their vote end in an error.

`work_wait` waits for a collective, `wait_event` lets one stream wait for another, `synchronize` lets the host wait.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda.worker import ROOT

pytestmark = pytest.mark.timeout(900)

_OFFLOADED = "dp_shard2_activation_offloadtrue"  # a name of `layouts.py`, where a spec is not all
#: Layout; what is left out; in which function of the package, or as the how many-th one; how that is found.
PLANTED = {
    "overlap, sum": ("tp=2,tp_overlap=true,sequence_parallel=false", "work_wait", "in _reduced_product", "nan"),
    "overlap, scatter": ("tp=2,tp_overlap=true", "work_wait", "in _scattered_product", "nan"),
    "overlap, gather": ("tp=2,tp_overlap=true", "work_wait", "in _gathered_product", "nan"),
    "sequence": ("tp=2", "work_wait", "#5", "nan"),
    "FSDP2, its third wait": ("dp_shard=2", "wait_event", "#3", "stream"),
    "FSDP2, every wait": ("dp_shard=2", "wait_event", "", "stream"),
    "replicas, every wait": ("dp_replicate=2", "wait_event", "", "stream"),
    "ring": ("cp=2,dp_shard=1,context_parallel=ring", "work_wait", "#3", "nan"),
    "gathered keys": ("cp=2,dp_shard=1,context_parallel=allgather", "work_wait", "in _blocks", "nan"),
    "gradients of keys": ("cp=2,dp_shard=1,context_parallel=allgather", "work_wait", "in _backward", "nan"),
    "ulysses": ("cp=2,dp_shard=1,context_parallel=ulysses", "work_wait", "ranks/all_to_all.py", "nan"),
    "pipeline": ("pp=2,pipeline_schedule=1f1b", "work_wait", "#2", "error"),
    "optimizer on the host": ("dp_shard2_offloadoptimizer", "synchronize", "axes/data/host_step.py", "numbers"),
    "activations out": (_OFFLOADED, "wait_event", "in drop", "stream"),
    "activations in": (_OFFLOADED, "wait_event", "in take", "stream"),
    "activations, before they are made": (_OFFLOADED, "wait_event", "in __init__", "stream"),
    "int8 gather": ("dp_shard=2,quantize_weights=int8", "work_wait", "axes/data/compressed.py", "nan"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wait_left_out_is_found(worker, fault):
    spec, kind, where, found = PLANTED[fault]
    row = worker.row(spec, (kind, where))
    shown = {
        "nan": row["nan"],
        "stream": bool(row["faults"]),
        "numbers": not row["gap"] < 1e-3,
        "error": row["failed"],
    }
    assert shown[found], f"not found: {shown}, losses off by {row['gap']}, {row['wrong']}"
    print(fault, shown, row["faults"][:1])


def test_rules_of_streams():
    """On the device alone: `rules.py` says what each is."""
    ran = subprocess.run([sys.executable, "-m", "tests.cuda.rules"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
