"""Optimizer states and parameters that rest elsewhere: the numbers of one process, and the memory that is saved."""

import ctypes
import resource
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_parallel.ask.config import SpecError
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.resuming import ONE, STOP, log_differences
from tests.resuming import STEPS as LAST
from tests.resuming import trained as trained_by_trainer
from tests.rows import Rows
from tests.training import DATA_PARALLEL, Script, differences, none

ODD = {"num_hidden_layers": 3, "vocab_size": 515}
STEPS, BATCH = 3, 8
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
}


def whole(tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(model, make, shares: int, share: int, closure: bool = False) -> dict:
    """A few steps, gradients kept to be looked at after each; weights at the end."""
    rows = Rows(STEPS * BATCH, seed=11, even=True, length=16)
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = make([{"params": decays}, {"params": others, "lr": 2e-3}])
    for step in range(STEPS):
        chosen = [rows[index] for index in range(step * BATCH, (step + 1) * BATCH)][share::shares]
        batch = {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}
        optimizer.zero_grad()

        def loss(batch=batch):
            found = model(**batch).loss
            found.backward()
            return found

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def alone(names: list[str]) -> list[dict]:
    return [trained(models.build("llama", **ODD), OPTIMIZERS[name], 1, 0) for name in names]


def offloaded(spec: str, names: list[str], ranks: int, chunk: int) -> list[dict]:
    import hf_parallel
    from hf_parallel.axes.data import host_step

    host_step.CHUNK = chunk  # bytes; the model is small
    found = []
    for place, name in enumerate(names):
        model = hf_parallel.parallelize(models.build("llama", **ODD), spec)
        share = dist.get_rank() if ranks > 1 else 0
        found.append(trained(model, OPTIMIZERS[name], ranks, share, closure=not place))
    return found


@pytest.mark.parametrize(
    ("way", "ranks", "chunk"),
    [("cpu", 2, 2**26), ("optimizer", 2, 2**13), ("nvme:", 2, 2**15), ("nvme:", 1, 2**15)],
    ids=["cpu", "optimizer", "nvme", "nvme-one-process"],
)
def test_same_weights_as_one_process_under_each_optimizer(way, ranks, chunk, tmp_path):
    expected = run_alone(alone, list(OPTIMIZERS))
    spec = f"offload={way}{tmp_path / 'states' if way == 'nvme:' else ''}"
    for rank in run(offloaded, ranks, spec, list(OPTIMIZERS), ranks, chunk):
        for name, ours, theirs in zip(OPTIMIZERS, rank, expected, strict=True):
            assert ours.keys() == theirs.keys()
            gap = max((ours[key] - theirs[key]).abs().max().item() for key in ours)
            # absolute; Adam's first step is lr times the sign of a gradient, whatever is left of it at 1e-8
            assert gap <= (1e-6 if ranks == 1 or name in ("sgd", "momentum") else 2e-5), (name, gap)
    assert not list(tmp_path.glob("states/*")), "a file with a name would outlive a crash"


@pytest.mark.parametrize("spec", ["dp_shard=2,offload=cpu", "pp=2,dp_shard=2,offload=cpu", "tp=2,offload=optimizer"])
def test_trainer_with_clipping_and_accumulation(runs, spec):
    script = Script(arguments=(("max_grad_norm", 0.5),)).with_accumulation(2)
    runs.check(script, spec)


@pytest.mark.parametrize("to", ["dp_shard=2,offload=cpu", "pp=2,offload=optimizer", "nvme", "one process"])
def test_states_in_files_resume_elsewhere_and_others_in_files(runs, tmp_path, to):
    files = f"dp_shard=2,offload=nvme:{tmp_path / 'states'}"
    initial, fresh = runs.initial("llama"), "dp_shard=2" if to == "nvme" else files
    (whole,) = trained_by_trainer(ONE, {"folder": initial, "out": str(tmp_path / "whole")})
    (first,) = trained_by_trainer(fresh, {"folder": initial, "out": str(tmp_path / "first")})
    spec = {"nvme": files, "one process": ONE}.get(to, to)
    job = {"folder": initial, "out": str(tmp_path / "again"), "resume": f"{first.folder}/checkpoint-{STOP}"}
    (again,) = trained_by_trainer("tp=1,dp_shard=1" if spec == ONE else spec, job)
    # relative; two epochs of AdamW at 1e-2 feed the rounding of sums back
    none(log_differences(again, whole, range(STOP + 1, LAST + 1), 1e-4))


@pytest.mark.parametrize("more", [{"optim": "adamw_bnb_8bit"}, {"lora": True}, {"bf16": True}], ids=str)
def test_offloaded_equals_resident(runs, tmp_path, more):
    """What one process rounds otherwise is compared with the same layout that offloads nothing."""
    lora = (("r", 4), ("target_modules", ("q_proj", "down_proj"))) if more.get("lora") else ()
    arguments = tuple((key, value) for key, value in more.items() if key != "lora")
    script = Script(lora=lora, arguments=arguments)
    resident, offloaded = (runs.parallel(script, f"dp_shard=2{way}") for way in ("", ",offload=cpu"))
    none(differences(offloaded, resident[0], DATA_PARALLEL))


@pytest.mark.parametrize("way", ["optimizer", "nvme:"])
def test_an_optimizer_that_reads_rows_is_refused(way, tmp_path):
    def step():
        from transformers import Adafactor

        import hf_parallel

        model = hf_parallel.parallelize(
            models.build("llama", **ODD), f"dp_shard=1,offload={way}{tmp_path if way == 'nvme:' else ''}"
        )
        optimizer = Adafactor(model.parameters())
        model(**{key: value[None] for key, value in Rows(1, seed=1, even=True, length=16)[0].items()}).loss.backward()
        optimizer.step()

    with pytest.raises(RankFailure) as caught:
        run(step, 1)
    assert caught.value.kind == SpecError.__name__
    for word in ("offload=", "Adafactor", "AdamW", "works"):
        assert word in caught.value.message


# ---- memory ---------------------------------------------------------------------------------------------------------

NUMBERS, LAYERS = 2**20, 16  # of each layer: 4 MiB; Adam's states of all of them are 128 MiB


class Deep(torch.nn.Module):
    """Parameters and nothing else."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.full((NUMBERS,), 0.1 * (i + 1)) for i in range(LAYERS))

    def forward(self, x):
        return sum((part * part * x).mean() for part in self.parts)


def private() -> int:
    """Bytes of memory that is this process's alone, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmData")) * 1024


def limited(way: str, room: int) -> dict:
    """Three steps of AdamW in a process that may have `room` bytes beside parameters and gradients."""
    import hf_parallel
    from hf_parallel.axes.data import host_step

    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed counts no more
    host_step.CHUNK = 2**22
    first = torch.zeros(1, requires_grad=True)
    first.grad = torch.ones(1)
    torch.optim.AdamW([first]).step()  # imports what any step needs
    model = hf_parallel.parallelize(Deep(), f"dp_shard=1,offload={way}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1)).backward()
    before = private()
    resource.setrlimit(resource.RLIMIT_DATA, (before + room, before + room))
    losses = []
    for _ in range(3):
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.copy_(2 * parameter.detach() / NUMBERS)
        losses.append(sum(parameter.double().mean().item() for parameter in model.parameters()))
    states = sum(value.nbytes for slots in optimizer.state.values() for value in slots.values())
    return {"losses": losses, "states": states, "grown": private() - before}


def test_states_larger_than_the_limit_on_memory(tmp_path):
    room = 40 * 2**20
    expected = run(limited, 1, "optimizer", 2**32)[0]
    assert expected["states"] > 3 * room
    with pytest.raises(RankFailure):
        run(limited, 1, "optimizer", room)
    found = run(limited, 1, f"nvme:{tmp_path}", room)[0]
    assert found["states"] == expected["states"]
    assert found["losses"] == expected["losses"]
    assert found["grown"] < room
