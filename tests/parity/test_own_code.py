"""Layers that a script has written: with the numbers of one process, or refused with a setting that has them."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import hf_parallel
from hf_parallel import SpecError
from hf_parallel.apply import own_code
from tests import models
from tests.distributed import run, run_alone
from tests.loops import losses, rows
from tests.refusals import pattern_of_refusal
from tests.training import activate, axes, check_numbers

ODD = {"num_hidden_layers": 7}


# ---- what scripts change --------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A bottleneck (Houlsby et al., 2019), which treats each token by itself."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up, self.gate = nn.Linear(width, 5), nn.Linear(5, width), nn.Parameter(torch.zeros(width))

    def forward(self, hidden):
        return hidden + self.up(F.relu(self.down(hidden))) * (1 + self.gate)


class AdaptedLayer(modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return self.adapter(super().forward(hidden_states, *args, **kwargs))


class ShiftedLayer(modeling_llama.LlamaDecoderLayer):
    """Adds what the token before had (RWKV's token shift)."""

    def forward(self, hidden_states, *args, **kwargs):
        hidden = super().forward(hidden_states, *args, **kwargs)
        return hidden + 0.3 * F.pad(hidden, (0, 0, 1, 0))[:, :-1]


class CountedLayer(modeling_llama.LlamaDecoderLayer):
    """Keeps a mean over its tokens for the model's loss."""

    def forward(self, hidden_states, *args, **kwargs):
        hidden = super().forward(hidden_states, *args, **kwargs)
        self.mean = hidden.square().mean()
        return hidden


class CountingModel(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, attention_mask=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, labels=labels, attention_mask=attention_mask, **kwargs)
        if labels is not None:
            outputs.loss = outputs.loss + 0.1 * sum(layer.mean for layer in self.model.layers)
        return outputs


class PlainAttention(modeling_llama.LlamaAttention):
    """Its own products, past transformers' interface."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (modeling_llama.repeat_kv(one, self.num_key_value_groups) for one in (k, v))
        scores = q @ k.transpose(2, 3) * self.scaling
        scores = scores + torch.full(scores.shape[-2:], float("-inf"), device=scores.device).triu(1)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(*shape[:2], -1)), None


class SquaredMLP(modeling_llama.LlamaMLP):
    """Primer's activation (So et al., 2021), of each column by itself."""

    def forward(self, x):
        return self.down_proj(F.relu(self.gate_proj(x)).square() * self.up_proj(x))


class NormalisedMLP(modeling_llama.LlamaMLP):
    """A norm over the columns that tp splits."""

    def forward(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner / (inner.square().mean(-1, keepdim=True) + 1).sqrt())


class MeanMLP(modeling_llama.LlamaMLP):
    """Keeps a running mean of its outputs, if told to over all ranks."""

    over_ranks = False

    def forward(self, x):
        out = super().forward(x)
        if self.training:
            mean = out.detach().mean((0, 1))
            if self.over_ranks:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.mean.lerp_(mean, 0.1)
        return out - self.mean


class LoRA(nn.Module):
    """Beside the linear that it is put around (Hu et al., 2022), with a bias and a norm."""

    def __init__(self, linear):
        super().__init__()
        wide_in, wide_out = linear.weight.shape[::-1] if isinstance(linear, nn.Linear) else linear.weight.shape
        self.linear, self.norm = linear, nn.LayerNorm(5)
        self.A, self.B = nn.Linear(wide_in, 5, bias=False), nn.Linear(5, wide_out)

    def forward(self, x):
        return self.linear(x) + self.B(self.norm(self.A(x)))


class MergedLoRA(nn.Linear):
    """A linear that computes with the sum of its weights, as loralib's, of columns of one length (DoRA)."""

    @classmethod
    def around(cls, linear):
        new = cls(linear.in_features, linear.out_features, bias=False)
        new.weight.data.copy_(linear.weight.data)
        new.A, new.B = (
            nn.Parameter(torch.randn(5, new.in_features) / 10),
            nn.Parameter(torch.randn(new.out_features, 5)),
        )
        return new

    def forward(self, x):
        weight = self.weight + self.B @ self.A / 10
        return F.linear(x, weight / weight.norm(dim=1, keepdim=True))


class PlacedEmbedding(nn.Module):
    """Learned positions, counted by itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.places, self.weight = inner, nn.Embedding(64, inner.embedding_dim), inner.weight

    def forward(self, ids):
        return self.inner(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


def change(model, kind):
    torch.manual_seed(3)
    layers, width = model.model.layers, model.config.hidden_size
    if kind == "prune":
        for layer in layers:
            prune.l1_unstructured(layer.mlp.down_proj, "weight", 0.4)
    elif kind == "spectral":
        for layer in layers:
            spectral_norm(layer.mlp.down_proj)
    elif kind == "places":
        model.model.embed_tokens = PlacedEmbedding(model.model.embed_tokens)
    elif kind in ("squares", "norms", "means"):
        for layer in layers:
            layer.mlp.__class__ = {"squares": SquaredMLP, "norms": NormalisedMLP, "means": MeanMLP}[kind]
            layer.mlp.register_buffer("mean", torch.zeros(width))
    elif kind in ("lora", "merged"):
        for owner in (owner for layer in layers for owner in (layer.self_attn, layer.mlp)):
            for name, linear in list(owner.named_children()):
                if name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
                    setattr(owner, name, LoRA(linear) if kind == "lora" else MergedLoRA.around(linear))
    elif kind == "attention":
        for layer in layers:
            layer.self_attn.__class__ = PlainAttention
    else:
        for layer in layers:
            layer.__class__ = {"adapters": AdaptedLayer, "shift": ShiftedLayer, "counts": CountedLayer}[kind]
            layer.adapter = Adapter(width) if kind == "adapters" else None
        model.__class__ = CountingModel if kind == "counts" else LlamaForCausalLM
    return model


def train(spec, kind):
    """Losses of three steps, and norms of the weights after them."""
    model = change(models.build("llama", **ODD), kind).train()
    model = hf_parallel.parallelize(model, spec) if spec else model
    found = losses(model, [rows(3, 33).to(model.device)] * 3, rate=0.5)
    return found + [float(tensor.double().norm()) for tensor in hf_parallel.full_state_dict(model).values()]


# ---- equal, or refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *((kind, spec) for kind in ("adapters", "squares") for spec in ("tp=2", "cp=2", "tp=2,cp=2")),
        *((kind, spec) for kind in ("lora", "merged") for spec in ("tp=2", "tp=2,sequence_parallel=false")),
        ("lora", "tp=2,pp=2"),
        ("merged", "tp=4"),
        ("attention", "tp=2"),
        ("attention", "pp=2"),
        ("prune", "cp=2"),
        ("spectral", "dp_shard=2"),
    ],
)
def test_layers_that_a_part_can_compute(kind, spec):
    ranks = run(train, axes(spec)["world"], spec, kind)
    alone = run_alone(train, None, kind)
    check_numbers([one[:3] for one in ranks], alone[:3])
    check_numbers(ranks[:1], alone)


@pytest.mark.parametrize(
    ("kind", "spec", "what", "names", "works"),
    [
        ("shift", "tp=2", "tp_size=2", ("ShiftedLayer",), "sequence_parallel=false"),
        ("counts", "tp=2", "tp_size=2", ("CountedLayer",), "sequence_parallel=false"),
        ("shift", "cp=2", "cp_size=2", ("ShiftedLayer",), "cp_size=1"),
        ("attention", "cp=2", "cp_size=2", ("PlainAttention", "model.layers.0.self_attn"), "cp_size=1"),
        ("attention", "cp=2,tp=2", "cp_size=2", ("PlainAttention",), "cp_size=1"),
        ("places", "cp=2", "cp_size=2", ("PlacedEmbedding",), "cp_size=1"),
        ("norms", "tp=2", "tp_size=2", ("NormalisedMLP",), "tp_size=1"),
        ("prune", "tp=2", "tp_size=2", ("L1Unstructured",), "tp_size=1"),
        ("spectral", "pp=2", "pp_size=2", ("_SpectralNorm", "micro-batch"), "pp_size=1"),
        ("means", "pp=2", "pp_size=2", ("MeanMLP", "micro-batch"), "pp_size=1"),
    ],
)
def test_layers_that_need_more_than_a_part(kind, spec, what, names, works):
    run(_refuses, axes(spec)["world"], spec, kind, pattern_of_refusal(what, *names, works=works))


def _refuses(spec, kind, pattern):
    with pytest.raises(SpecError, match=pattern):
        train(spec, kind)


@pytest.mark.parametrize("kind", ["shift", "counts"])
def test_whole_sequences_are_the_way_out(kind):
    spec = "tp=2,sequence_parallel=false"
    check_numbers(run(train, 2, spec, kind)[:1], run_alone(train, None, kind))


def _step_on_own_rows(over_ranks, ranks):
    """The loss of a step of which each data rank has two rows, and the running mean after it."""
    model = change(models.build("llama", **ODD), "means").train()
    MeanMLP.over_ranks = over_ranks
    model = hf_parallel.parallelize(model, f"dp_shard={ranks}")
    own = rows(4, 33).chunk(ranks)[dist.get_rank()].to(model.device)
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    dist.all_reduce(loss)
    return [loss.item() / ranks, float(model.model.layers[5].mlp.mean.norm())]


def _keeps_its_own(ranks):
    with pytest.raises(SpecError, match=pattern_of_refusal("2 data ranks", "MeanMLP", works="train with one")):
        _step_on_own_rows(False, ranks)


def test_statistics_of_data_ranks():
    """One process's where the script reduces them, else refused."""
    run(_keeps_its_own, 2, 2)
    (alone,) = run(_step_on_own_rows, 1, True, 1)
    check_numbers(run(_step_on_own_rows, 2, True, 2), alone)


class ScoredModel(LlamaForCausalLM):
    """Takes more than tokens, and returns a tuple."""

    def forward(self, input_ids, bonus, labels=None):
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * bonus.mean(), logits


def _train_scored(spec, kind):
    model = change(models.build("llama", **ODD), kind)
    model.__class__ = ScoredModel
    model = hf_parallel.parallelize(model, spec) if spec else model
    batch = rows(3, 33).to(model.device)
    loss, _ = model(batch, bonus=torch.tensor([1.0, 2.0, 4.5], device=batch.device), labels=batch)
    loss.backward()
    return [loss.item(), float(hf_parallel.clip_grad_norm(model, 1.0))]


def _refuses_to_copy(spec):
    model = change(models.build("llama", **ODD), "adapters")
    model.model.lock = threading.Lock()
    with pytest.raises(SpecError, match=pattern_of_refusal("tp_size=2", "AdaptedLayer", "tried", works="tp_size=1")):
        hf_parallel.parallelize(model, spec)


def test_what_nothing_copies_cannot_be_tried():
    run(_refuses_to_copy, 2, "tp=2")


def _refuses_scored(pattern):
    with pytest.raises(SpecError, match=pattern):
        _train_scored("tp=2", "shift")


def test_below_a_head_that_takes_more_than_tokens():
    """The head reads whole outputs; its layers are tried without it."""
    check_numbers(run(_train_scored, 2, "tp=2", "adapters"), run_alone(_train_scored, None, "adapters"))
    run(_refuses_scored, 2, pattern_of_refusal("tp_size=2", "ShiftedLayer", works="sequence_parallel=false"))


def train_packed(spec, name):
    """LoRA on packed weights, and on those of which no plan is published, but not on all."""
    model = models.build(name).train()
    for key, linear in list(model.named_modules()):
        owner, _, leaf = key.rpartition(".")
        if leaf in ("c_attn", "c_proj", "qkv_proj", "gate_up_proj", "query_key_value"):
            setattr(model.get_submodule(owner), leaf, LoRA(linear))
    model = hf_parallel.parallelize(model, spec) if spec else model
    return losses(model, [rows(3, 33).to(model.device)] * 3, rate=0.5)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gpt_neox"])
def test_lora_on_packed_weights(name):
    check_numbers(run(train_packed, 2, "tp=2", name), run_alone(train_packed, None, name))


# ---- classes that are loaded, and code that comes late --------------------------------------------------------------


class Adapted(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        change(self, "adapters")
        self.__class__ = Adapted
        self.post_init()


class Shifted(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        change(self, "shift")
        self.__class__ = Shifted
        self.post_init()


def _load_and_train(spec, folder, most):
    activate(spec)
    own_code.LARGEST = most
    model = Adapted.from_pretrained(folder).train()
    return losses(model, [rows(3, 33).to(model.device)] * 2, rate=0.5)


@pytest.mark.parametrize("most", [own_code.LARGEST, 1000])
def test_a_class_of_the_script_is_loaded(tmp_path, most):
    """On the meta device, where a copy's weights are drawn; a large model's copy has few layers."""
    torch.manual_seed(5)
    Adapted(models.CONFIGS["llama"](**ODD)).save_pretrained(tmp_path)
    expected = run_alone(_load_and_train, None, str(tmp_path), most)
    check_numbers(run(_load_and_train, 2, "tp=2", str(tmp_path), most, init=False), expected)


def _refuses_to_load(folder):
    activate("tp=2")
    with pytest.raises(
        SpecError, match=pattern_of_refusal("tp_size=2", "ShiftedLayer", works="sequence_parallel=false")
    ):
        Shifted.from_pretrained(folder, dtype=torch.bfloat16)


def test_a_class_of_the_script_is_refused_before_its_weights_are_read(tmp_path):
    torch.manual_seed(5)
    Shifted(models.CONFIGS["llama"](**ODD)).save_pretrained(tmp_path)
    run(_refuses_to_load, 2, str(tmp_path), init=False)


def _change_late(spec):
    model = hf_parallel.parallelize(models.build("llama", **ODD), spec)
    modeling_llama.LlamaAttention.forward = PlainAttention.forward
    with pytest.raises(
        SpecError, match=pattern_of_refusal("cp_size=2", "model.layers.0.self_attn", works="cp_size=1")
    ):
        model(input_ids=rows(3, 33))


def test_code_that_comes_after_the_split():
    run(_change_late, 2, "cp=2")


def _count_hooks(spec):
    model, seen = change(models.build("llama", **ODD), "adapters"), []
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model = hf_parallel.parallelize(model, spec)
    before = len(seen)
    model(input_ids=rows(3, 33).to(model.device))
    return before, len(seen)


def test_hooks_are_not_called_on_copies():
    assert run(_count_hooks, 2, "tp=2") == [(0, 1)] * 2


def test_layers_of_libraries_are_not_tried():
    for name in models.CONFIGS:
        assert own_code.find_own_code(models.build(name)) == {}, name
