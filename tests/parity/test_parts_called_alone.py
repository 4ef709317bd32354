"""Loops that call parts of a model by themselves: its backbone, its embedding, its head, also before the model."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.distributed import run, run_alone_once
from tests.loops import prepare_loop, take_step
from tests.training import activate, axes, check_numbers


def loss_of(model: torch.nn.Module, ids: torch.Tensor, how: str) -> torch.Tensor:
    """What a script makes of a batch."""
    if how == "embedding":
        return model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss
    if how == "look first":
        with torch.no_grad():
            scale = model.base_model(input_ids=ids).last_hidden_state.abs().mean()
        return model(input_ids=ids, labels=ids).loss * scale
    hidden = model.base_model(input_ids=ids).last_hidden_state
    if how == "backbone":
        return hidden.pow(2).mean()
    if how == "backbone and model":
        return model(input_ids=ids, labels=ids).loss + 0.01 * hidden.pow(2).mean()
    logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def train(spec: str | None, folder: str, how: str) -> list[float]:
    """Losses and gradient norms of three steps; all data ranks have the same rows."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    ids, found = torch.arange(66, device=model.device).view(2, 33), []
    for _ in range(3):
        found += take_step(accelerator, model, optimizer, loss_of(model, ids, how))
    return found


HOW = ("embedding", "look first", "backbone", "backbone and model", "backbone and head")


@pytest.mark.parametrize(
    ("how", "spec"),
    [
        *((how, spec) for how in HOW for spec in ("dp_shard=2", "dp_shard=2,zero_stage=2", "dp_replicate=2")),
        *((how, "tp=2,dp_shard=2") for how in HOW),
    ],
)
def test_numbers_of_one_process(runs, spec, how):
    folder = runs.initial("llama")
    ranks = run(train, axes(spec)["world"], spec, folder, how, init=False)
    check_numbers(ranks, run_alone_once(train, None, folder, how))


def train_what_is_left(spec: str | None, folder: str) -> list[float]:
    """A loop that runs the model, then freezes a part of it, and runs it again before it thaws the part."""
    accelerator, model, optimizer = prepare_loop(spec, folder)
    ids, found = torch.arange(66, device=model.device).view(2, 33), []
    for trains in (False, True):
        found.append(float(model(input_ids=ids, labels=ids).loss.detach()))
        for name, parameter in model.named_parameters():
            if "layers" not in name or "layers.1.mlp" in name:
                parameter.requires_grad = trains
        for _ in range(2):
            found += take_step(accelerator, model, optimizer, model(input_ids=ids, labels=ids).loss)
    return found


@pytest.mark.parametrize(
    "spec", ["dp_shard=2", "dp_shard=2,zero_stage=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2", "tp=2,dp_shard=2"]
)
def test_weights_are_frozen_after_a_look(runs, spec):
    """A forward pass without a backward pass leaves weights gathered: what is frozen then are copies."""
    ranks = run(train_what_is_left, axes(spec)["world"], spec, runs.initial("llama"), init=False)
    check_numbers(ranks, run_alone_once(train_what_is_left, None, runs.initial("llama")))


def change(parameter: torch.nn.Parameter, how: str) -> None:
    """Write into a weight, as scripts do."""
    if how == "data":
        parameter.data.mul_(0.5)
    elif how == "assigned":
        parameter.data = parameter.data * 0.5
    else:
        torch.nn.init.normal_(parameter, std=0.05)


def train_what_is_changed(spec: str | None, folder: str, how: str) -> list[float]:
    """A loop that runs the model with gradients and no backward pass, then makes an optimizer and writes."""
    accelerator, model, _ = prepare_loop(spec, folder)
    ids = torch.arange(66, device=model.device).view(2, 33)
    found = [float(model(input_ids=ids, labels=ids).loss.detach())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lm_head" in name or "norm" in name or "q_proj" in name:
            change(parameter, how)
    for _ in range(3):
        found += take_step(accelerator, model, optimizer, model(input_ids=ids, labels=ids).loss)
    return found


@pytest.mark.parametrize("how", ["data", "assigned", "drawn"])
@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,zero_stage=2", "dp_replicate=2", "tp=2,dp_shard=2"])
def test_weights_are_changed_after_a_look(runs, spec, how):
    """What `named_parameters` gives are the stored weights, not copies that a forward pass has left gathered."""
    ranks = run(train_what_is_changed, axes(spec)["world"], spec, runs.initial("llama"), how, init=False)
    check_numbers(ranks, run_alone_once(train_what_is_changed, None, runs.initial("llama"), how))


def change_module(module: torch.nn.Module, how: str) -> None:
    """Write into a module's weight, or freeze it, without asking for parameters."""
    weight = module.weight
    if how == "init":
        torch.manual_seed(3)
        torch.nn.init.normal_(weight, std=0.05)
    elif how == "in place":
        with torch.no_grad():
            weight[:7] *= 0.5
    elif how == "data":
        weight.data.mul_(0.5)
    elif how == "assigned":
        weight.data = weight.data * 0.5
    else:
        module.requires_grad_(False)


def train_what_modules_have(spec: str | None, folder: str, how: str, adapted: bool) -> list[float]:
    """A loop that runs the model without a backward pass and keeps its loss, then changes what its modules have."""
    activate(spec)
    accelerator, model = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(folder)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", modules_to_save=["lm_head"]))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids, found = torch.arange(66, device=model.device).view(2, 33), []
    for step in range(4):
        kept = model(input_ids=ids, labels=ids).loss
        found.append(float(kept.detach()))
        for name, module in model.named_modules():
            owns = isinstance(module._parameters.get("weight"), torch.nn.Parameter)
            if step == 1 and owns and name.endswith(("q_proj.lora_B.default", "q_proj", "norm", "lm_head")):
                change_module(module, how)
        found += take_step(accelerator, model, optimizer, model(input_ids=ids, labels=ids).loss)
        found.append(sum(p.requires_grad for p in model.parameters()))
    head = model.get_output_embeddings()
    made = torch.optim.SGD([{"params": [("head", head.weight)], "lr": 0.1}])
    return found + take_step(accelerator, model, made, model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("spec", "adapted", "how"),
    [
        *(("dp_shard=2", True, how) for how in ("init", "in place", "data", "assigned", "frozen")),
        *(("dp_shard=2", False, how) for how in ("in place", "data")),
        ("dp_shard=2,zero_stage=2", True, "init"),
        ("dp_replicate=2", True, "frozen"),
        *(("tp=2,dp_shard=2", False, how) for how in ("data", "assigned")),
    ],
)
def test_modules_are_changed_after_a_look(runs, spec, adapted, how):
    """What is done to `module.weight` then is done to the stored weight, also of adapters."""
    ranks = run(train_what_modules_have, axes(spec)["world"], spec, runs.initial("llama"), how, adapted, init=False)
    check_numbers(ranks, run_alone_once(train_what_modules_have, None, runs.initial("llama"), how, adapted))


def write_into_rounded(spec: str, folder: str, precision: str) -> None:
    """A loop that runs the model without a backward pass, writes into a module's weight, and runs it again."""
    activate(spec)
    accelerator, model = Accelerator(cpu=True, mixed_precision=precision), AutoModelForCausalLM.from_pretrained(folder)
    model = accelerator.prepare(model)
    ids = torch.arange(66, device=model.device).view(2, 33)
    model(input_ids=ids, labels=ids)
    with torch.no_grad():
        accelerator.unwrap_model(model).lm_head.weight[:7] *= 0.5
    with pytest.raises(NotImplementedError, match=r"Linear.weight .* rounded copy .* model.parameters\(\)"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize(("spec", "precision"), [("dp_shard=2", "bf16"), ("dp_shard=2,quantize_weights=int8", "no")])
def test_rounded_weights_are_not_written_back(runs, spec, precision):
    """All other rows would be rounded, too."""
    run(write_into_rounded, 2, spec, runs.initial("llama"), precision, init=False)


class Scored(torch.nn.Module):
    """A model, and a factor of the script's own."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.factor = inner, torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids).logits * self.factor


def answer_and_train(spec: str | None, folder: str) -> list[float]:
    """Answers of a model inside the script's module come before the module's first forward pass."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    model = Scored(AutoModelForCausalLM.from_pretrained(folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, found = torch.arange(66, device=accelerator.device).view(2, 33), []
    for _ in range(3):
        inner = accelerator.unwrap_model(model).inner
        answers = inner.generate(ids[:, :7], max_new_tokens=3, do_sample=False)
        found.append(float(answers.sum()))
        for alone in (False, True):
            logits = (inner(input_ids=ids).logits if alone else model(ids))[:, :-1]
            logits /= 0.7
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            found += take_step(accelerator, model, optimizer, loss)
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "tp=2", "cp=2", "dp_shard=2,tp=2"])
def test_a_model_inside_a_module_answers_first(runs, spec):
    """Its logits may be changed in place, too."""
    ranks = run(answer_and_train, axes(spec)["world"], spec, runs.initial("llama"), init=False)
    check_numbers(ranks, run_alone_once(answer_and_train, None, runs.initial("llama")))


class Heads(torch.nn.Module):
    """Two heads on a frozen backbone, multiplied by the model's own head (Medusa); the embedding in a second place."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.embedding = inner.requires_grad_(False), inner.get_input_embeddings()
        width = inner.config.hidden_size
        self.heads = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.inner.base_model(inputs_embeds=self.embedding(ids)).last_hidden_state
        return torch.stack([self.inner.get_output_embeddings()(head(hidden)) for head in self.heads])


def train_heads(spec: str | None, folder: str) -> list[float]:
    """Losses and gradient norms of heads beside the model, each of which predicts another token."""
    activate(spec)
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = Heads(AutoModelForCausalLM.from_pretrained(folder))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, found = torch.arange(66, device=accelerator.device).view(2, 33), []
    for _ in range(3):
        logits = model(ids)
        losses = [
            torch.nn.functional.cross_entropy(logits[n, :, : -n - 1].flatten(0, 1), ids[:, n + 1 :].flatten())
            for n in range(2)
        ]
        found += take_step(accelerator, model, optimizer, sum(losses))
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "tp=2", "cp=2", "dp_shard=2,tp=2"])
def test_heads_beside_a_model(runs, spec, kind):
    """A wrapper has the head's logits whole, and may name a part of the model a second time."""
    ranks = run(train_heads, axes(spec)["world"], spec, runs.initial(kind), init=False)
    check_numbers(ranks, run_alone_once(train_heads, None, runs.initial(kind)))
