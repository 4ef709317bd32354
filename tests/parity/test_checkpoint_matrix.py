"""What any layout has saved, any other reads: weights and Adam's moments, in one file and in many, bit for bit.

Seven sources x two formats are saved once; each of seven destinations reads all, and writes them again.
"""

import itertools
import os
from functools import partial

import pytest
import torch

from tests import models
from tests.distributed import run
from tests.resuming import checkpoint_differences
from tests.training import axes, none, spec_id

LAYOUTS = [
    "dp_shard=4",
    "tp=2,dp_shard=2",
    "pp=2,tp=2",
    "tp=4,tp_mesh=2x2",
    "pp=2,dp_shard=2",
    "dp_replicate=2,dp_shard=2,zero_stage=1",
    "pp=2,dp_shard=2,zero_stage=0",  # replicas
]
FORMATS = {"consolidated": "50GB", "sharded": "100KB"}


def model_of_one_process():
    """q, k and v in one weight, tied embeddings, biases, weights stored as (in, out)."""
    return models.build("gpt2", n_layer=2)


def build(spec: str):
    """A parallel model and its optimizer with moments that differ everywhere."""
    from hf_parallel import parallelize

    model = parallelize(model_of_one_process(), spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def save(model, optimizer, folder: str, size: str) -> None:
    from hf_parallel.checkpoint import save_optimizer_state

    model.save_pretrained(folder, max_shard_size=size)
    save_optimizer_state(model, optimizer, model._hf_parallel.mesh, folder, max_shard_size=size)


def write_sources(initial: str, root: str, spec: str) -> None:
    """Read what one process has made, and save it in both formats."""
    from hf_parallel.checkpoint import load_optimizer_state, load_weights, writers

    model, optimizer = build(spec)
    load_weights(model, initial)
    load_optimizer_state(model, optimizer, initial, [groups()])
    for name, size in FORMATS.items():
        writers.LONG = 1 << 20 if name == "consolidated" else 1  # one writer for each tensor; each rank its own rows
        save(model, optimizer, f"{root}/{spec_id(spec)}-{name}", size)


def read_sources(root: str, out: str, spec: str) -> None:
    from hf_parallel.checkpoint import load_optimizer_state, load_weights

    model, optimizer = build(spec)
    for source, name in itertools.product(LAYOUTS, FORMATS):
        folder = f"{root}/{spec_id(source)}-{name}"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        load_weights(model, folder)
        places = memory(optimizer)
        load_optimizer_state(model, optimizer, folder)
        assert memory(optimizer) == places  # no second copy beside the state that was there
        save(model, optimizer, f"{out}/{spec_id(source)}-{name}", "50GB")


def memory(optimizer) -> list[int]:
    """Where the moments lie, in the order of the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state[parameter][slot] for parameter in parameters for slot in ("exp_avg", "exp_avg_sq")]
    return [getattr(moment, "_local_tensor", moment).data_ptr() for moment in states]


def groups() -> list[list[str]]:
    """As Trainer groups them: what decays, and the rest."""
    parameters = list(model_of_one_process().named_parameters())
    return [[name for name, p in parameters if p.ndim > 1], [name for name, p in parameters if p.ndim == 1]]


def made_by_one_process(folder: str) -> None:
    """Plain torch and transformers: a model, and AdamW's state after a step of random gradients."""
    model = model_of_one_process()
    optimizer = torch.optim.AdamW([{"params": [model.get_parameter(n) for n in names]} for names in groups()], lr=1e-3)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")


def write_from_two_hosts(initial: str, out: str, spec: str, blind: tuple[int, ...]) -> int:
    """Save while some ranks do not see the folder; returns how many bytes this rank has written."""
    from hf_parallel.checkpoint import load_optimizer_state, load_weights, writers

    rank, written, access, pwrite = torch.distributed.get_rank(), [], os.access, os.pwrite
    os.access = lambda path, mode: rank not in blind and access(path, mode)
    os.pwrite = lambda handle, data, start: written.append(len(data)) or pwrite(handle, data, start)
    writers.LONG = 1
    model, optimizer = build(spec)
    load_weights(model, initial)
    load_optimizer_state(model, optimizer, initial, [groups()])
    save(model, optimizer, out, "50GB")
    return sum(written)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    from tests.distributed import run_alone

    root = tmp_path_factory.mktemp("sources")
    run_alone(made_by_one_process, f"{root}/one")
    for spec in LAYOUTS:
        run(partial(write_sources, f"{root}/one", str(root)), 4, spec)
    return root


@pytest.mark.parametrize("spec", LAYOUTS)
def test_every_source_in_every_format(sources, tmp_path, spec):
    assert axes(spec)["world"] == 4
    run(partial(read_sources, str(sources), str(tmp_path)), 4, spec)
    found = []
    for source, name in itertools.product(LAYOUTS, FORMATS):
        written = f"{spec_id(source)}-{name}"
        assert ("index.json" in " ".join(os.listdir(sources / written))) == (name == "sharded")
        texts = checkpoint_differences(f"{tmp_path}/{written}", f"{sources}/one", model_of_one_process())
        found += [f"{written}: {text}" for text in texts]
    none(found)


@pytest.mark.parametrize(
    ("spec", "blind"),
    [
        ("tp=2,dp_shard=2", (2, 3)),
        ("tp=2,dp_shard=2", ()),
        ("pp=2,dp_shard=2", (1, 2, 3)),
        ("pp=2,dp_shard=2", (2, 3)),
    ],
)
def test_ranks_that_do_not_see_the_folder(tmp_path, spec, blind):
    """They write nothing, and what they hold is in it; the others write about as much each."""
    from tests.distributed import run_alone

    run_alone(made_by_one_process, f"{tmp_path}/one")
    written = run(partial(write_from_two_hosts, f"{tmp_path}/one", f"{tmp_path}/out"), 4, spec, blind)
    none(checkpoint_differences(f"{tmp_path}/out", f"{tmp_path}/one", model_of_one_process()))
    assert [rank for rank in range(4) if not written[rank]] == list(blind)
    writers = [size for size in written if size]
    assert max(writers) <= 1.35 * min(writers), written


def whole_on_rank_0(spec: str) -> list[str]:
    """Names of the tensors that are not there, or differ; before anything else was saved."""
    from hf_parallel import parallelize
    from hf_parallel.checkpoint import gather_state_dict

    one = dict(model_of_one_process().named_parameters())
    model = parallelize(model_of_one_process(), spec)
    found = gather_state_dict(model, model._hf_parallel.mesh)
    assert torch.distributed.get_rank() == 0 or not found
    return [name for name in one if found and not torch.equal(found[name], one[name])]


@pytest.mark.parametrize("spec", ["dp_replicate=2,dp_shard=2", "pp=2,tp=2"])
def test_whole_tensors_on_rank_0(spec):
    """Also where some ranks have nothing to send."""
    none(run(partial(whole_on_rank_0, spec), 4)[0])
