"""Optimizers whose states have 8 or 4 bits: steps on shards, and checkpoints that any layout reads."""

import pytest
import torch

from tests.distributed import run, run_alone
from tests.refusals import find_line
from tests.resuming import ONE, STEPS, STOP, log_differences, trained
from tests.training import none, spec_id

#: Relative. Codes are 1 % apart, and blocks of 256 values lie elsewhere on each layout; a shard without a step, or
#: a state of zeros after resuming, moves the losses by 1e-2 and more.
ROUNDING = 2e-3
OPTIMIZER = {"optim": "adamw_8bit", "learning_rate": 2e-3}
REST = range(STOP + 1, STEPS + 1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, runs):
    """Uninterrupted runs by layout."""
    root, made = tmp_path_factory.mktemp("eight_bit"), {}

    def run(spec: str):
        if spec not in made:
            made[spec] = trained(spec, job(runs, root / (spec_id(spec) or "one")))[0]
        return made[spec]

    return run


def job(runs, out, **more):
    return {"folder": runs.initial("llama"), "out": str(out), **OPTIMIZER, **more}


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2,dp_shard=2"])
def test_trains_as_one_process_does(ended, spec):
    none(log_differences(ended(spec), ended(ONE), range(1, STEPS + 1), ROUNDING))


@pytest.mark.parametrize(("spec", "tells"), [("tp=2", True), ("pp=2", False)])
def test_tells_of_blocks_that_lie_elsewhere(runs, tmp_path, capfd, spec, tells):
    """A stage has whole parameters."""
    trained(spec, job(runs, tmp_path))
    assert bool(find_line(capfd.readouterr().err, "AdamW keeps states of few bits in blocks", "adamw_torch")) is tells


@pytest.mark.parametrize(
    ("source", "spec"),
    [("tp=2", "tp=2"), (ONE, "tp=2"), ("tp=2", "dp_shard=2"), ("dp_shard=2", ONE)],
    ids=lambda spec: spec_id(spec) or "one",
)
def test_resumes(ended, runs, tmp_path, source, spec):
    """Codes read back on the same layout are those that were written: only the blocks' factors are rounded."""
    former = ended(source)
    resumed = trained(spec, job(runs, tmp_path, resume=f"{former.folder}/checkpoint-{STOP}"))[0]
    none(log_differences(resumed, former, REST, 1e-6 if source == spec else ROUNDING))


#: Relative. Codes of 4 bits are 10 % apart.
ROUNDINGS = {"adamw_torch_8bit": ROUNDING, "adamw_torch_4bit": 2e-2}


@pytest.mark.parametrize(
    ("optim", "source", "spec"),
    [
        ("adamw_torch_8bit", "tp=2", "pp=2,dp_shard=2"),
        ("adamw_torch_4bit", "dp_shard=2", "dp_shard=2"),
        ("adamw_torch_4bit", "dp_shard=2", ONE),
    ],
    ids=str,
)
def test_torchao(runs, tmp_path, optim, source, spec):
    """Its steps are compiled, for parts of unlike sizes; a resumed run goes on as one that was never stopped."""
    pytest.importorskip("torchao")
    alone, former = (
        trained(layout, job(runs, tmp_path / name, optim=optim))[0]
        for layout, name in ((ONE, "alone"), (source, "former"))
    )
    none(log_differences(former, alone, range(1, STEPS + 1), ROUNDINGS[optim]))
    given = job(runs, tmp_path / "resumed", optim=optim, resume=f"{former.folder}/checkpoint-{STOP}")
    none(log_differences(trained(spec, given)[0], former, REST, 1e-6 if source == spec else ROUNDINGS[optim]))


def test_graphs_of_other_bits_are_not_taken(tmp_path):
    """Both optimizers step on weights of one shape, one after the other, with the same folder of compiled graphs."""
    torchao = pytest.importorskip("torchao.optim")

    def moved(spec, kinds):
        import hf_parallel

        torch.manual_seed(0)
        linear = torch.nn.Linear(64, 129, bias=False)  # 65 and 64 rows: the second part is of 4096 numbers
        if spec is not None:
            hf_parallel.parallelize(linear, spec)
        for kind in kinds:
            optimizer = getattr(torchao, kind)(linear.parameters(), lr=0.1, block_size=64)
            linear(torch.ones(3, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(linear(torch.ones(1, 64)).detach().square().sum())

    kinds, env = ("AdamW4bit", "AdamW8bit", "AdamWFp8"), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    alone = run_alone(moved, None, kinds)
    for ours in run(moved, 2, "dp_shard=2", kinds, env=env):
        assert ours == pytest.approx(alone, rel=2e-2)


@pytest.mark.parametrize(
    ("optim", "source", "spec"),
    [("ademamix", "dp_shard=2", "tp=2"), ("ademamix", ONE, "dp_shard=2"), ("ademamix_8bit", "tp=2", "tp=2")],
    ids=str,
)
def test_two_means_in_one_state(runs, tmp_path, optim, source, spec):
    """AdEMAMix keeps a fast and a slow mean in one tensor; both are in checkpoints, by name."""
    former = trained(source, job(runs, tmp_path / "former", optim=optim))[0]
    given = job(runs, tmp_path / "resumed", optim=optim, resume=f"{former.folder}/checkpoint-{STOP}")
    none(log_differences(trained(spec, given)[0], former, REST, 2e-5))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_survive(signed):
    """Blocks with extremes of either sign, a last one that is not full, and one of zeros."""
    functional = pytest.importorskip("bitsandbytes.functional")
    from hf_parallel.checkpoint.codes import _encode_values, decode_slots

    table = functional.create_dynamic_map(signed=signed)
    torch.manual_seed(0)
    values = torch.randn(5, 203) * torch.logspace(-6, 0, 5)[:, None]
    values[2] = 0
    codes, largest = _encode_values(values if signed else values.square(), table)
    slots = {"step": 3, "state1": codes, "qmap1": table, "absmax1": largest}
    again, factors = _encode_values(decode_slots(slots)["state1"], table)
    assert torch.equal(again, codes)
    torch.testing.assert_close(factors, largest, rtol=3e-7, atol=0)
    expected = functional.dequantize_blockwise(codes, absmax=largest, code=table, blocksize=256)
    torch.testing.assert_close(decode_slots(slots)["state1"], expected)
