"""Replicas that share nothing out compute with the weights that are stored, whatever happens to these on the way.

Each case trains on two ranks, does something between the steps, and is compared with one process that does the same
with the rows of both. What is gathered beside the stored weights is counted between forward and backward pass. All of
it holds for models that are reduced layer by layer, and for small ones, which are reduced at once.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_parallel.axes.data import zero
from hf_parallel.axes.data import zero as replicas
from hf_parallel.axes.data.units import iterate_parameter_groups
from tests import models
from tests.distributed import run, run_alone

SIZES = {"num_hidden_layers": 3, "vocab_size": 515}
ROWS = torch.randint(0, 515, (4, 2, 11, 33), generator=torch.Generator().manual_seed(5))  # of a step, of a rank
CASES = ("nothing", "loaded", "assigned", "assigned_slices", "to", "evaluated", "skipped", "tied", "late")


class Low(nn.Module):
    """An adapter: added to what the layer gives."""

    def __init__(self, inside, outside):
        super().__init__()
        self.a, self.b = nn.Linear(inside, 5, bias=False), nn.Linear(5, outside, bias=False)

    def forward(self, values):
        return self.b(self.a(values))


def changed(model):
    """Another state dict, in memory of its own."""
    return {name: value.detach() * 0.9 for name, value in model.state_dict().items()}


def in_one(state):
    """The same values as slices of one memory each, as a file that is mapped has them."""
    found = {}
    for name, value in state.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        part = torch.stack([local, local])[1]
        found[name] = DTensor.from_local(part, value.device_mesh, value.placements) if local is not value else part
    return found


def happen(case, step, model):
    """What the case does before this step."""
    if case == "loaded" and step == 1:
        model.load_state_dict(changed(model))
    elif case.startswith("assigned") and step == 1:
        state = changed(model)
        model.load_state_dict(in_one(state) if case == "assigned_slices" else state, assign=True)
    elif case == "to" and step == 0:
        model.to(torch.float64)
    elif case == "evaluated":
        with torch.inference_mode() if step == 0 else torch.no_grad():
            model.eval()(input_ids=ROWS[step, 0])
        model.train()
    elif case == "skipped":
        model.model.config.num_hidden_layers = (3, 2, 3, 1)[step]
    elif case == "late" and step == 1:
        torch.manual_seed(3)
        layer = model.model.layers[1].mlp.up_proj
        layer.low = Low(64, 128)
        layer.register_forward_hook(lambda module, args, output: output + module.low(*args))


def train(case, ranks, model, after=lambda model: None, held=None):
    """The losses of these ranks' rows, and the weights in the end."""
    losses = []
    for step in range(len(ROWS)):
        happen(case, step, model)
        after(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        tokens = ROWS[step, ranks].flatten(0, -2)
        loss = model(input_ids=tokens, labels=tokens).loss
        if held is not None:
            held.append(beside(model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: whole(p).float() for name, p in model.named_parameters()}


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def beside(model):
    """Bytes that the units hold of weights beside those that are stored, and of those."""
    groups = list(iterate_parameter_groups(model))
    known = {p._sharded_param_data.untyped_storage()._cdata: p for group in groups for p in group.fsdp_params}
    memory = [out.untyped_storage() for group in groups for p in group.fsdp_params for out in p.all_gather_outputs]
    stored = sum(p._sharded_param_data.nbytes for p in known.values())
    return sum(each.nbytes() for each in memory if each._cdata not in known), stored


def alone():
    """Every case in one process."""
    return {case: train(case, [0, 1], built(case)) for case in CASES}


def built(case):
    return models.build("llama", tie_word_embeddings=case == "tied", **SIZES).train()


def on_ranks(cases, bucket):
    import hf_parallel
    from hf_parallel.axes.data.parameters import add_late_parameters

    found, zero.BUCKET = {}, bucket
    for case in cases:
        model, held = hf_parallel.parallelize(built(case), "dp_shard=2,zero_stage=0"), []
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        assert units == 1 if bucket else units > SIZES["num_hidden_layers"]
        found[case] = (*train(case, [torch.distributed.get_rank()], model, add_late_parameters, held), held)
    return found


@pytest.fixture(scope="module")
def one_process():
    return run_alone(alone)


@pytest.fixture(scope="module", params=[0, 25 * 1024**2], ids=["by_layer", "at_once"])
def cases(request, one_process):
    return run(on_ranks, 2, CASES, request.param), one_process


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_one_process(cases, case):
    ranks, one = cases[0], cases[1][case]
    losses = torch.tensor([rank[case][0] for rank in ranks]).mean(0)
    assert torch.allclose(losses, torch.tensor(one[0]), rtol=1e-5), (losses, one[0])
    for name, expected in one[1].items():
        assert (ranks[1][case][1][name] - expected).abs().max() < 2e-5, name  # fp32, summed in another order


@pytest.mark.parametrize("case", CASES)
def test_no_second_copy(cases, case):
    """But of weights that lie in memory of others, which torch would resize."""
    for step, (copied, stored) in enumerate(cases[0][0][case][2]):
        assert copied == (stored if case == "assigned_slices" and step else 0), (step, copied, stored)


def what_is_replaced():
    """A state dict that weights were computed with, after others are in their place; memory of several parameters."""
    import hf_parallel

    model = hf_parallel.parallelize(built("nothing"), "dp_shard=2,zero_stage=0")
    kept = dict(model.state_dict())
    before = {name: value._local_tensor.clone() for name, value in kept.items()}
    model(input_ids=ROWS[0, 0])
    for convert in (in_one, lambda state: state):
        model.load_state_dict(convert(changed(model)), assign=True)
        loss = model(input_ids=ROWS[0, 0], labels=ROWS[0, 0]).loss
        loss.backward()
    return all(torch.equal(value._local_tensor, before[name]) for name, value in kept.items())


def test_what_is_replaced_stays_whole():
    assert run(what_is_replaced, 2) == [True, True]


def under_autocast(lends):
    """Loss and weights of a step in bf16 after one in fp32, bytes copied in each, and those made for gradients."""
    import hf_parallel

    if not lends:
        zero.let_units_work_in_place = lambda root: None
    made, allocate = [], replicas.DefaultReduceScatter.allocate

    def counted(self, size, *, dtype, device):
        made.append(size[0] * dtype.itemsize)
        return allocate(self, size, dtype=dtype, device=device)

    replicas.DefaultReduceScatter.allocate = counted
    model, copied = hf_parallel.parallelize(built("nothing"), "dp_shard=2,zero_stage=0"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for lowered in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            loss = model(input_ids=ROWS[0, 0], labels=ROWS[0, 0]).loss
        copied.append(beside(model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss), [whole(p) for p in model.parameters()], copied, sum(made)


def test_other_dtypes_are_copied_as_torch_does():
    ours, torchs = run(under_autocast, 2, True)[0], run(under_autocast, 2, False)[0]
    assert ours[0] == torchs[0]
    assert all(torch.equal(one, other) for one, other in zip(ours[1], torchs[1], strict=True))
    stored = ours[2][0][1]
    assert [copied for copied, _ in ours[2]] == [0, stored // 2, 0]
    assert [copied for copied, _ in torchs[2]] == [stored, stored // 2, stored]
    assert ours[3] == torchs[3] // 2  # one buffer, not two
