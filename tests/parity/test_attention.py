"""Every attention that runs here against eager attention in one process; documents of a pack see only themselves."""

import pytest
import torch

from tests import models
from tests.context import DOCUMENTS, all_steps, batch, differences
from tests.distributed import run, run_alone
from tests.training import axes, none

SPECS = ("tp=2", "pp=2", "dp_shard=2", "tp=2,pp=2")
#: Grouped queries, windows, windows in half of the layers, windows and sinks, windows and caps.
KERNELS = {
    "llama": ("torch_flash", "sdpa"),
    "mistral": ("torch_flash", "sdpa"),
    "gemma3": ("torch_flash", "sdpa"),
    "gpt_oss": ("torch_flash",),
    "gemma2": ("eager",),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", KERNELS)
def test_as_eager_in_one_process(name, spec):
    """Padding at both ends of rows, and packs; 33 tokens."""
    cases = [
        (name, kind, f"{spec},attention={kernel}", True, {"attn_implementation": "eager"})
        for kernel, kind in zip(KERNELS[name] * 2, ("packed", "ends"), strict=False)
    ]
    ranks = run(all_steps, axes(spec)["world"], cases, True)
    none(differences(cases, ranks, run_alone(all_steps, cases, False)))


def test_recomputed_layers():
    """A layer that runs again has the documents of its batch."""
    changes = {"attn_implementation": "eager", "checkpointed": True}
    cases = [("mistral", "packed", "dp_shard=2,attention=torch_flash", True, changes)]
    none(differences(cases, run(all_steps, 2, cases, True), run_alone(all_steps, cases, False)))


def others_unchanged(name: str, spec: str, kinds: tuple[str, ...]) -> list[tuple[float, float]]:
    """How far the logits of other documents move when one is another, and those of the one that is."""
    import hf_parallel

    found = []
    for kind in kinds:
        model = hf_parallel.parallelize(models.build(name), spec).eval()
        given = {key: value for key, value in batch("packed").items() if key != "labels"}
        if kind == "flat":  # one row, as collators that flatten make it
            given = {key: value[:1] for key, value in given.items()}
        changed = given["input_ids"].clone()
        start, end = sum(DOCUMENTS[:3]), sum(DOCUMENTS[:4])
        changed[0, start:end] = changed[0, start:end].flip(0)
        with torch.no_grad():
            gap = (model(**given).logits - model(**{**given, "input_ids": changed}).logits).abs().amax(-1)
        inside = torch.zeros_like(gap, dtype=torch.bool)
        inside[0, start:end] = True
        found.append((gap[~inside].max().item(), gap[inside].max().item()))
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "torch_flash"])
def test_a_document_sees_no_other(kernel, spec):
    """In several rows of packs, and in one row, of which `pp` has no micro-batches."""
    kinds = ("rows",) if "pp" in spec else ("rows", "flat")
    for rank in run(others_unchanged, axes(spec)["world"], "mistral", f"{spec},attention={kernel}", kinds):
        for others, own in rank:
            assert others == 0
            assert own > 0.1
