"""What scripts do with a model beside training it: asking, walking, printing, freezing, initialising, copying.

Each idiom runs on every rank as in one process and gives what it gives there. Sizes are odd: 515 rows of vocabulary
over two ranks, 7 layers over two stages, rows of 33 tokens.
"""

import contextlib
import copy
import inspect
import io
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertForMaskedLM,
    MarianConfig,
    MarianMTModel,
    Trainer,
)
from transformers.pytorch_utils import Conv1D

import hf_parallel
from tests import models
from tests.distributed import run, run_alone, run_alone_once
from tests.rows import Pairs, Rows
from tests.training import (
    activate,
    axes,
    check_numbers,
    close,
    fit,
    none,
    tensor_differences,
    trainer_of,
    weight_differences,
)

SPECS = ("dp_shard=2", "tp=2", "pp=2", "tp=2,pp=2", "tp=2,dp_shard=2")
ODD = {"llama": {"num_hidden_layers": 7}, "qwen3": {"num_hidden_layers": 7}, "gpt2": {"n_layer": 7}}
ROWS = 515


@pytest.fixture(scope="module")
def initial(runs):
    """Folders of untrained models, by name."""
    return {name: runs.initial(name, vocab_size=ROWS, **ODD[name]) for name in ODD}


def load(folder, spec):
    activate(spec)
    return AutoModelForCausalLM.from_pretrained(folder)


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


# ---- asking -------------------------------------------------------------------------------------------------------


def sizes(model):
    """Lines of the example scripts of transformers, PEFT and TRL."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = embedding.weight
    return {
        "vocabulary": (weight.shape[0], embedding.num_embeddings, embedding.embedding_dim, weight.dtype),
        "head": (head.in_features, head.out_features, model.lm_head.weight.shape, head.bias is None),
        "tied": weight is head.weight,
        "devices": (str(weight.device), str(head.weight.device), str(model.device)),
        "kinds": (isinstance(embedding, nn.Embedding), isinstance(head, nn.Linear), type(head).__name__),
        "parameters": (isinstance(head.weight, nn.Parameter), head.weight.requires_grad, head.weight.ndim),
        "dtypes": (model.dtype, head.weight.element_size(), head.weight.is_floating_point()),
        "numbers": (model.num_parameters(), model.num_parameters(only_trainable=True)),
        "without embeddings": model.num_parameters(exclude_embeddings=True),
        "bytes": model.get_memory_footprint(),
        "config": (model.config.vocab_size, model.can_generate(), model.generation_config.max_length),
        "kept": model.resize_token_embeddings(ROWS) is embedding,
    }


def walk(model):
    """Loops over layers and over named modules, as those that look for LoRA's targets."""
    layers = layers_of(model)
    attentions = [layer.self_attn if hasattr(layer, "self_attn") else layer.attn for layer in layers]
    modules = dict(model.named_modules())
    model.tie_weights()
    return {
        "layers": (len(layers), len(list(layers)), type(layers[-1]).__name__, len(layers[1:3])),
        "attentions": [(type(one).__name__, one.layer_idx, one.head_dim) for one in attentions],
        "names": list(modules),
        "kinds": [type(module).__name__ for module in modules.values()],
        "linears": [name for name, module in modules.items() if isinstance(module, nn.Linear)],
        "conv1d": [name for name, module in modules.items() if isinstance(module, Conv1D)],
        "shapes": [m.weight.shape for m in modules.values() if isinstance(m, nn.Linear | Conv1D | nn.Embedding)],
        "submodule": type(model.get_submodule(next(name for name in modules if name.endswith("1.mlp")))).__name__,
        "decoder": type(model.get_decoder()).__name__,
        "printed": str(model),
        "training": ([m.training for m in model.eval().modules()], [m.training for m in model.train().modules()]),
    }


def methods(model):
    """What LlamaFactory and others look up in methods."""
    bound = [model.generate, model.save_pretrained, model.resize_token_embeddings, model.prepare_inputs_for_generation]
    return {
        "owners": [method.__func__.__qualname__ for method in bound],
        "signatures": [str(inspect.signature(method)) for method in [*bound, model.forward, model.num_parameters]],
        "bound": all(isinstance(method, types.MethodType) and method.__self__ is model for method in bound),
    }


def adapters(model):
    """What PEFT's scripts print."""
    from peft import LoraConfig, get_peft_model

    names = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=sorted(names - {"lm_head"}))
    return {"targets": names, "adapters": get_peft_model(model, config).get_nb_trainable_parameters()}


def ask(folder, spec=None):
    model = load(folder, spec)
    return {key: value for question in (sizes, walk, methods, adapters) for key, value in question(model).items()}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ODD)
def test_answers_of_every_rank(initial, name, spec):
    """A model answers on every rank as in one process."""
    expected = run_alone_once(ask, initial[name])
    for found in run(partial(ask, initial[name], spec), axes(spec)["world"], init=False):
        for key in expected:
            assert found[key] == expected[key], key


def draw_tokens(folder, spec=None):
    """Tokens that a model draws, and the next random number."""
    model = load(folder, spec).eval()
    torch.manual_seed(5)
    prompts = torch.arange(21).view(3, 7)
    return model.generate(prompts, do_sample=True, max_new_tokens=9, pad_token_id=0).tolist(), torch.rand(1).item()


@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_tokens_are_drawn_as_in_one_process(initial, spec):
    expected = run_alone_once(draw_tokens, initial["llama"])
    assert run(partial(draw_tokens, initial["llama"], spec), axes(spec)["world"], init=False) == [
        expected for _ in range(axes(spec)["world"])
    ]


def test_what_needs_values_of_another_stage_is_refused_by_name(initial):
    """One line says what is meant, who holds it and what to call."""

    def read():
        model = load(initial["llama"], "pp=2")
        first = dist.get_rank() == 0
        foreign = model.lm_head if first else model.model.layers[0].mlp.up_proj
        name, stage = ("lm_head", 1) if first else ("model.layers.0.mlp.up_proj", 0)
        for read in (lambda w: w.sum().item(), torch.Tensor.tolist, lambda w: w + torch.ones(1), lambda w: w.cpu()):
            with pytest.raises(RuntimeError, match=f"{name}.weight .*stage {stage}.*full_state_dict"):
                read(foreign.weight)
        with pytest.raises(RuntimeError, match=rf"{name} .*\b{stage}\b.*pp_size=1 works"):
            foreign(torch.zeros(1, 64))
        return repr(foreign.weight)

    assert "size=(515, 64)" in run(read, 2, init=False)[0]


def resize_and_step(folder, rows, spec=None):
    """Change the vocabulary of a model of two stacks, or of one whose head has a bias, and take a step."""
    activate(spec)
    torch.manual_seed(7)
    kind = AutoModelForMaskedLM if "masked" in folder else AutoModelForSeq2SeqLM
    model = kind.from_pretrained(folder).eval()
    embedding = model.resize_token_embeddings(rows)
    found = {
        "sizes": (embedding.num_embeddings, model.config.vocab_size),
        "weights": hf_parallel.full_state_dict(model),
    }
    tokens = torch.randint(5, rows, (2, 9), generator=torch.Generator().manual_seed(1))
    outputs = model(input_ids=tokens, labels=tokens)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = {name: tensor.clone() for name, tensor in hf_parallel.full_state_dict(model).items()}
    return {**found, "logits": outputs.logits.shape, "after": after, "next": torch.rand(1).item()}


def tie_and_train(folder, out, spec=None, resume=None):
    """Resize the vocabulary of a T5 whose stacks have embeddings of their own: then they share one."""
    ranks = activate(spec)
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.resize_token_embeddings(519)
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-3,
    }
    trainer, recorder = trainer_of(model, out, ranks, settings, train_dataset=Pairs(22, 11, length=33))
    trainer.train(resume_from_checkpoint=resume)
    return [log["loss"] for log in recorder.logs], hf_parallel.full_state_dict(model)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_weights_that_a_script_has_tied_are_saved_once(runs, tmp_path, spec):
    """Files, and moments, have one name for them, as in one process; another layout goes on from there."""
    folder, alone, ours = runs.initial("t5"), str(tmp_path / "alone"), str(tmp_path / "ours")
    losses, state = run_alone(tie_and_train, folder, alone)
    seen, whole = run(tie_and_train, 2, folder, ours, spec, init=False)[0]
    none(tensor_differences("weight", whole, state, 1e-5))
    none(weight_differences(f"{ours}/checkpoint-2", f"{alone}/checkpoint-2", 1e-5))
    for source, layout in ((ours, "dp_replicate=2"), (alone, spec)):
        given = folder, str(tmp_path / layout), layout, f"{source}/checkpoint-2"
        rest, _ = run(tie_and_train, 2, *given, init=False)[0]
        check_numbers([rest], losses[2:])
    check_numbers([seen], losses)


def clip_one_by_one(folder, spec=None):
    """Norms of gradients that are clipped parameter by parameter, and what is left of them."""
    model = load(folder, spec)
    model(**Rows(4, 11, even=True, length=33)[:4]).loss.backward()
    once = {name: float(torch.nn.utils.clip_grad_norm_(p, 0.01)) for name, p in model.named_parameters()}
    left = {name: float(torch.nn.utils.clip_grad_norm_(p, 1.0)) for name, p in model.named_parameters()}
    return {name: (norm, left[name]) for name, norm in once.items()}


@pytest.mark.parametrize("spec", ["pp=2", "tp=2", "dp_shard=2"])
def test_clips_each_parameter_by_its_own_norm(initial, spec):
    """Stages have unlike parameters, so none waits for another."""
    expected = run_alone_once(clip_one_by_one, initial["llama"])
    ranks = run(clip_one_by_one, axes(spec)["world"], initial["llama"], spec, init=False)
    assert set().union(*ranks) == set(expected)
    for name, norms in ((name, norms) for found in ranks for name, norms in found.items()):
        none([line for pair in zip(norms, expected[name], strict=True) for line in close(name, *pair, 1e-5)])


def compare_weights(folder, spec=None):
    """Change the last row of two layers' weights, and another layer by little; compare all with what they were."""
    model = load(folder, spec)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if "down_proj" in name and (".2." in name or ".5." in name):
            p.data[-1].zero_()
        elif ".1." in name:
            p.data.add_(1e-4)
    pairs = {name: (p, before[name]) for name, p in model.named_parameters()}
    return {
        "compared": list(pairs),
        "unequal": [name for name, pair in pairs.items() if not torch.equal(*pair)],
        "by_method": [name for name, (p, former) in pairs.items() if not p.data.equal(former)],
        "far": [name for name, pair in pairs.items() if not torch.allclose(*pair, atol=1e-3)],
    }


@pytest.mark.parametrize("spec", [*SPECS, "pp=2,dp_shard=2"])
def test_weights_are_compared_as_whole_tensors(initial, spec):
    """Each rank that has a part of a weight gets one answer, whatever other stages compare meanwhile."""
    alone = run_alone_once(compare_weights, initial["llama"])
    assert len(alone["far"]) == 2
    assert len(alone["unequal"]) == len(alone["by_method"]) > 10
    for rank in run(compare_weights, axes(spec)["world"], initial["llama"], spec, init=False, timeout=60):
        for kind in ("unequal", "by_method", "far"):
            assert rank[kind] == [name for name in alone[kind] if name in rank["compared"]]


@pytest.mark.parametrize("rows", [ROWS + 7, ROWS - 6])
@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
def test_an_embedding_with_more_ties_than_a_head_is_resized(runs, name, rows):
    """T5's and BART's stacks share theirs, BART adds a bias to logits, and BERT's bias of the head has two names."""
    folder = runs.initial(name)
    if name == "bert":
        folder += "-masked"
        run_alone(lambda: BertForMaskedLM(models.bert(tie_word_embeddings=True)).save_pretrained(folder))
    expected = run_alone(partial(resize_and_step, folder, rows))
    for spec in ("dp_shard=2", "dp_shard=2,tp=2"):
        first, *others = run(partial(resize_and_step, folder, rows, spec), axes(spec)["world"], init=False)
        for found in (first, *others):
            assert [found[key] for key in ("sizes", "logits", "next")] == [
                expected[key] for key in ("sizes", "logits", "next")
            ]
        torch.testing.assert_close(first["weights"], expected["weights"], rtol=0, atol=0)
        torch.testing.assert_close(first["after"], expected["after"], rtol=0, atol=2e-6)


def test_what_else_grows_with_a_vocabulary_is_told():
    """Marian with two vocabularies has its own way to resize the decoder's."""

    def resize():
        activate("dp_shard=2")
        sizes = {"vocab_size": 15, "decoder_vocab_size": 17, "d_model": 8, "share_encoder_decoder_embeddings": False}
        sizes |= {"encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1, "tie_word_embeddings": False}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        model = hf_parallel.parallelize(MarianMTModel(MarianConfig(**sizes)))
        with pytest.raises(NotImplementedError, match="15 .*16 .*MarianMTModel.*; .*save"):
            model.resize_token_embeddings(16)

    run(resize, 2, init=False)


# ---- changing -----------------------------------------------------------------------------------------------------


def change(model):
    """Add tokens, set rows by hand, initialise anew; the weights after it, whole."""
    torch.manual_seed(7)
    found = {}
    embedding = model.resize_token_embeddings(new_num_tokens=ROWS + 1)
    found["size"] = (embedding.weight.shape, model.lm_head.weight.shape, model.config.vocab_size)
    found["grown"] = hf_parallel.full_state_dict(model)
    weight = model.get_input_embeddings().weight
    weight.data[-3:] = weight.data[:-3].mean(dim=0, keepdim=True)
    with torch.no_grad():
        model.get_output_embeddings().weight[1] = weight.data.mean(dim=0) if model.config.tie_word_embeddings else 0.5
    model.get_input_embeddings().weight.data[ROWS // 2].zero_()
    model.get_input_embeddings().weight.data[3:7][1].mul_(2)
    rows = model.get_input_embeddings().weight.data
    rows[8] = torch.stack([rows[2], rows[9]]).sum(0) + torch.mul(2.0, other=rows[ROWS - 1])
    torch.add(rows[2], rows[3], out=rows[10])
    found["rows"] = hf_parallel.full_state_dict(model)
    for layer in (layers_of(model)[0], layers_of(model)[5]):
        for module in layer.mlp.modules():
            if isinstance(module, nn.Linear | Conv1D):
                nn.init.kaiming_uniform_(module.weight, a=2)
                nn.init.normal_(module.weight, std=0.1)
                nn.init.xavier_uniform_(module.weight)
                with torch.no_grad():
                    module.weight.add_(torch.randn_like(module.weight), alpha=0.1)
    model.lm_head.weight.data.normal_(mean=0.0, std=0.02)
    found["drawn"] = hf_parallel.full_state_dict(model)
    found["next"] = torch.rand(3)
    return found


def train(model):
    """Freeze, hook, copy; two steps; the copy and what was trained."""
    for parameter in model.base_model.parameters():
        parameter.requires_grad = False
    for name, parameter in model.named_parameters():
        if "layers.3" in name or "h.3" in name or "lm_head" in name or "wte" in name or "embed_tokens" in name:
            parameter.requires_grad = True
    calls = []
    layers_of(model)[5].register_forward_hook(lambda *_: calls.append(1))
    reference = copy.deepcopy(model).eval()
    tokens = torch.randint(0, ROWS + 1, (4, 33), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = {name: hf_parallel.full_tensor(gradient) for name, gradient in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        logits = reference(input_ids=tokens).logits
    values = {name: hf_parallel.full_tensor(p.detach()) for name, p in model.named_parameters()}
    trained, former = hf_parallel.full_state_dict(model), hf_parallel.full_state_dict(reference)
    whole = {name: tensor.detach().clone() for name, tensor in whole.items()}
    text = pickled(model)
    return {
        "losses": losses,
        "called": len(calls) > 0,
        "copy": [p.requires_grad for p in reference.parameters()] == [p.requires_grad for p in model.parameters()],
        "logits": logits.float(),
        "gradients": whole,
        "values": values,
        "trained": trained,
        "former": former,
        "said": text,
    }


def pickled(model):
    """What is said when a script pickles its part, twice."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            torch.save({"model": model.state_dict()}, io.BytesIO())
    return said.getvalue()


def cast(folder):
    """To bf16 before the first forward pass, and back after it."""
    model, tokens = AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16), torch.arange(33).expand(4, -1)
    dtypes = [model(input_ids=tokens).logits.dtype, model.float()(input_ids=tokens).logits.dtype]
    return model.config.vocab_size, dtypes


def both(folder, spec=None):
    model = load(folder, spec)
    return change(model) | train(model) | {"half": cast(folder)}


def of_rank(ours, theirs):
    """Differences in what every rank sees."""
    found = [f"{key}: {ours[key]}" for key in ("size", "copy", "half") if ours[key] != theirs[key]]
    found += tensor_differences(
        "copy and draws", *({key: side[key] for key in ("logits", "next")} for side in (ours, theirs)), 1e-4
    )
    for step in range(2):
        found += close("loss", ours["losses"][step], theirs["losses"][step], 1e-5)  # relative; sums in another order
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ODD)
def test_changes_are_those_of_one_process(initial, name, spec):
    """New rows, rows set by hand and draws are those of one process; so is what training makes of them."""
    expected = run_alone_once(both, initial[name])
    ranks = run(partial(both, initial[name], spec), axes(spec)["world"], init=False)
    first = ranks[0]
    found = [f"rank {i}: {text}" for i, rank in enumerate(ranks) for text in of_rank(rank, expected)]
    for key in ("grown", "rows", "drawn", "former"):
        found += tensor_differences(key, first[key], expected[key], 1e-7)  # a mean of rows is summed in another order
    for key in ("gradients", "values"):
        whole = {k: v for rank in ranks for k, v in rank[key].items()}
        found += tensor_differences(key, whole, expected[key], 1e-5)  # absolute; two steps at 0.5, gradients up to 1
    none(found + tensor_differences("trained", first["trained"], expected["trained"], 1e-5))
    assert any(rank["called"] for rank in ranks)
    assert first["said"].count("full_state_dict") == 1
    assert all(not rank["said"] for rank in ranks[1:])


# ---- adversarial training ------------------------------------------------------------------------------------------


class Adversarial(Trainer):
    """FGM (Miyato et al., 2017): a second backward pass where the embedding is moved along its gradient."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        embeddings = {n: p for n, p in model.named_parameters() if p.requires_grad and "embed_tokens" in n}
        backup = {name: p.data.clone() for name, p in embeddings.items()}
        for p in embeddings.values():
            norm = torch.norm(p.grad)
            if norm != 0 and not torch.isnan(norm):
                p.data.add_(1.0 * p.grad / norm)
        super().training_step(model, inputs, num_items_in_batch)
        for name, p in embeddings.items():
            p.data = backup[name]
        return loss


def attack(spec, out, folder):
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = trainer_of(model, out, data_ranks, kind=Adversarial, train_dataset=Rows(24, 11, length=33))
    return fit(*made, folder=f"{out}/saved")


@pytest.mark.parametrize("spec", ["pp=2", "tp=2", "dp_shard=2", "pp=2,dp_shard=2"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_adversarial_steps(runs, initial, name, spec):
    """The embedding moves on the stages that hold it, tied or not, and by the norm of its whole gradient."""
    runs.compare(attack, spec, initial[name])


def whole_head(folder, spec):
    """The head's weight and its gradient, whole."""
    model = load(folder, spec)
    tokens = torch.arange(33).expand(2, -1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    head = model.get_output_embeddings().weight
    return hf_parallel.full_tensor(head.grad), hf_parallel.full_tensor(head.data), head.detach().shape


def test_a_head_of_the_shape_of_a_packed_weight(runs):
    """Phi-3 packs gate and up into as many rows as this vocabulary has; the head is known not to be packed."""
    folder = runs.initial("phi3", vocab_size=252, intermediate_size=126)
    gradient, weight, _ = run_alone(whole_head, folder, None)
    for ours in run(whole_head, 2, folder, "tp=2", init=False):
        none(tensor_differences("head", {"grad": ours[0]}, {"grad": gradient}, 1e-5))
        assert torch.equal(ours[1], weight)
