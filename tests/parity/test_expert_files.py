"""What ranks that hold whole experts (`ep`) save, export, merge and go on from; biases of routers."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_parallel.checkpoint.export import export_checkpoint
from tests import models
from tests.distributed import run, run_alone
from tests.parity.test_lora_weights import EXPERTS, ROUTER, merged
from tests.resuming import ONE, STEPS, STOP, checkpoint_differences, log_differences, trained
from tests.training import activate, axes, none, weight_differences, weights

pytest.importorskip("peft")


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("mixtral", "dp_shard=2,ep=2"),
        ("qwen3_moe", "tp=2,ep=2"),
        ("mixtral", "dp_shard=4,ep=2"),
        ("mixtral", "pp=2,dp_shard=2,ep=2"),
    ],
)
def test_adapters_merged_and_exported(runs, tmp_path, model, spec):
    """Merging here, in one process and by `hf-parallel export` is the same."""
    initial, one, many = runs.initial(model), str(tmp_path / "one"), str(tmp_path / "many")
    targets = (*EXPERTS, ROUTER)
    results, without = run_alone(merged, None, model, initial, one, targets)
    assert (results[0] - without).abs().max() > 1e-2
    for found, off in run(partial(merged, spec, model, initial, many, targets), axes(spec)["world"], init=False):
        assert (off - without).abs().max() < 1e-4  # fp32, on logits of size ~10
        assert all((ours - theirs).abs().max() < 1e-4 for ours, theirs in zip(found, results, strict=True))
    none(weight_differences(f"{many}/merged", f"{one}/merged", 1e-6))
    run_alone(export_checkpoint, f"{many}/adapter", str(tmp_path / "exported"), None, True, initial)
    none(weight_differences(str(tmp_path / "exported"), f"{one}/merged", 1e-6))


@pytest.mark.parametrize(
    "later",
    [
        "tp=2,ep=2",
        "pp=2,dp_shard=2,ep=2",
        ONE,
    ],
)
def test_goes_on_from_ep(runs, tmp_path, later):
    """ep=2 -> another layout: read and saved again bit for bit, the same steps after it; and what is exported."""
    folder = runs.initial("mixtral")
    first = trained("dp_shard=2,ep=2", {"folder": folder, "out": str(tmp_path / "first")})[0]
    stopped = f"{first.folder}/checkpoint-{STOP}"
    ended = trained(later, {"folder": folder, "out": str(tmp_path / "later"), "resume": stopped})[0]
    found = log_differences(ended, first, range(STOP + 1, STEPS + 1), 1e-4)  # two more AdamW steps
    none([*found, *checkpoint_differences(f"{ended.folder}/checkpoint-{STOP}", stopped, models.build("mixtral"))])
    run_alone(export_checkpoint, stopped, str(tmp_path / "model"), torch.bfloat16)
    ours, theirs = weights(str(tmp_path / "model")), weights(stopped)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in ours)


def biased(spec: str, initial: str, out: str) -> dict[str, Any]:
    """DeepSeek-V3's biases as a script changes them: by the sign of what counts, summed over data ranks, are off."""
    import torch.distributed as dist

    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(initial)
    routers = {name: buffer for name, buffer in model.named_buffers() if "e_score_correction_bias" in name}
    read = {name: buffer.clone() for name, buffer in routers.items()}
    load = torch.arange(8.0) + dist.get_rank()
    dist.all_reduce(load)
    for buffer in routers.values():
        buffer += 0.125 * torch.sign(load.mean() - load)
    model.save_pretrained(out)
    return {"read": read, "changed": {name: buffer.clone() for name, buffer in routers.items()}}


@pytest.mark.parametrize("spec", ["dp_shard=2,ep=2", "tp=2,ep=2", "pp=2,dp_shard=2,ep=2"])
def test_biases_of_routers(tmp_path, spec):
    """Read from the checkpoint, equal on all ranks, and saved as they were changed."""
    initial, out = str(tmp_path / "initial"), str(tmp_path / "out")
    run_alone(save_biased, initial)
    stored, found = weights(initial), {}
    for rank in run(biased, axes(spec)["world"], spec, initial, out, init=False):
        for name, value in rank["changed"].items():
            assert torch.equal(rank["read"][name], stored[name])
            assert torch.equal(value, found.setdefault(name, value))
            assert not torch.equal(value, stored[name])
    saved = {name: value for name, value in weights(out).items() if "e_score_correction_bias" in name}
    assert saved.keys() == found.keys()
    assert len(saved) == 3  # of the layers that have experts
    assert all(torch.equal(saved[name], value) for name, value in found.items())


def save_biased(folder: str) -> None:
    model = models.build("deepseek_moe")
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)
