"""Memory levers that hold on some ranks alone: which ranks recompute and step on the host, and the same numbers."""

import os

import pytest
import torch

from hf_parallel import clip_grad_norm, full_state_dict, parallelize
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.data import host_step
from hf_parallel.model.anatomy import list_transformer_blocks
from hf_parallel.ranks.mesh import compute_coordinates, compute_data_rank
from tests import models
from tests.distributed import RankFailure, run, run_alone_once
from tests.refusals import pattern_of_refusal

STEPS, ROWS, LENGTH = 3, 8, 33


def train(spec: str | None, kind: str = "llama") -> dict:
    """Losses of this rank's rows, norms, and whole weights after AdamW; layers run in a step, steps on the host."""
    model = models.build(kind).train()
    rank = int(os.environ.get("RANK", "0"))
    config = None if spec is None else ParallelConfig.parse(spec).resolve(int(os.environ["WORLD_SIZE"]))
    ranks, place = (1, 0) if config is None else (config.data_parallel_size, compute_data_rank(config, rank))
    with pytest.MonkeyPatch.context() as patch:
        found: dict = {"losses": [], "norms": [], "layers": 0, "host": 0}
        own = host_step.HostStep.step

        def step_on_host(self):
            found["host"] += 1
            own(self)

        def count(*args):
            found["layers"] += 1

        patch.setattr(host_step.HostStep, "step", step_on_host)
        if spec:
            parallelize(model, spec)
        layer = next(layer for layer in list_transformer_blocks(model) if any(True for _ in layer.parameters()))
        layer.mlp.register_forward_pre_hook(count)  # a layer runs again inside of its own call
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(5)
        for _ in range(STEPS):
            tokens = torch.randint(0, models.VOCABULARY, (ROWS, LENGTH), generator=generator)[place::ranks]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            found["losses"].append(loss.item())
            norm = clip_grad_norm(model, 1e9) if spec else torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            found["norms"].append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(model) if spec else model.state_dict()
    found["place"] = {} if config is None else compute_coordinates(config, rank)
    found["weights"] = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in whole.items()}
    return found


@pytest.mark.parametrize(
    ("spec", "again", "host"),
    [
        ("dp_shard=4,activation_checkpointing=full@2:3,offload=optimizer@1", {2, 3}, {1}),
        ("dp_shard=2,tp=2,activation_checkpointing=selective@0-1,offload=optimizer@2:3", {0, 1}, {2, 3}),
        ("dp_replicate=2,dp_shard=2,activation_checkpointing=full@3,offload=optimizer@0:2", {3}, {0, 2}),
        ("pp=2,dp_shard=2,activation_checkpointing=full@0:1,offload=optimizer@3", {0, 1}, {3}),
    ],
)
def test_same_numbers_as_one_process(spec, again, host):
    expected, ranks = run_alone_once(train, None), run(train, 4, spec)
    each = [rank["layers"] for rank in ranks]
    for rank, found in enumerate(ranks):
        alike = [n for other, n in enumerate(each) if other not in again]
        assert (found["layers"] == 2 * min(alike)) == (rank in again), each
        assert found["host"] == (STEPS if rank in host else 0)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    losses = {(rank["place"]["dp_replicate"], rank["place"]["dp_shard"]): rank["losses"] for rank in ranks}
    for step, loss in enumerate(expected["losses"]):
        assert sum(own[step] for own in losses.values()) / len(losses) == pytest.approx(loss, rel=1e-5)
    weights = ranks[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("sizes", "setting", "numbers", "works"),
    [
        ("dp_shard=2", "activation_checkpointing=full@2", ["rank 2", 2], "activation_checkpointing=full@1"),
        ("tp=2", "activation_checkpointing=full@0", ["ranks 0 1"], "activation_checkpointing=full"),
        ("dp_replicate=2", "offload=optimizer@1", ["ranks 0 1"], "offload=optimizer"),
        ("tp=2", "offload=optimizer@1", ["ranks 0 1"], "offload=optimizer"),
    ],
)
def test_refused_at_start(sizes, setting, numbers, works):
    with pytest.raises(RankFailure, match=pattern_of_refusal(setting, *numbers, works=f"; {works} works")):
        run(train, 2, f"{sizes},{setting}")
    run(train, 2, f"{sizes},{works}")


@pytest.mark.parametrize(
    ("setting", "works"),
    [
        ("activation_checkpointing=full@x", "activation_checkpointing=full@0"),
        ("activation_checkpointing=full@3-2", "activation_checkpointing=full@0"),
        ("activation_checkpointing=none@1", "activation_checkpointing=none"),
        ("offload=cpu@1", "offload=optimizer@1"),
    ],
)
def test_refused_by_name(setting, works):
    with pytest.raises(SpecError, match=f"^{setting}: .*; {works} works$"):
        ParallelConfig.parse(f"dp_shard=4,{setting}").resolve(4)
    ParallelConfig.parse(f"dp_shard=4,{works}").resolve(4)
