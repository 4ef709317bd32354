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


#: Prints bytes of the device after each of three model calls of a step, and where its sums of gradients lie.
SUMS = """
import contextlib, json, sys, torch
import pretended_cuda as native
from hf_parallel import parallelize
from hf_parallel.axes.data.gradients import run_before_the_last
from hf_parallel.ranks.mesh import find_stored_parameter
from tests import distributed, models

def train(spec):
    model = parallelize(models.build("llama", num_hidden_layers=4).to(torch.bfloat16), spec).train()
    state = model._hf_parallel
    tokens = torch.arange(4 * 33, device="cuda").view(4, 33) % models.VOCABULARY
    native.reset_peak()
    found = []
    for call in range(3):
        with run_before_the_last(state.root, state.config) if call < 2 else contextlib.nullcontext():
            model(input_ids=tokens, labels=tokens)["loss"].backward()
        resting = map(find_stored_parameter, model.parameters())
        sums = sorted({f"{p.grad.device.type} {p.grad.dtype}" for p in resting if p.grad is not None})
        found.append((native.allocated(), sums))
    return found

print(json.dumps(distributed.run(train, 2, sys.argv[1])[0]))
"""


def test_a_real_step_keeps_its_sums_on_the_host(tmp_path):
    """What the dry run of `offload=cpu` says of accumulated gradients, on a device that counts its memory."""
    ran = run_program(SUMS, tmp_path, "dp_shard=2,zero_stage=3,offload=cpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second, last = json.loads(ran.stdout.splitlines()[-1])
    assert first[1] == second[1] == ["cpu torch.float32"]
    assert last[1] == ["cpu torch.bfloat16"]
    assert first[0] == second[0] == last[0]
