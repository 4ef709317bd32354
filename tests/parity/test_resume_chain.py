"""One run through all stages, ways to offload and compressed transfers: each goes on where the last one stopped."""

import pytest
from transformers import TrainerCallback

from tests import models
from tests.distributed import run, run_alone
from tests.resuming import ONE, STEPS, checkpoint_differences, log_differences, train, trained
from tests.training import activate, axes, none

#: In a chain each follows another one; what is quantised comes last, as the numbers of one process end there.
CHAINS = {
    "stages": [
        "dp_shard=2",
        "dp_shard=2,zero_stage=1,offload=nvme:FILES",
        "dp_shard=2,zero_stage=2,offload=cpu",
        "dp_replicate=2",
        "dp_shard=2,offload=nvme_all:FILES",
        ONE,
    ],
    "offload": [
        ONE,
        "dp_shard=2,offload=nvme_all:FILES",
        "dp_shard=2,zero_stage=1",
        "tp=2,offload=nvme:FILES",
        "dp_shard=2,zero_stage=2",
        "pp=2,offload=optimizer",
    ],
    "grids": [
        ONE,
        "tp=4,tp_mesh=2x2",
        "dp_shard=4",
        "tp=4,tp_mesh=2x2,sequence_parallel=false",
        "tp=4",
        "tp=4,tp_mesh=2x2,activation_checkpointing=full",
    ],
    "compression": [
        "dp_shard=2,offload=cpu",
        "dp_shard=4,hierarchical_shard=2,offload=optimizer",
        "pp=2,dp_shard=2,zero_stage=1",
        "dp_shard=4,hierarchical_shard=2,quantize_weights=int8,quantize_gradients=int4,gradient_error_feedback=true",
        "dp_shard=2,offload=nvme:FILES",
        "dp_shard=2,quantize_gradients=int8,offload=cpu",
    ],
}


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def link(spec: str, step: int, job: dict):
    """The step before `step` is the last one of another layout."""
    activate(spec or "tp=1")
    stop = StopAfter(step)
    return train(data_ranks=axes(spec)["data_ranks"], change=lambda t: t.add_callback(stop), save_steps=1, **job)[0]


@pytest.mark.parametrize("chain", CHAINS)
def test_each_goes_on_where_the_last_one_stopped(runs, tmp_path, chain):
    initial, built = runs.initial("llama"), models.build("llama")
    (whole,) = trained(ONE, {"folder": initial, "out": str(tmp_path / "whole")})
    found, resume, exact = [], None, True
    for step, layout in enumerate(CHAINS[chain], start=1):
        out, spec = str(tmp_path / f"link-{step}"), layout.replace("FILES", str(tmp_path / "files"))
        job = {"folder": initial, "out": out, "resume": resume}
        here = (link, spec, step, job)
        ended = run(here[0], axes(spec)["world"], *here[1:], init=False)[0] if spec else run_alone(*here)
        if resume is not None:  # what was read, saved again before a step
            found += [
                f"{layout}: {text}" for text in checkpoint_differences(f"{out}/checkpoint-{step - 1}", resume, built)
            ]
        exact = exact and "quantize" not in layout
        # relative; two epochs of AdamW at 1e-2 feed the rounding of sums back; after quantised steps only near
        texts = log_differences(ended, whole, range(step, step + 1), 1e-4 if exact else 0.2)
        found += [f"{layout}: {text}" for text in texts]
        resume = f"{out}/checkpoint-{step}"
    assert len(CHAINS[chain]) == STEPS
    none(found)
