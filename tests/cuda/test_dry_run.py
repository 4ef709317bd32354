"""`plan --verify --device cuda`: fake tensors of a GPU, on which the branches for GPUs run."""

from __future__ import annotations

import json
import re

import pytest

from tests import models
from tests.cuda.worker import run_command, run_program

pytestmark = pytest.mark.timeout(600)
PLAN = ("--gpus", "2", "--gpu", "h100-80gb", "--seq", "64", "--global-batch", "4", "--top", "1", "--verify")
#: Runs both devices dry; prints bytes of the peak by kind, traffic, and how many streams each made.
PROGRAM = """
import json, sys, torch
from hf_parallel.planner.dryrun import dry_run
from tests import models
made, plain = [], torch.cuda.Stream
torch.cuda.Stream = lambda *args, **kwargs: made.append(1) or plain(*args, **kwargs)
for device in ("cpu", "cuda"):
    made.clear()
    ran = dry_run(models.llama(num_hidden_layers=7), sys.argv[1], rows=4, seq=33, device=device)
    sent = {axis: {kind: (t.count, t.sent) for kind, t in kinds.items()} for axis, kinds in ran.communication.items()}
    print(json.dumps({"peak": ran.peak, "sent": sent, "streams": len(made)}))
"""


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2,dp_shard=2", "pp=2"])
def test_branches_for_gpus_send_the_same(spec, tmp_path):
    """The device has no flash attention, so that more activations are kept; the rest is equal to the byte."""
    ran = run_program(PROGRAM, tmp_path, spec)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    on_cpu, on_cuda = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert on_cuda["sent"] == on_cpu["sent"]
    assert on_cuda["peak"].pop("activations") >= on_cpu["peak"].pop("activations")
    assert on_cuda["peak"] == on_cpu["peak"]
    assert (on_cpu["streams"], on_cuda["streams"] > 0) == (0, "dp_shard" in spec)


def test_verify_names_the_device(tmp_path):
    models.llama(num_hidden_layers=7).save_pretrained(tmp_path)
    ran = run_command(tmp_path, "plan", str(tmp_path), *PLAN, "--device", "cuda")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "branches for CPUs" not in ran.stderr
    assert re.search("Dry run of .* on cuda", ran.stdout), ran.stdout
