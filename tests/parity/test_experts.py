"""Mixtures of experts on every axis: split inside over tp, or shared out over ep with tokens that travel."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.axes.experts.layers import _Weigh, fill_with_zeros
from hf_parallel.plans import examine
from tests import models
from tests.adapters import lora
from tests.distributed import RankFailure, run
from tests.resuming import ONE, STEPS, STOP, checkpoint_differences, log_differences, trained
from tests.rows import data
from tests.training import BF16, TRAIN_SEED, Script, activate, axes, none, over, trainer_of

MODELS = ("mixtral", "qwen3_moe", "deepseek_moe")


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1025, 8, 515), (33, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32])
def test_results_are_weighed_in_parts_as_at_once(monkeypatch, tokens, experts, hidden, dtype, weights_dtype):
    """Sums and gradients are equal to the bit, whatever is in 16 bits."""
    monkeypatch.setattr("hf_parallel.axes.experts.layers.PART", 5 * experts * hidden + 1)
    torch.manual_seed(3)
    rows = torch.randn(tokens * experts, hidden).to(dtype).requires_grad_()
    weights = torch.rand(tokens, experts).to(weights_dtype).requires_grad_()
    places, gradient = torch.randperm(len(rows)).view(tokens, experts), torch.randn(tokens, hidden).to(dtype)
    at_once = (rows[places] * weights.unsqueeze(-1)).sum(1).to(dtype)
    in_parts = _Weigh.apply(rows, places, weights)
    assert torch.equal(in_parts, at_once)
    found, wanted = (torch.autograd.grad(sums, (rows, weights), gradient) for sums in (in_parts, at_once))
    assert all(map(torch.equal, found, wanted))


def test_full_rows_are_not_copied():
    rows = torch.ones(3, 2)
    assert fill_with_zeros(rows, 3) is rows
    assert torch.equal(fill_with_zeros(rows, 4), torch.tensor([[1.0, 1], [1, 1], [1, 1], [0, 0]]))


@over("{model}", "tp=2", "tp=2,dp_shard=2", "tp=2,pp=2", model=MODELS)
def test_split_inside(runs, model, spec):
    """Each rank has a part of the width of every expert."""
    runs.check(Script(model=model).with_accumulation(2), spec)


@over(
    "{model}",
    "dp_shard=2,ep=2",
    "dp_shard=4,ep=4",
    "dp_shard=4,ep=2",
    "tp=2,ep=2",
    "tp=2,dp_shard=2,ep=2",
    "tp=2,dp_shard=2,ep=4",
    "pp=2,dp_shard=2,ep=2",
    "tp=2,pp=2,ep=2",
    "dp_replicate=2,dp_shard=2,ep=2",
    "tp=2,pp=2,dp_shard=2,ep=2",
    "tp=2,pp=2,dp_shard=2,ep=4",
    "dp_shard=8,ep=4",
    model=MODELS,
)
def test_shared_out(runs, model, spec):
    """Each rank has whole experts; the last micro-batch is ragged, so that data ranks bring unlike numbers of rows."""
    runs.check(Script(model=model).with_accumulation(2), spec)


@pytest.mark.parametrize(
    ("spec", "bf16"), [("tp=2", False), ("dp_shard=2,ep=2", True), ("tp=2,dp_shard=2,ep=2", True)]
)
def test_parts_narrower_than_a_kernel_reads(runs, spec, bf16):
    """torch's grouped products take multiples of 16 bytes: 6 columns in fp32 and 12 in bf16 are none."""
    runs.check(Script(model="mixtral_narrow", arguments=(("bf16", bf16),)), spec, BF16 if bf16 else None)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("spec", ["tp=2", "tp=2,ep=2", "tp=2,dp_shard=2,ep=4"])
def test_whole_sequences(runs, model, spec):
    """Without sequence parallelism tp ranks have the same tokens: each sends its share, of an odd number."""
    runs.check(Script(model=model, length=15), f"{spec},sequence_parallel=false")


@pytest.mark.parametrize("spec", ["dp_shard=2,ep=2", "dp_shard=4,ep=4", "tp=2", "cp=2,ep=2", "tp=2,pp=2,ep=2"])
def test_idle_experts(runs, spec):
    """Two experts of eight get every token; others have gradients, zeros, and a rank without tokens takes part."""
    runs.check(Script(model="mixtral_idle"), spec)


@pytest.mark.parametrize("spec", ["dp_shard=4,ep=4", "tp=2,ep=2", "pp=2,dp_shard=2,ep=2"])
def test_one_expert_gets_every_token(runs, spec):
    """Seven of eight are idle, and all ranks send all their tokens to one of them."""
    runs.check(Script(model="mixtral_one"), spec)


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("dp_shard=2", {}),
        ("tp=2", {"length": 15}),
        ("dp_shard=4,ep=4", {}),
        ("tp=2,dp_shard=2,ep=4", {"uneven_lengths": True}),
    ],
)
def test_balance_over_all_rows(runs, spec, changes):
    """The auxiliary loss is no mean over rows: that of one process, of each micro-batch, without its padding."""
    runs.check(Script(model="mixtral_balanced", **changes).with_accumulation(2), spec)


@pytest.mark.parametrize("spec", ["tp=2", "tp=2,ep=2", "dp_shard=4,ep=2", "pp=2,dp_shard=2,ep=2"])
def test_clipping(runs, spec):
    """The norm counts each expert once."""
    runs.check(Script(model="qwen3_moe", arguments=(("max_grad_norm", 0.1),)), spec)


@pytest.mark.parametrize("route", ["from_config", "unequal"])
@pytest.mark.parametrize("spec", ["tp=2", "tp=2,dp_shard=2,ep=2"])
def test_from_config(runs, spec, route):
    """Experts are cut in memory, not on reading."""
    runs.check(Script(model="mixtral", route=route), spec)


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=4,ep=2"])
def test_gradient_checkpointing(runs, spec):
    """Tokens travel a second time."""
    runs.check(Script(model="deepseek_moe", arguments=(("gradient_checkpointing", True),)), spec)


def load_logged(spec: str, initial: str, out: str) -> list[dict[str, float]]:
    """What a Trainer logs of experts, on one rank."""
    data_ranks = activate(spec)
    settings = {"max_steps": 2, "optim": "adamw_torch", "learning_rate": 5e-5, "lr_scheduler_type": "linear"}
    model, rows = AutoModelForCausalLM.from_pretrained(initial), data("llama", 16, TRAIN_SEED)
    trainer, _ = trainer_of(model, out, data_ranks, settings, train_dataset=rows)
    trainer.train()
    return [{key: entry[key] for key in entry if "expert" in key} for entry in trainer.state.log_history[:2]]


@pytest.mark.parametrize("spec", ["dp_shard=2,ep=2", "tp=2,pp=2", "cp=2,ep=2"])
def test_load_is_logged(runs, tmp_path, spec):
    """Two of eight experts have all tokens, about as many each: four times the mean, a third of the entropy."""
    for logs in run(load_logged, axes(spec)["world"], spec, runs.initial("mixtral_idle"), str(tmp_path), init=False):
        for entry in logs:
            assert 4 <= entry["expert_load"] <= entry["expert_load_worst"] <= 8
            assert 0 <= entry["expert_entropy"] <= 1 / 3


ADAPTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "spec",
    ["tp=2", "tp=2,pp=2", "dp_shard=2,ep=2", "dp_shard=4,ep=2", "tp=2,dp_shard=2,ep=4", "pp=2,tp=2,ep=2"],
)
def test_adapters(runs, spec, model):
    """Of experts and routers, beside those of attention."""
    script = Script(model=model, lora=lora(("o_proj",), target_parameters=ADAPTED))
    runs.check(script.with_accumulation(2), spec)


@pytest.mark.parametrize("spec", ["tp=2", "tp=2,pp=2", "dp_shard=2,ep=2"])
def test_adapters_of_alternating_columns(runs, spec):
    """GPT-OSS keeps each column of the gate beside that of the product: parts are in the model's own order."""
    targets = (*ADAPTED[:2], "mlp.router.weight")
    runs.check(Script(model="gpt_oss", lora=lora(("o_proj",), target_parameters=targets)), spec)


@pytest.mark.parametrize("spec", ["tp=2", "tp=2,dp_shard=2"])
def test_adapters_of_dense_experts(runs, spec):
    """PEFT takes Llama 4's weights, kept as [in, out], for [out, in]: A runs along the outputs there."""
    targets = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
    script = Script(model="llama4", lora=lora(("o_proj",), target_parameters=targets))
    runs.check(script.with_accumulation(2), spec)


def stored_here(spec: str) -> tuple[int, int]:
    """Numbers that this rank stores: of experts, and of all parameters."""
    from hf_parallel import parallelize
    from hf_parallel.ranks.mesh import get_stored

    model = parallelize(models.build("mixtral"), spec)
    sizes = {name: get_stored(parameter).numel() for name, parameter in model.named_parameters()}
    return sum(size for name, size in sizes.items() if ".experts." in name), sum(sizes.values())


@pytest.mark.parametrize(
    "spec",
    ["tp=2,dp_shard=2,ep=2", "dp_shard=4,ep=4", "dp_replicate=2,dp_shard=2,ep=2", "cp=2,dp_shard=2,ep=2"],
)
def test_what_a_rank_stores(spec):
    """Of experts one part in ep x ep_shard, of everything what doctor says."""
    whole = sum(p.numel() for name, p in models.build("mixtral").named_parameters() if ".experts." in name)
    config = ParallelConfig.parse(spec)
    said = examine(models.build("mixtral"), config).parameters_per_rank
    for (experts, all_), expected in zip(run(stored_here, axes(spec)["world"], spec), said, strict=True):
        assert experts == whole // (config.ep_size * config.ep_shard_size)
        assert all_ == expected


def travelled(spec: str, name: str) -> tuple[int, int]:
    """Bytes of rows that this rank gives to all-to-alls in a step, and of a row's choices in all layers, per token."""
    from hf_parallel import parallelize

    model = parallelize(models.build(name).train(), spec)
    config, tokens = model.config, torch.arange(3 * 33).view(3, 33)
    given, call = [], dist.all_to_all_single

    def counted(output: torch.Tensor, rows: torch.Tensor, *args: object, **kwargs: object) -> object:
        given.append(rows.nbytes if rows.is_floating_point() else 0)
        return call(output, rows, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        model(input_ids=tokens, labels=tokens).loss.backward()
    layers = sum(".experts.gate_up" in key for key, _ in model.named_parameters())
    return sum(given), layers * len(tokens) * config.num_experts_per_tok * config.hidden_size * 4


@pytest.mark.parametrize(
    ("spec", "length"),
    [("dp_shard=2,ep=2", 33), ("dp_shard=4,ep=4", 33), ("tp=2,ep=2", 34 / 2)],  # tp ranks have 34 / 2 tokens each
)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_bytes_that_travel(spec, length, name):
    """A row for each token and choice, there and back, and so do their gradients."""
    found = run(travelled, axes(spec)["world"], spec, name)
    assert sum(given for given, _ in found) == 4 * length * sum(rows for _, rows in found)


def test_resumes_on_any_layout(runs, tmp_path):
    """ep=4 -> tp=2,pp=2 -> one process: the same checkpoint bit for bit, and the same steps after it."""
    folder = runs.initial("deepseek_moe")
    job = {"folder": folder, "out": str(tmp_path / "one")}
    alone, former = trained(ONE, job)[0], None
    built, found = models.build("deepseek_moe"), []
    for number, spec in enumerate(("dp_shard=4,ep=4", "tp=2,pp=2", ONE)):
        resume = None if former is None else f"{former.folder}/checkpoint-{STOP}"
        ended = trained(spec, {"folder": folder, "out": str(tmp_path / str(number)), "resume": resume})[0]
        steps = range(1 if former is None else STOP + 1, STEPS + 1)
        found += [f"{spec}: {text}" for text in log_differences(ended, alone, steps, 1e-4)]
        if former is not None:
            pair = (f"{run.folder}/checkpoint-{STOP}" for run in (ended, former))
            found += [f"{spec}: {text}" for text in checkpoint_differences(*pair, built)]
        former = ended
    none(found)


@pytest.mark.parametrize(
    ("model", "spec", "said"),
    [
        ("mixtral", "dp_shard=3,ep=3", "ep_size=3: does not divide the 4 experts .* ep_size=1 works"),
        ("llama", "dp_shard=2,ep=2", "ep_size=2: LlamaForCausalLM has no experts .* ep_size=1 works"),
        ("mixtral", "tp=2,dp_shard=2,ep=3", "ep_size=3: is no multiple of tp_size=2; ep_size=2 works"),
        ("mixtral", "dp_shard=4,ep=3", "ep_size=3: does not divide dp_shard_size=4 .* ep_size=2 works"),
    ],
)
def test_refused(runs, model, spec, said):
    with pytest.raises((RankFailure, ValueError), match=said):
        runs.parallel(Script(model=model), spec)
