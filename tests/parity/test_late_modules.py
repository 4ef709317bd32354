"""Modules that a script puts into a model after its first forward pass: as in one process, or refused by name."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_parallel import SpecError
from tests.distributed import run
from tests.rows import VOCABULARY, Rows
from tests.training import Outcome, activate, layouts

ODD = {"num_hidden_layers": 7}


def put_head(model):
    model.lm_head = torch.nn.Linear(64, VOCABULARY, bias=False)


def put_score(model):
    """Beside the model's own: the script runs it, on every stage."""
    model.score = torch.nn.Linear(VOCABULARY, 1)


def put_mlp(model):
    projection = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential(projection, torch.nn.Linear(64, 64))


def put_norm(model):
    model.model.norm = torch.nn.LayerNorm(64)


def put_norms(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm = torch.nn.LayerNorm(64)


def drop_layer(model):
    del model.model.layers[2]


def turn_layers(model):
    layers = model.model.layers
    layers[1], layers[3] = layers[3], layers[1]


def wrap_layer(model):
    """As those who steer or scale what a layer gives; it hands on what the model asks of its layers."""

    class Scaled(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **kwargs):
            return 1.5 * self.layer(*args, **kwargs)

        def __getattr__(self, name):
            return super().__getattr__(name) if name == "layer" else getattr(self.layer, name)

    model.model.layers[5] = Scaled(model.model.layers[5])


class LoRA(torch.nn.Module):
    """As scripts write it: matrices of its own beside the linear that it is put around, which is frozen."""

    def __init__(self, base, rank=5):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = torch.nn.Parameter(torch.randn(rank, base.in_features) / 10)
        self.B = torch.nn.Parameter(torch.randn(base.out_features, rank) / 10)

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


def put_lora(model):
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
                if hasattr(owner, name):
                    setattr(owner, name, LoRA(getattr(owner, name)))


PUT = {"head": put_head, "score": put_score, "mlp": put_mlp, "norm": put_norm, "norms": put_norms}
PUT |= {"dropped": drop_layer, "turned": turn_layers, "wrapped": wrap_layer}
PUT |= {"lora": put_lora, "shared": put_lora}


def script(spec, out, initial, what):
    """A loop whose ranks draw other numbers for what they put in; it clips, so that the norm is in the losses."""
    activate(spec)
    model, batch = AutoModelForCausalLM.from_pretrained(initial), Rows(5, 3, even=True, length=33)[:5]
    with torch.no_grad():
        model(**batch)
    torch.manual_seed(5 + (int(os.environ["RANK"]) if spec else 0))
    PUT[what](model)
    optimizer, logs, keys = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss + (model.score(outputs.logits).pow(2).mean() if what == "score" else 0)
        loss.backward()
        keys.append(sorted(name for name, p in model.named_parameters() if p.grad is not None))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append({"loss": loss.item(), "grad_norm": float(norm)})
    model.save_pretrained(out)
    return Outcome(logs, keys, out)


@pytest.mark.parametrize("what", ["head", "score"])
@pytest.mark.parametrize("spec", layouts("library", "tp=2", "pp=2", "tp=2,pp=2"))
def test_beside_the_layers(runs, spec, what):
    """The numbers that the first rank has drawn; a stage's norm counts what other stages have, too, once."""
    runs.compare(script, spec, runs.initial("llama", **ODD), what)


@pytest.mark.parametrize("what", ["mlp", "norm"])
def test_in_a_layer_of_a_stage(runs, what):
    """Stages have whole layers, and the one that computes with a layer saves it."""
    runs.compare(script, "pp=2", runs.initial("llama", **ODD), what)


@pytest.mark.parametrize("what", ["mlp", "lora", "shared"])
@pytest.mark.parametrize("spec", layouts("library", "tp=2", "tp=2,sequence_parallel=false", "tp=2,pp=2"))
def test_around_a_split_linear(runs, spec, what):
    """The linear keeps its part; what is around it is whole on every rank."""
    changes = {**ODD, "num_key_value_heads": 1} if what == "shared" else ODD
    runs.compare(script, spec, runs.initial("llama", **changes), what)


def check_refused(runs, error, words, spec, what):
    def refused():
        with pytest.raises(error, match=words):
            script(spec, None, runs.initial("llama", **ODD), what)

    run(refused, 2, init=False)


def test_beside_the_linears_of_a_split_layer(runs):
    """A tp rank would train on a part of the tokens what all ranks hold."""
    check_refused(runs, SpecError, "tp_size=2 .* PEFT works", "tp=2", "norms")


OTHER = [("tp=2", "dropped"), ("tp=2", "turned")]


@pytest.mark.parametrize(("spec", "what"), OTHER)
def test_other_layers(runs, spec, what):
    """Ranks that hold parts of all layers run those that the model has now."""
    runs.compare(script, spec, runs.initial("llama", **ODD), what)


def test_other_layers_than_stages_were_cut_from(runs):
    """Stages would go on with those layers, as if the script had changed nothing."""
    check_refused(runs, NotImplementedError, "pp_size=2: .* layers .* pp_size=1 works", "pp=2", "wrapped")
