"""A script's hooks on layers: what they see of the tokens, and the line that says so."""

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

import hf_parallel
from hf_parallel.axes.data import zero
from hf_parallel.hooks import report
from tests.distributed import RankFailure, run, run_alone
from tests.training import activate, axes


def hook(folder: str, spec: str) -> tuple[list[str], list[int]]:
    """What is said of hooks on a layer, twice; how many tokens of 33 each call of a layer sees."""
    activate(spec)
    model, lines, seen = AutoModelForCausalLM.from_pretrained(folder), [], []
    report.say = lines.append
    for layer in model.model.layers[:2]:
        layer.mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    model(input_ids=model.dummy_inputs["input_ids"][:1, :1].repeat(2, 33))
    return lines, seen


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tp=2", "1/2 of the tokens under tp_size=2"),
        ("tp=2,sequence_parallel=false", None),
        ("cp=2", "1/2 of the tokens under cp_size=2"),
    ],
)
def test_a_hook_that_sees_a_part_is_told_of_once(runs, spec, said):
    for lines, seen in run(hook, axes(spec)["world"], runs.initial("llama", vocab_size=515), spec, init=False):
        assert [said is not None and said in line for line in lines] == [True] * (said is not None)
        assert all(count == 33 for count in seen) == (said is None)


def hook_before(folder: str, spec: str, kind: str) -> list[str]:
    """What is said of a hook that is there before the model is parallel."""
    activate(spec)
    model, lines = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), []
    report.say = lines.append
    handle = None
    if kind == "all":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    elif kind == "features":
        model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    elif kind == "head":
        model.lm_head.register_full_backward_hook(lambda *_: None)
    else:
        model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    Accelerator().prepare(model)
    if handle is not None:
        handle.remove()
    return [line for line in lines if "hook" in line]


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("input", "tp=2", "LlamaAttention sees 1/2 of the tokens under tp_size=2"),
        ("all", "tp=2", "all modules sees 1/2 of the tokens under tp_size=2"),
        ("features", "tp=2,sequence_parallel=false", "Linear sees 1/2 of the features"),
        ("head", "pp=2", "a micro-batch at a time, on the ranks that hold it, under pp_size=2"),
        ("head", "tp=2", None),
        ("input", "dp_shard=2", None),
    ],
)
def test_earlier_hooks_are_told_of(runs, kind, spec, said):
    for lines in run(hook_before, 2, runs.initial("llama", vocab_size=515), spec, kind, init=False):
        assert [said is not None and said in line for line in lines] == [True] * (said is not None)


def train_through_hooks(folder: str, spec: str | None, earlier: bool) -> dict[str, float]:
    """Gradient norms by name of a loss that reads only what hooks have kept of layers' parts, in the second of two."""
    activate(spec)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    kept: dict[int, torch.Tensor] = {}

    def keep(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        kept[module.hidden_size] = output  # one place: the last layer's stays

    def hook_layers() -> None:
        for module in model.modules():
            if type(module).__name__ == "LlamaMLP":
                module.register_forward_hook(keep)

    if earlier:
        hook_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = Accelerator().prepare(model, optimizer)
    if not earlier:
        hook_layers()
    tokens = torch.arange(66, device=model.device).view(2, 33)
    for step in range(2):
        model(input_ids=tokens)
        (state,) = kept.values()
        (state * torch.linspace(-1, 1, 33, device=model.device)[:, None]).square().mean().backward()
        norms = {
            name: hf_parallel.full_tensor(p.grad).norm().item()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,zero_stage=2", "dp_replicate=2"])
def test_a_loss_of_what_a_hook_keeps(runs, spec, earlier):
    """Nothing else of the layer is in the loss, so that no output of it asked for its weights."""
    folder = runs.initial("llama", vocab_size=515)
    expected = run_alone(train_through_hooks, folder, None, earlier)
    for norms in run(train_through_hooks, 2, folder, spec, earlier, init=False):
        assert norms == pytest.approx(expected, rel=1e-4)  # means of two ranks' sums


def train_through_forward(folder: str, spec: str | None) -> dict[str, float]:
    """Gradient norms of a loss that reads only what a script's own forward of the first MLP has put aside."""
    zero.BUCKET = 25 * 1024**2  # replicas of so few gradients are one unit
    activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    mlp = model.model.layers[0].mlp
    own, kept = mlp.forward, []
    mlp.forward = lambda states: kept.append(own(states)) or kept[-1]
    model, optimizer = Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(2):
        model(input_ids=torch.arange(66, device=model.device).view(2, 33))
        kept[-1].square().mean().backward()
        norms = {
            name: hf_parallel.full_tensor(p.grad).norm().item()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("spec", ["dp_replicate=2", "dp_shard=2,zero_stage=2"])
def test_a_loss_of_what_a_forward_puts_aside(runs, spec):
    """FSDP2 reduced nothing, in silence: it waits for gradients of a unit's outputs."""
    folder = runs.initial("llama", vocab_size=515)
    expected = run_alone(train_through_forward, folder, None)
    for norms in run(train_through_forward, 2, folder, spec, init=False):
        assert norms == pytest.approx(expected, rel=1e-4)


def test_what_is_put_aside_without_weights_is_refused(runs):
    """Those of a unit are freed after its forward pass."""
    with pytest.raises(RankFailure, match="put aside in the middle of a layer.*zero_stage=2"):
        run(train_through_forward, 2, runs.initial("llama", vocab_size=515), "dp_shard=2", init=False)
