"""One vector of all gradients or of a weight: gradient surgery (PCGrad, A-GEM), and pruning by size.

Sizes are odd: 515 rows of vocabulary, 3 layers, one key/value head, rows of 33 tokens.
"""

import numpy
import pytest
import torch

import hf_parallel
from tests.parity.test_assigned_weights import as_in_one_process, batch, initial, start  # noqa: F401 - a fixture
from tests.training import layouts

SPECS = ("tp=2", "dp_shard=2", "dp_shard=2,zero_stage=1", "tp=2,dp_shard=2")


def surgery(folder, spec=None):
    """The gradient of one loss without its part along that of another, written back in four ways."""
    model, rows, seen = start(spec, folder), batch(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    writes = (
        lambda p, part: setattr(p, "grad", part.view(p.shape)),
        lambda p, part: setattr(p, "grad", part.reshape(p.grad.shape).clone()),
        lambda p, part: p.grad.copy_(part.view_as(p)),
        lambda p, part: p.grad.view(-1).copy_(part),
    )
    for write in writes:
        model(**rows).loss.backward()
        old = torch.cat([p.grad.clone().flatten() for p in model.parameters()])
        optimizer.zero_grad()
        model(**{**rows, "labels": rows["input_ids"].roll(3, dims=1)}).loss.backward()
        parameters = list(model.parameters())
        new = torch.cat([p.grad.view(-1) for p in parameters])
        share = torch.dot(old, new) / old.norm() ** 2
        new = new - share * old
        for p, part in zip(parameters, new.split([p.numel() for p in parameters]), strict=True):
            write(p, part)
        seen += [float(share), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen, hf_parallel.full_state_dict(model)


@pytest.mark.parametrize("name", ["phi3", "qwen3"])
@pytest.mark.parametrize("spec", layouts("library", *SPECS))
def test_gradients_as_one_vector(spec, name, initial):  # noqa: F811
    as_in_one_process(surgery, initial[name], spec)


def pruning(folder, spec=None):
    """Zeros by a mask of the weight's own size, by places in a vector of it, and by a mask that is kept."""
    model, rows, losses = start(spec, folder), batch(), []
    optimizer, masks = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for name, p in model.named_parameters():
        if "layers.1" not in name and "embed" not in name:
            continue
        sizes = p.data.abs()
        least = torch.sort(sizes.flatten())[0][int(0.3 * p.numel())]
        p.data[sizes <= least] = 0
        p.data.view(-1)[5::7] = 0
        masks[name] = p.data != 0
    for _ in range(2):
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            if name in masks:
                p.data.mul_(masks[name])
        losses.append(loss.item())
    losses += [(p == 0).sum().item() / p.numel() for name, p in model.named_parameters() if name in masks]
    return losses, hf_parallel.full_state_dict(model)


def rounds(folder, spec=None):
    """Weights that leave a model as arrays and come back, as between the rounds of federated training."""
    model, rows, losses = start(spec, folder), batch(), []
    first = [value.cpu().numpy().copy() for value in model.state_dict().values()]
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        losses += [loss.item(), *(sum(map(sum, p.detach().tolist())) for p in model.parameters() if p.ndim == 2)]
        now = [numpy.asarray(value.detach()) for value in model.state_dict().values()]
        mixed = (torch.tensor(0.3 * a + 0.7 * b) for a, b in zip(first, now, strict=True))
        model.load_state_dict(dict(zip(model.state_dict(), mixed, strict=True)))
    values = model.model.norm.weight.data
    losses.append(values[values > 1].sum().item())
    if spec and "dp_" in spec:
        with pytest.raises(ValueError, match="read-only"):
            values.numpy()[:] = 0
        with pytest.raises(NotImplementedError, match=r"p\.grad = x of a weight of \(64,\) .* other numbers"):
            model.model.norm.weight.grad = torch.full((64,), 1.0 + torch.distributed.get_rank())
    return losses, hf_parallel.full_state_dict(model)


LOOPS = [(rounds, "phi3"), (rounds, "qwen3"), (pruning, "qwen3")]


@pytest.mark.parametrize(("loop", "name"), LOOPS)
@pytest.mark.parametrize("spec", layouts("library", *SPECS))
def test_weights_that_are_read_and_written_as_a_whole(spec, loop, name, initial):  # noqa: F811
    as_in_one_process(loop, initial[name], spec)
