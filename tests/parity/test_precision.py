"""Linears in 8 bits on every layout, against torchao's own conversion of the plain model in one process.

The reference multiplies the rows that one rank multiplies at once: a data rank's, or a micro-batch's, one after the
other, as scales are made of them.
"""

import dataclasses
import functools
import re

import pytest
import torch
from torch import nn

from tests import models
from tests.counting import CountCollectives
from tests.distributed import run, run_alone
from tests.training import activate, axes

pytest.importorskip("torchao")

ROWS, LENGTH, STEPS = 8, 33, 3
SHAPE = {"vocab_size": 515, "num_hidden_layers": 4, "intermediate_size": 96}
RECIPES = [
    ("fp8", "tensorwise"),
    ("fp8", "rowwise"),
    ("fp8", "rowwise_with_gw_hp"),
    ("int8", "rowwise"),
    ("int8", "rowwise_with_gw_hp"),
]


def keys_of(recipe):
    return "precision={},precision_scaling={}".format(*recipe)


def in_blocks(module, name):
    return isinstance(module, nn.Linear) and "layers." in name and "lora_" not in name


def convert(model, precision, scaling):
    """What a torchao script does."""
    if precision == "int8":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        full = scaling == "rowwise_with_gw_hp"
        quantize_(model, Int8MixedPrecisionTrainingConfig(grad_weight=not full, module_swap=True), in_blocks)
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=True)
    convert_to_float8_training(model, module_filter_fn=in_blocks, config=config)


def asked(spec):
    """Precision and scaling of a spec."""
    precision = re.search(r"precision=(\w+)", spec)[1]
    scaling = re.search(r"precision_scaling=(\w+)", spec)
    return precision, scaling[1] if scaling else "tensorwise" if precision == "fp8" else "rowwise"


# ---- regions: every operand is rounded as in one process ------------------------------------------------------------


def region_inputs(model):
    """What enters, the gradient of what leaves, and the rotations, of an odd number of tokens."""
    generator = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(3, 36, 64, generator=generator) for _ in range(2))
    x[:, 33:], gradient[:, 33:] = 0.0, 0.0  # tokens that only fill a row
    places = torch.arange(36).unsqueeze(0)
    return x, gradient, model.model.rotary_emb(x, places)


def through(model, part, cut=lambda tensor: tensor):
    """Output of the attention or MLP of a layer, gradients of its input and weights."""
    x, gradient, rotations = region_inputs(model)
    x = cut(x).detach().clone().requires_grad_()
    region = model.model.layers[0].get_submodule(part)
    more = {"position_embeddings": rotations, "attention_mask": None} if part == "self_attn" else {}
    model.zero_grad()
    output = region(x, **more)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(cut(gradient))
    gradients = {name: parameter.grad for name, parameter in region.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **gradients}


def regions_alone():
    found = {}
    for recipe in RECIPES:
        model = models.build("llama", **SHAPE)
        convert(model, *recipe)
        found[recipe] = {part: through(model, part) for part in ("self_attn", "mlp")}
    return found


@functools.cache
def reference_of_regions():
    return run_alone(regions_alone)


def regions(settings):
    """The same on one rank of tp, with what it has put together to the whole."""
    import hf_parallel
    from hf_parallel.ranks import cut_sequence

    found = {}
    for recipe in RECIPES:
        model = hf_parallel.parallelize(models.build("llama", **SHAPE), f"tp=-1,{keys_of(recipe)}{settings}")
        mesh = model._hf_parallel.mesh
        group = mesh["tp"].get_group()
        cut = (lambda tensor: cut_sequence(tensor, group)[group.rank()]) if not settings else lambda x: x  # noqa: B023

        def whole(name, tensor):
            if hasattr(tensor, "full_tensor"):
                return tensor.full_tensor()
            if settings or name not in ("output", "input"):
                return tensor
            parts = [torch.empty_like(tensor) for _ in range(group.size())]  # noqa: B023
            torch.distributed.all_gather(parts, tensor.contiguous(), group=group)  # noqa: B023
            return torch.cat([part.flatten(0, -2) for part in parts]).view(3, 36, 64)

        found[recipe] = {
            part: {name: whole(name, tensor) for name, tensor in through(model, part, cut).items()}
            for part in ("self_attn", "mlp")
        }
    return found


@pytest.mark.parametrize("settings", ["", ",sequence_parallel=false"], ids=["sp", "whole"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_regions_round_as_torchao_does(ranks, settings):
    """The same codes, whoever holds a part of what a scale is made of; sums of fp32 in another order.

    Four ranks share two key heads.
    """
    expected = reference_of_regions()
    for found in run(regions, ranks, settings):
        for recipe, part, name in ((r, p, n) for r in RECIPES for p in found[r] for n in found[r][p]):
            ours, theirs = found[recipe][part][name], expected[recipe][part][name]
            gap = (ours - theirs).abs().max() / theirs.abs().max()
            assert gap < 2e-6, (recipe, part, name, gap)


# ---- layouts: whole steps -------------------------------------------------------------------------------------------


def tokens(step):
    return torch.randint(0, 515, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def pieces(spec):
    """What is multiplied at once is this part of a batch."""
    return axes(spec)["data_ranks"] * (2 if "pp=" in spec else 1)


def build(dtype=torch.float32):
    return models.build("llama", **SHAPE).to(dtype).train()


def steps(model, calls, own=lambda rows: rows, share=1, norm=None):
    """Losses, norms and keys of gradients of three steps on these rows, in so many calls each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"losses": [], "norms": [], "keys": []}
    norm = norm or (lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for step in range(STEPS):
        total = 0.0
        for piece in own(tokens(step)).chunk(calls):
            loss = model(input_ids=piece, labels=piece, num_items_in_batch=ROWS * (LENGTH - 1)).loss
            (loss * share).backward()
            total += loss.item()
        found["keys"].append({name for name, p in model.named_parameters() if p.grad is not None})
        found["norms"].append(float(norm(model)))
        found["losses"].append(total)
        optimizer.step()
        optimizer.zero_grad()
    return found


def alone(recipe, calls, dtype=torch.float32):
    """torchao in one process; without a recipe the plain model."""
    model = build(dtype)
    if recipe:
        convert(model, *recipe)
    found = steps(model, calls)
    return found, dict(model.state_dict())


def parallel(spec, calls=1, dtype=torch.float32):
    """The same on one rank, and the bytes that the last step has gathered."""
    import hf_parallel
    from hf_parallel.apply.parallelize import clip_grad_norm
    from hf_parallel.checkpoint import gather_state_dict

    model = hf_parallel.parallelize(build(dtype), spec)
    mesh = model._hf_parallel.mesh
    own = lambda rows: rows.chunk(mesh.data_size)[mesh.data_rank]  # noqa: E731
    found = steps(model, calls, own, mesh.data_size, lambda model: clip_grad_norm(model, 1e9))
    return found, gather_state_dict(model, mesh)


def off(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def compare(ranks, expected, loss, norm, weights):
    """Of all ranks together; data ranks have the losses of their own rows."""
    reference, whole = expected
    losses = {tuple(found["losses"]) for found, _ in ranks}
    assert off([sum(step) for step in zip(*losses, strict=True)], reference["losses"]) <= loss
    assert off(ranks[0][0]["norms"], reference["norms"]) <= norm
    for step in range(STEPS):
        assert set().union(*(found["keys"][step] for found, _ in ranks)) == reference["keys"][step]
    saved = ranks[0][1]
    if weights is None:
        return
    assert saved.keys() == whole.keys()
    assert max((saved[name] - whole[name]).abs().max() for name in whole) <= weights


FP8 = ",precision=fp8"
#: No sum is cut: the codes are the same, and so is all else but the order in which gradients are added.
EXACT = {"loss": 1e-6, "norm": 1e-6, "weights": 1e-6}
#: Sums in another order are 1e-7 apart. Of a million numbers some lie so close to the middle between two codes, move
#: to the other one, 6 % of their size away, and move more behind them. torchao in one process does the same when it
#: starts from weights 1e-7 apart: loss 5e-4, norm 7e-3 to 1.4e-2, weights 3e-3. What a layout itself does is compared
#: above.
MOVED = {"loss": 3e-3, "norm": 4e-2, "weights": 8e-3}
LAYOUTS = {
    "dp_shard=2": EXACT,
    "dp_shard=2,precision_scaling=rowwise": EXACT,
    "dp_shard=2,zero_stage=2": EXACT,
    "dp_shard=2,zero_stage=1,activation_checkpointing=full": EXACT,
    "dp_shard=2,offload=cpu": EXACT,
    "dp_replicate=2,dp_shard=2": EXACT,
    "pp=2,pipeline_microbatches=2": EXACT,
    "pp=2,pipeline_microbatches=2,pipeline_schedule=zbv_zero_bubble": EXACT,
    # Four gradients are added two by two: 1e-7 in a weight, which moves codes from the third step on.
    "pp=2,dp_shard=2,pipeline_microbatches=2": MOVED,
    "tp=2": MOVED,
    "tp=2,precision_scaling=rowwise_with_gw_hp": MOVED,
    "tp=2,activation_checkpointing=selective": MOVED,
    "tp=2,dp_shard=2": MOVED,
    "tp=2,dp_shard=2,activation_checkpointing=full": MOVED,
    "tp=2,pp=2,pipeline_microbatches=2": MOVED,
}


@functools.cache
def reference(recipe, calls):
    return run_alone(alone, recipe, calls)


@pytest.mark.parametrize("spec", LAYOUTS)
def test_layouts_train_as_torchao_does(spec):
    expected = reference(asked(spec + FP8), pieces(spec))
    compare(run(parallel, axes(spec)["world"], spec + FP8), expected, **LAYOUTS[spec])


def test_accumulation_and_16_bit_weights():
    """Two calls a step; weights of bf16 are rounded to fp8 as they are, and gathered so."""
    spec = "dp_shard=2" + FP8
    compare(run(parallel, 2, spec, 2), reference(asked(spec), 4), **EXACT)
    # In one process gradients are added up in bf16, which keeps 8 bits, over data ranks in fp32.
    narrow = {"loss": 2e-2, "norm": 5e-2, "weights": 2e-2}
    compare(run(parallel, 2, spec, 1, torch.bfloat16), run_alone(alone, asked(spec), 2, torch.bfloat16), **narrow)


# ---- adapters -------------------------------------------------------------------------------------------------------


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(models.SEED)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets))


def adapters_alone(recipe, calls):
    model = build()
    convert(model, *recipe)
    return steps(with_adapters(model), calls), {}


def adapters(spec):
    activate(spec)
    from hf_parallel.apply.parallelize import clip_grad_norm, state_of

    model = with_adapters(build()).train()
    base = model.get_base_model()
    mesh = state_of(base).mesh
    own = lambda rows: rows.chunk(mesh.data_size)[mesh.data_rank]  # noqa: E731
    found = steps(model, 1, own, mesh.data_size, lambda _: clip_grad_norm(base, 1e9))
    found["keys"] = [set(keys) for keys in found["keys"]]
    return found, {}


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2,pipeline_microbatches=2", "tp=2", "tp=2,dp_shard=2"])
def test_adapters_on_a_base_in_fp8(spec):
    pytest.importorskip("peft")
    expected = run_alone(adapters_alone, asked(spec + FP8), pieces(spec))
    limits = MOVED if "tp=" in spec else EXACT
    ranks = run(adapters, axes(spec)["world"], spec + FP8, init=False)
    compare(ranks, expected, **{**limits, "weights": None})


# ---- what travels ---------------------------------------------------------------------------------------------------


def gathered(spec):
    """Bytes gathered in one step."""
    import hf_parallel

    model = hf_parallel.parallelize(build(), spec)
    mesh = model._hf_parallel.mesh
    rows = tokens(0).chunk(mesh.data_size)[mesh.data_rank]
    with CountCollectives() as counted:
        model(input_ids=rows, labels=rows).loss.backward()
    return counted.whole["gather"]


def in_layers():
    with torch.device("meta"):
        model = models.build("llama", **SHAPE)
    return sum(m.weight.numel() for name, m in model.named_modules() if in_blocks(m, name))


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("dp_shard=2", 2 * in_layers()),  # each weight, in both passes
        ("dp_shard=2,zero_stage=2", in_layers()),
        # What enters attention and MLP, again for their weights' gradients, and the gradient of what leaves them.
        ("tp=2", 4 * 6 * ROWS * (LENGTH + 1) * 64),
        ("tp=2,precision_scaling=rowwise", 0),
    ],
)
def test_one_byte_per_number_is_gathered(spec, numbers):
    """Instead of four."""
    (ours, _), (plain, _) = run(gathered, 2, spec + FP8), run(gathered, 2, spec.partition(",precision_scaling")[0])
    assert plain - ours == pytest.approx(3 * numbers, rel=1e-3)


# ---- an unchanged script --------------------------------------------------------------------------------------------


def script(spec, folder, out, resume=None):
    from tests import resuming

    activate(spec)
    ended, _ = resuming.train(folder, out, 2 if spec else 1, resume=resume, bf16=True)
    return ended.logs


def test_checkpoints_are_ordinary_and_resume_without_fp8(runs, tmp_path):
    """Of a Trainer script under bf16 and fp8: fp32 weights by their own names, with which one process goes on."""
    from safetensors.torch import load_file

    folder = runs.initial("llama")
    logs = run(script, 4, "tp=2,dp_shard=2" + FP8, folder, str(tmp_path / "fp8"), init=False)[0]
    saved = load_file(tmp_path / "fp8" / "checkpoint-4" / "model.safetensors")
    assert {(name, value.dtype) for name, value in saved.items()} == {
        (name, torch.float32) for name in load_file(f"{folder}/model.safetensors")
    }
    plain = run_alone(script, None, folder, str(tmp_path / "plain"), str(tmp_path / "fp8" / "checkpoint-4"))
    assert sorted(plain) == [5, 6]
    for step in plain:  # one step, and two, without the noise of fp8
        assert plain[step]["loss"] == pytest.approx(logs[step]["loss"], rel=2e-2)


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusal(spec, name="llama", world=2, **machine):
    """Why a model cannot have this on such a machine."""
    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.plans.resolve import draft_plan, read_model

    config = ParallelConfig.parse(spec).resolve(world)
    anatomy = read_model(models.build(name, **({} if name != "llama" else SHAPE)), config)
    facts = dataclasses.replace(anatomy.facts["precision"], **machine)
    plan = draft_plan(config, dataclasses.replace(anatomy, facts={**anatomy.facts, "precision": facts}))
    return [problem for problem in plan.problems if problem.startswith("precision")]


@pytest.mark.parametrize(
    ("spec", "model", "machine", "words"),
    [
        ("precision=fp8", "llama", {"device": "cuda", "capability": (8, 0)}, ("8.9", "8.0", "precision=int8 works")),
        ("precision=fp8", "llama", {"device": "cuda", "capability": (7, 0)}, ("8.9", "7.0", "precision=auto works")),
        ("precision=int8", "llama", {"device": "cuda", "capability": (7, 5)}, ("8.0", "7.5", "precision=auto works")),
        ("precision=int8", "llama", {"device": "cuda", "capability": (9, 0), "triton": False}, ("triton",)),
        ("precision=fp8", "llama", {"device": "xpu"}, ("xpu", "precision=auto works")),
        ("precision=fp8", "llama", {"torchao": None}, ("torchao 0.18", "none is installed")),
        ("precision=fp8", "llama", {"torchao": (0, 9)}, ("torchao 0.18", "0.9")),
        ("precision=fp8", "gpt2", {}, ("GPT2LMHeadModel", "Conv1D", "precision=auto works")),
        ("tp=2,precision=fp8", "deepseek_v3", {}, ("q_a_proj", "tp_size=2", "tp_size=1 works")),
        ("tp=4,precision=fp8", "phi3", {}, ("qkv_proj", "tp_size=4", "tp_size=2 works")),
        (
            "tp=2,precision=fp8",
            "llama",
            {"device": "cuda", "capability": (9, 0), "linears": {"model.layers.0.mlp.up_proj": (64, 48)}},
            ("tp_size=2", "24 of 48", "tp_size=1 works"),
        ),
    ],
)
def test_what_lacks_something_is_refused_by_name(spec, model, machine, words):
    (line,) = refusal(spec, model, 4 if "tp=4" in spec else 2, **machine)
    assert all(word in line for word in (spec.rpartition(",")[2], *words)), line


@pytest.mark.parametrize(
    ("spec", "works"),
    [
        ("precision_scaling=rowwise", "precision=fp8"),
        ("precision=int8,precision_scaling=tensorwise", "precision_scaling=rowwise"),
        ("tp=2,tp_overlap=true,precision=fp8", "tp_overlap=false"),
        ("precision=fp4", "int8"),
    ],
)
def test_contradictions_are_refused(spec, works):
    from hf_parallel.ask.config import ParallelConfig, SpecError

    with pytest.raises(SpecError, match=works):
        ParallelConfig.parse(spec)
