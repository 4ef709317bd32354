"""Layers by the speed and the memory of the pipeline's devices: which stage gets how many, and the same numbers."""

import os

import pytest
import torch

from hf_parallel import clip_grad_norm, parallelize
from hf_parallel.ranks import mesh
from tests import models
from tests.distributed import run, run_alone

STEPS, ROWS, LENGTH = 3, 8, 33


def train(spec: str | None, speeds: tuple[float, ...] = (), gib: tuple[float, ...] = ()) -> dict:
    """Losses, norms, keys of gradients and weights of `deep` after SGD steps; layers per stage, and what is said.

    Args:
        speeds: of each rank's matrix products.
        gib: of each rank's memory, in multiples of what the model's parameters take.
    """
    model = models.build("deep").train()
    found: dict = {"losses": [], "norms": [], "keys": set()}
    rank, size = int(os.environ.get("RANK", "0")), sum(4 * p.numel() for p in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        if speeds:
            patch.setattr(mesh, "measure_product_rate", lambda device: speeds[rank])
            patch.setattr(mesh, "measure_device_memory", lambda device: size * (gib[rank] if gib else 1e3))
        if spec:
            parallelize(model, spec)
            found["split"], found["said"] = (
                model._hf_parallel.config.pipeline_split,
                " ".join(model._hf_parallel.notes),
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(0, models.VOCABULARY, (ROWS, LENGTH), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found["losses"].append(loss.item())
        found["keys"] |= {name for name, p in model.named_parameters() if p.grad is not None}
        clip = clip_grad_norm if spec else torch.nn.utils.clip_grad_norm_
        found["norms"].append(float(clip(model, 1e9) if spec else clip(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
    return found


@pytest.mark.parametrize(
    ("spec", "speeds", "gib", "split"),
    [
        ("pp=2,pipeline_split=auto", (3.0, 1.0), (), (8, 2)),
        ("pp=2,pipeline_split=auto", (1.0, 3.0), (), (2, 8)),
        ("pp=2,pipeline_split=auto", (1.05, 1.0), (), (5, 5)),
        ("pp=2,pipeline_split=auto", (3.0, 1.0), (2.5, 1e3), None),
        ("pp=2,pipeline_split=3:1", (1.0, 1.0), (), (8, 2)),
        ("pp=2,pipeline_split=auto,pipeline_schedule=interleaved_1f1b", (3.0, 1.0), (), None),
    ],
)
def test_same_numbers_as_one_process(spec, speeds, gib, split):
    expected, ranks = run_alone(train, None), run(train, 2, spec, speeds, gib)
    assert len({rank["split"] for rank in ranks}) == 1
    layers = ranks[0]["split"]
    if split is not None:
        assert layers == split
    elif gib:  # 8 layers fit nowhere but on the slow device
        assert layers[0] < 8
        assert "8, 2, " in ranks[0]["said"]
    else:
        assert sum(layers[::2]) > 2 * sum(layers[1::2])
    assert set.union(*(rank["keys"] for rank in ranks)) == expected["keys"]
    weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
    assert weights.keys() == expected["weights"].keys()
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-6, msg=name)
