"""MLPs over pieces of the sequence: the numbers of one process, on every axis, and a fraction of the memory."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.keys.layers import check_compiled
from hf_parallel.axes.tiled_mlp import call_in_pieces, does_act_per_token
from hf_parallel.plans.examine import examine
from tests import loops, models
from tests.distributed import run
from tests.training import check_alone

SPECS = (
    "tp=2",
    "tp=2,sequence_parallel=false",
    "pp=2,activation_checkpointing=full",
    "dp_shard=2,activation_checkpointing=every:2",
    "cp=2,activation_checkpointing=full,activation_offload=true",
)


def trained(spec: str | None, lora: bool) -> list[float]:
    """Losses of steps that move the weights, of rows of 33 tokens; gradient norms of all parameters."""
    built = models.build("llama", hidden_size=16, head_dim=4).train()
    if spec:
        parallelize(built, spec)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        built = get_peft_model(built, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return loops.losses(built, loops.rows(3, 4, 33))


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_of_one_process(spec):
    check_alone(trained, f"{spec},tiled_mlp=true", False)


def test_numbers_with_adapters():
    check_alone(trained, "tp=2,tiled_mlp=true", True)


def test_layers_that_view_their_input():
    layer, x = Conv1D(8, 8), torch.randn(3, 33, 8)
    torch.testing.assert_close(call_in_pieces(layer, x), layer(x))


def kept(spec: str) -> float:
    """Bytes that autograd keeps of a pass over a sequence of 512 tokens."""
    model = models.build("llama", hidden_size=16, head_dim=4, intermediate_size=256).train()
    parallelize(model, spec)
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.arange(512).view(1, 512) % models.VOCABULARY)
    return sum(storages.values())


def test_less_is_kept():
    whole, pieces = (run(kept, 1, f"dp_shard=1,tiled_mlp={on}")[0] for on in ("false", "true"))
    assert pieces < 0.5 * whole


class Mixing(nn.Module):
    """An MLP that reads the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x + x.roll(1, dims=1))))


class Alone(Mixing):
    """An MLP that reads each token by itself, with dropout if there is any."""

    drops = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), self.drops))


class Residual(Alone):
    """An MLP that can add what comes beside its input."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | float = 0) -> torch.Tensor:
        return super().forward(x) + residual


def test_proof():
    assert does_act_per_token(Alone(), 8)
    assert not does_act_per_token(Mixing(), 8)
    assert not does_act_per_token(Residual(), 8)
    assert not does_act_per_token(nn.Linear(8, 24), 8)  # another width


def gradients_of(call, mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the gradients of all parameters and of the input, in one row."""
    torch.manual_seed(1)
    mlp.zero_grad()
    x = x.clone().requires_grad_()
    call(x).square().sum().backward()
    return torch.cat([value.grad.flatten() for value in (*mlp.parameters(), x)])


@pytest.mark.parametrize("drops", [0.0, 0.5])
def test_pieces(drops):
    """Compare 2 sequences of 33 tokens with 8 features with pieces that nothing computes again; count the calls."""
    torch.manual_seed(0)
    mlp, x, seen = Alone(), torch.randn(2, 33, 8), []
    mlp.drops = drops
    mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    expected = gradients_of(lambda x: torch.cat([mlp(piece) for piece in x.split(4, dim=1)], dim=1), mlp, x)
    assert torch.allclose(gradients_of(lambda x: call_in_pieces(mlp, x=x), mlp, x), expected, rtol=1e-5, atol=1e-5)
    assert sorted(seen) == 3 * [1] + 24 * [4]
    if not drops:
        assert torch.allclose(gradients_of(mlp, mlp, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "works"),
    [
        ("activation_checkpointing=selective", "activation_checkpointing=full"),
        ("compile=regional", "tiled_mlp=false"),
        ("precision=fp8", "precision=auto"),
        ("tp=2,tp_overlap=true", "tp_overlap=false"),
        ("pp=2,pipeline_schedule=zbv_zero_bubble", "pipeline_schedule=1f1b"),
        ("pp=2,pipeline_schedule=pipedream_2bw", "tiled_mlp=false"),
        ("pp=2,dp_shard=1,pipeline_fill=kfac", "tiled_mlp=false"),
    ],
)
def test_settings_beside_it(spec, works):
    with pytest.raises(SpecError, match="tiled_mlp=true") as told:
        ParallelConfig.parse(f"{spec},tiled_mlp=true")
    assert str(told.value).endswith(f"{works} works")
    settings = dict(setting.split("=") for setting in f"{spec},tiled_mlp=true,{works}".split(","))
    ParallelConfig.parse(",".join(map("=".join, settings.items())))


def test_graphs_of_a_script_are_refused():
    """Trainer's torch_compile=True, accelerate's plugin."""
    with pytest.raises(SpecError, match="tiled_mlp=false works"):
        check_compiled(ParallelConfig.parse("tp=2,tiled_mlp=true"), "torch_compile=True")


@pytest.mark.parametrize(("model", "why"), [("deepseek_moe", "experts"), ("t5", "no MLP")])
def test_models_without_such_mlps(model, why):
    report = examine(models.build(model), ParallelConfig.parse("tiled_mlp=true"), 2)
    (problem,) = report.problems
    assert "tiled_mlp=true" in problem
    assert why in problem
    assert problem.endswith("tiled_mlp=false works")
