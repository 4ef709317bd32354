"""Adapters of PEFT on a module that is no model of Transformers: data ranks train them as one process does."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModel

pytest.importorskip("peft")

from peft import (
    BOFTConfig,
    C3AConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)

from hf_parallel.ask.config import SpecError
from tests.distributed import run, run_alone
from tests.rows import CLASSES, LENGTH, VOCABULARY, data
from tests.training import Outcome, activate, check_numbers, fit, trainer_of

WIDTH = 15


class Mixer(nn.Module):
    """Tokens through an embedding, convolutions, attention and linears to a class: sizes that no rank divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.image = nn.Conv2d(1, 7, (LENGTH, 3))
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.first = nn.Linear(WIDTH, 21)
        self.norm = nn.LayerNorm(21)
        self.last = nn.Linear(21, WIDTH, bias=False)
        self.score = nn.Linear(7 * (WIDTH - 2), CLASSES)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.tokens(input_ids)
        hidden = hidden + self.wide(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + self.last(self.norm(self.first(hidden)).relu())
        logits = self.score(self.image(hidden.unsqueeze(1)).flatten(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


LINEARS = ["first", "last"]
EVERYTHING = ["tokens", "wide", "image", "first", "last"]
CONFIGS = {
    "lora": LoraConfig(target_modules=[*EVERYTHING, "attention"], r=3, lora_alpha=1, init_lora_weights=False),
    "lora with a copy": LoraConfig(
        target_modules=LINEARS, r=3, init_lora_weights=False, modules_to_save=["score", "wide"]
    ),
    "convolutions": LoraConfig(target_modules=EVERYTHING, r=3, init_lora_weights=False),
    "dora": LoraConfig(target_modules=["wide", "image", *LINEARS], r=3, use_dora=True),
    "rows": LoraConfig(target_modules=["first"], r=3, target_parameters=["last.weight"]),
    "pissa": LoraConfig(target_modules=LINEARS, r=3, init_lora_weights="pissa"),
    "biases": LoraConfig(target_modules=LINEARS, r=3, bias="all"),
    "ia3": IA3Config(target_modules=["image", *LINEARS], feedforward_modules=["last"]),
    "loha": LoHaConfig(target_modules=["wide", "image", *LINEARS], r=3),
    "lokr": LoKrConfig(target_modules=["wide", "image", *LINEARS], r=3, modules_to_save=["score"]),
    "oft": OFTConfig(target_modules=["first"], oft_block_size=5, r=0),
    "boft": BOFTConfig(target_modules=["first"], boft_block_size=3, boft_block_num=0),
    "c3a": C3AConfig(target_modules=["first"], block_size=3),
    "vera": VeraConfig(target_modules=["first"], r=3),
}


def adapted(spec: str | None, out: str, kind: str, before: bool = False, **settings) -> Outcome:
    """Train adapters of a kind on the module, in steps of two ragged batches, and save them.

    Args:
        before: the layout begins after the adapters were put in.
    """
    data_ranks = 1 if before else activate(spec)
    model = Mixer()
    torch.manual_seed(7)
    model = get_peft_model(model, CONFIGS[kind])
    data_ranks = activate(spec) if before else data_ranks
    settings = {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "label_names": ["labels"], **settings}
    sets = {"train_dataset": data("bert", 44, 11), "eval_dataset": data("bert", 13, 12)}
    outcome = fit(*trainer_of(model, out, data_ranks, settings, **sets), f"{out}/saved")
    outcome.more = scores(model)
    return outcome


def scores(model: nn.Module) -> list[float]:
    with torch.no_grad():
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH).to(next(model.parameters()).device)
        return model(input_ids=tokens)["logits"].double().norm(dim=-1).tolist()


@pytest.mark.support("LoRA")
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "dp_shard=2,zero_stage=1"])
def test_as_in_one_process(runs, kind, spec):
    ranks = runs.compare(adapted, spec, kind)
    check_numbers([rank.more for rank in ranks], runs.alone(adapted, kind).more)


@pytest.mark.parametrize("kind", ["lora", "ia3", "lokr"])
def test_from_before_the_layout(runs, kind):
    runs.compare(adapted, "dp_shard=2", kind, True)


def injected(spec: str | None, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A loop with adapters that have no PeftModel around them, as in diffusers; what it computes, and saves."""
    activate(spec)
    accelerator, model = Accelerator(cpu=True), Mixer()
    torch.manual_seed(7)
    model = inject_adapter_in_model(CONFIGS[kind], model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loader = DataLoader(data("bert", 11, 11), batch_size=4 if spec is None else 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for _ in range(2):
        for batch in loader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    saved = get_peft_model_state_dict(accelerator.unwrap_model(model))
    again = inject_adapter_in_model(CONFIGS[kind], Mixer())
    set_peft_model_state_dict(again, saved)
    return found + scores(model) + scores(again), {key: value.detach().clone() for key, value in saved.items()}


@pytest.mark.parametrize("kind", ["lora", "ia3", "loha"])
@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2"])
def test_injected(kind, spec):
    one, saved = run_alone(injected, None, kind)
    ranks = run(injected, 2, spec, kind, init=False)
    check_numbers([numbers for numbers, _ in ranks], one)
    for _, tensors in ranks:
        assert tensors.keys() == saved.keys()
        for key, value in tensors.items():
            torch.testing.assert_close(value, saved[key], rtol=1e-5, atol=1e-6)


def merged(spec: str | None, folder: str, kind: str) -> list[float]:
    """Adapters of a folder: active, off, merged, taken out again, deleted beside others, merged for good."""
    activate(spec)
    model = PeftModel.from_pretrained(Mixer(), folder, is_trainable=True)
    found = scores(model)
    with model.disable_adapter():
        found += scores(model)
    model.merge_adapter()
    found += scores(model)
    model.unmerge_adapter()
    found += scores(model)
    return found + scores(model.merge_and_unload())


@pytest.mark.parametrize("kind", ["convolutions", "dora", "ia3", "lokr"])
def test_loaded_and_merged(runs, kind):
    folder = runs.alone(adapted, kind).folder
    one = run_alone(merged, None, folder, kind)
    check_numbers(run(merged, 2, "dp_shard=2", folder, kind, init=False), one)


class Around(nn.Module):
    """A module around a model of Transformers, whose layers its adapters are in."""

    def __init__(self, folder: str):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder)
        torch.manual_seed(5)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.head(self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def around(spec: str | None, out: str, folder: str) -> Outcome:
    data_ranks = activate(spec)
    model = Around(folder)
    torch.manual_seed(7)
    model = get_peft_model(model, LoraConfig(target_modules=["query", "dense"], r=3, modules_to_save=["head"]))
    sets = {"train_dataset": data("bert", 19, 11), "eval_dataset": data("bert", 5, 12)}
    return fit(*trainer_of(model, out, data_ranks, {"label_names": ["labels"]}, **sets), f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "cp=2"])
def test_around_a_model(runs, spec):
    runs.compare(around, spec, runs.initial("bert"))


def refused(spec: str) -> str:
    activate(spec)
    with pytest.raises(SpecError) as caught:
        get_peft_model(Mixer(), LoraConfig(target_modules=LINEARS))
    return str(caught.value)


@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "cp=2"])
def test_other_axes_are_refused(spec):
    text = run(refused, 2, spec, init=False)[0]
    assert spec.replace("=", "_size=") in text
    assert "works" in text
