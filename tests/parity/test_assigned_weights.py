"""Values that a script puts into the place of weights: `module.weight = nn.Parameter(x)`, `p.data` after a forward.

Sizes are odd: 515 rows of vocabulary, 3 layers, one key/value head, rows of 33 tokens.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_parallel
from tests.distributed import RankFailure, run, run_alone_once
from tests.refusals import find_line
from tests.rows import Rows
from tests.training import TRAIN_SEED, activate, axes, close, layouts, none, tensor_differences

ODD = {"num_hidden_layers": 3, "vocab_size": 515, "num_key_value_heads": 1}
#: Relative; a value that is lost moves the losses by 1e-2.
NEAR = 1e-5


@pytest.fixture(scope="module")
def initial(runs):
    """Folders of untrained models: packed projections, and tied ends."""
    return {name: runs.initial(name, **sizes) for name, sizes in {"phi3": ODD, "qwen3": ODD}.items()}


def start(spec, folder):
    activate(spec)
    return AutoModelForCausalLM.from_pretrained(folder)


def batch():
    return Rows(4, TRAIN_SEED, even=True, length=33)[:4]


def drawn(parameter, seed):
    return 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def exchange(model, seed):
    """New parameters in the place of those of every kind: rows, columns, norms and both ends."""
    attention = model.model.layers[1].self_attn
    inner = getattr(attention, "qkv_proj", None) or attention.q_proj
    for module in (inner, attention.o_proj, model.model.layers[2].input_layernorm, model.model.norm):
        module.weight = nn.Parameter(drawn(module.weight, seed))
    embedding, head = model.get_input_embeddings(), model.lm_head
    embedding.weight = nn.Parameter(drawn(embedding.weight, seed))
    if model.config.tie_word_embeddings:
        model.tie_weights()
    else:
        head.weight = nn.Parameter(drawn(head.weight, seed))


def as_in_one_process(loop, folder, spec):
    """Losses and norms of each rank, and the weights in the end, are those of the same loop in one process."""
    numbers, weights = run_alone_once(loop, folder)
    ranks = run(loop, axes(spec)["world"], folder, spec, init=False)
    for seen, _ in ranks:
        for step, (ours, theirs) in enumerate(zip(seen, numbers, strict=True)):
            none(close(f"number {step}", ours, theirs, NEAR))
    none(tensor_differences("weights", ranks[0][1], weights, 2e-6))  # absolute; steps move them by 1e-3 and more


def exchanging(folder, spec=None):
    """Before the first forward, between steps, and where a forward without a backward has gathered the weights."""
    model, rows, losses = start(spec, folder), batch(), []
    for turn in range(4):
        if turn == 2:
            model(**rows)
        if turn != 3:
            exchange(model, turn)
        if turn == 0 or "dp_" not in (spec or ""):  # a sharded model has the parameters it had
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, hf_parallel.full_state_dict(model)


SPECS = ("tp=2", "dp_shard=2", "pp=2", *(f"dp_shard=2,zero_stage={stage}" for stage in (0, 1)), "tp=2,dp_shard=2")


@pytest.mark.parametrize("name", ["phi3", "qwen3"])
@pytest.mark.parametrize("spec", layouts("library", *SPECS))
def test_parameters_that_are_exchanged(spec, name, initial):
    """`module.weight = nn.Parameter(x)` trains on with x, as in one process."""
    as_in_one_process(exchanging, initial[name], spec)


def refused(folder, spec):
    """Lines that would be lost, or train nothing."""
    model, rows = start(spec, folder), batch()
    embedding, head, norm = model.get_input_embeddings(), model.lm_head, model.model.norm
    own = nn.Parameter(drawn(head.weight, 1))
    head.weight = own
    found = []

    def note(line):
        with pytest.raises(hf_parallel.SpecError) as error:
            line()
        found.append(str(error.value))

    note(lambda: setattr(head, "weight", embedding.weight))
    note(lambda: setattr(norm, "weight", nn.Parameter(torch.ones(63))))
    note(torch.optim.SGD([own]).step)
    model(**rows).loss.backward()
    for gathered in (False, True):
        if gathered:
            model(**rows)
        former, norm._parameters["weight"] = norm.weight, nn.Parameter(torch.ones(64))
        note(lambda: model(**rows))
        norm._parameters["weight"] = former
    return found


@pytest.mark.parametrize("spec", layouts("library", "dp_shard=2,zero_stage=2", "dp_replicate=2,zero_stage=0"))
def test_what_would_be_lost_is_refused(spec, initial):
    """Weights tied afterwards, another shape, an optimizer of what the model does not train, tables: one line each."""
    for lines in run(refused, 2, initial["phi3"], spec, init=False):
        tied, shape, taken, *past = lines
        assert tied.startswith("lm_head.weight = nn.Parameter(x): ")
        assert find_line(shape, "model.norm.weight = nn.Parameter(x)", "(63,)", "(64,)")
        assert find_line(taken, "an optimizer of the x in lm_head.weight = nn.Parameter(x)", "model.parameters()")
        assert len(past) == 2
        named = "another parameter for model.norm.weight", "module.weight.data = x"
        assert all(find_line(line, *named) for line in past)


def after_a_forward(folder, spec=None):
    """What is written into parameters after a forward with gradients and no backward is what the next one reads."""
    model, rows, losses = start(spec, folder), batch(), []
    own = dict(model.named_parameters())  # as an optimizer has them
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    chosen = [p for name, p in own.items() if name.endswith(("norm.weight", "o_proj.weight", "embed_tokens.weight"))]
    writes = (
        lambda p: p.data.mul_(0.5),
        lambda p: p.data.copy_(p.data * 3),
        lambda p: p.data.zero_() if p.ndim == 1 else None,
        lambda p: setattr(p, "data", p.data + 0.25),
    )
    for write in writes:
        losses.append(model(**rows).loss.item())
        for p in chosen:
            write(p)
    model(**rows).loss.backward()
    losses.append(model(**rows).loss.item())  # a number to look at, between backward and step
    optimizer.step()
    optimizer.zero_grad()
    twice = [model(**rows).loss, model(**rows).loss]  # two passes, one backward
    (twice[0] + 2 * twice[1]).backward()
    optimizer.step()
    return [*losses, *(loss.item() for loss in twice)], hf_parallel.full_state_dict(model)


STAGES = ("dp_shard=2", "dp_shard=2,zero_stage=1", "dp_shard=2,zero_stage=2", "dp_replicate=2,zero_stage=0")


@pytest.mark.parametrize("name", ["phi3", "qwen3"])
@pytest.mark.parametrize("spec", layouts("library", *STAGES, "pp=2,dp_shard=2", "tp=2,dp_shard=2,zero_stage=1"))
def test_writes_between_forwards(spec, name, initial):
    """Gathered weights are not kept beyond a forward whose backward has not come when the next one begins."""
    as_in_one_process(after_a_forward, initial[name], spec)


def by_hand(folder, spec=None):
    """SGD without an optimizer in a loop that knows nothing of the runner; norms, and a weight that is exchanged."""
    model, rows, seen = AutoModelForCausalLM.from_pretrained(folder), batch(), []
    if spec:
        torch.distributed.init_process_group("gloo")
        hf_parallel.parallelize(model, spec)
    model.model.norm.weight = nn.Parameter(drawn(model.model.norm.weight, 3))
    for _ in range(2):
        loss = model(**rows).loss
        loss.backward()
        seen += [loss.item(), float(model.get_input_embeddings().weight.grad.norm())]
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad
            p.grad = None
    return seen, hf_parallel.full_state_dict(model)


@pytest.mark.parametrize("spec", layouts("library", "tp=2", "dp_shard=2", "tp=2,dp_shard=2"))
def test_library_alone(spec, initial):
    """Without the runner `p.data = x` is stored, too."""
    as_in_one_process(by_hand, initial["phi3"], spec)


def loading_a_plain_model(folder, spec=None):
    """A model that is made in code takes the weights of a parallel one, as in pipelines that train a copy."""
    model = start(spec, folder)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    return [plain(**batch()).loss.item()], {name: tensor.clone() for name, tensor in plain.state_dict().items()}


@pytest.mark.parametrize(("spec", "name"), [("dp_shard=2", "qwen3"), ("tp=2", "phi3"), ("tp=2,dp_shard=2", "phi3")])
def test_a_plain_model_takes_whole_weights(spec, name, initial):
    as_in_one_process(loading_a_plain_model, initial[name], spec)


def test_a_plain_model_cannot_take_those_of_a_stage(initial):
    with pytest.raises(RankFailure, match=r"pp_size=2: .*stage; copy\.deepcopy\(model\) or pp_size=1 works"):
        run(loading_a_plain_model, 2, initial["phi3"], "pp=2", init=False)
