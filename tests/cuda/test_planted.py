"""Faults planted one by one. A wait that is left out is found: as a NaN, as a fault of streams that names two lines,
or by the numbers, where the host has overwritten what had not arrived. Stages that misread a message raise an error.

`work_wait` waits for a collective, `wait_event` lets one stream wait for another, `synchronize` lets the host wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import models
from tests.cuda.worker import ROOT, Worker, run_program

pytestmark = pytest.mark.timeout(900)

_OFFLOADED = "dp_shard2_activation_offloadtrue"  # a name of `layouts.py`, where a spec is not all
_GATHERED = "cp=2,dp_shard=1,context_parallel=allgather"
#: Layout; what is left out; in which function of the package, or as the how many-th one; how that is found.
PLANTED = {
    "overlap, sum": ("tp=2,tp_overlap=true,sequence_parallel=false", "work_wait", "in _multiply_and_reduce", "nan"),
    "overlap, scatter": ("tp=2,tp_overlap=true", "work_wait", "in _multiply_and_scatter", "nan"),
    "overlap, gather": ("tp=2,tp_overlap=true", "work_wait", "in _gather_and_multiply", "nan"),
    "sequence": ("tp=2", "work_wait", "#5", "nan"),
    "FSDP2, its third wait": ("dp_shard=2", "wait_event", "#3", "stream"),
    "FSDP2, every wait": ("dp_shard=2", "wait_event", "", "stream"),
    "replicas, every wait": ("dp_replicate=2", "wait_event", "", "stream"),
    "ring": ("cp=2,dp_shard=1,context_parallel=ring", "work_wait", "#2", "nan"),
    "gathered keys": (_GATHERED, "work_wait", "in _receive_blocks", "nan"),
    "gradients of keys": (_GATHERED, "work_wait", "in _collect_key_gradients", "nan"),
    "ulysses": ("cp=2,dp_shard=1,context_parallel=ulysses", "work_wait", "ranks/all_to_all.py", "nan"),
    "pipeline": ("pp=2,pipeline_schedule=1f1b", "work_wait", "axes/pipeline/", "error"),
    "optimizer on the host": ("dp_shard2_offloadoptimizer", "synchronize", "axes/data/host_step.py", "numbers"),
    "activations out": (_OFFLOADED, "wait_event", "in drop", "stream"),
    "activations in": (_OFFLOADED, "wait_event", "in take", "stream"),
    "activations, before they are made": (_OFFLOADED, "wait_event", "in __init__", "stream"),
    "int8 gather": ("dp_shard=2,quantize_weights=int8", "work_wait", "axes/data/compressed.py", "nan"),
}

#: Where a save beside the training waits for its copies on the host.
SAVED = "checkpoint/saving.py"
#: Saves beside a training that goes on when all is written, so that no later wait of its steps helps; prints how many
#: tensors of the checkpoint are not finite.
SAVES = """
import json, sys, threading
import tests.cuda.plugin
import pretended_cuda as native
from tests import distributed, resuming, training

def save(folder, where):
    start = threading.Thread.start

    def start_and_wait(thread):
        start(thread)
        thread.join() if thread.name.startswith("save checkpoint") else None

    threading.Thread.start = start_and_wait
    native.plant("synchronize", where)
    data_ranks = training.activate("dp_shard=2,async_save=true")
    resuming.train(folder, f"{folder}/out", data_ranks, max_steps=2, save_steps=2)

folder, where = sys.argv[1:]
distributed.run(save, 2, folder, where, init=False)
written = [training.weights(f"{folder}/out/checkpoint-2{part}") for part in ("", "/optimizer")]
print(json.dumps([sum(not tensor.isfinite().all() for tensor in part.values()) for part in written]))
"""


def count_unwritten(folder: Path, where: str) -> list[int]:
    """Return how many tensors of the weights, and of the optimizer's state, were saved before they had arrived."""
    models.build("llama").save_pretrained(folder)
    ran = run_program(SAVES, folder, str(folder), where)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_save_beside_the_training_waits_for_its_copies(tmp_path):
    assert count_unwritten(tmp_path, "nowhere") == [0, 0]
    weights, state = count_unwritten(tmp_path, SAVED)
    assert state > 0, f"not found: {weights} weights"  # these have been waited for by what the state is read with


def ways_found(worker, fault: str) -> dict[str, bool]:
    """Leave a wait out; return which assertions find it."""
    spec, kind, where, _ = PLANTED[fault]
    row = worker.row(spec, (kind, where))
    numbers = not row["gap"] < 1e-3
    return {"nan": row["nan"], "stream": bool(row["faults"]), "numbers": numbers, "error": row["failed"]}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wait_left_out_is_found(worker, fault):
    found = ways_found(worker, fault)
    assert found[PLANTED[fault][-1]], f"not found: {found}"


def main() -> int:
    """Print which assertion finds each planted fault, for `python -m tests.cuda.test_planted`."""
    worker, missed = Worker(), 0
    print("| planted: left out | layout | found by |\n| --- | --- | --- |", flush=True)
    for fault, (spec, kind, where, _) in PLANTED.items():
        found = [way for way, is_so in ways_found(worker, fault).items() if is_so]
        missed += not found
        print(f"| {fault}: {kind} {where} | {spec} | {', '.join(found) or 'NOTHING'} |", flush=True)
    worker.stop()
    with tempfile.TemporaryDirectory() as folder:
        unwritten = sum(count_unwritten(Path(folder), SAVED))
    missed += not unwritten
    print(f"| async save: synchronize {SAVED} | dp_shard=2,async_save=true | {unwritten} tensors of NaN on disk |")
    print(f"{len(PLANTED) + 1} planted, {missed} not found")
    return missed


def test_rules_of_streams():
    """On the device alone: `rules.py` says what each is."""
    ran = subprocess.run([sys.executable, "-m", "tests.cuda.rules"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    sys.exit(main())
