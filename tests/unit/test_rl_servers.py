"""Settings that ask servers: refused where nobody would ask, or where what comes back would not be what was meant."""

from types import SimpleNamespace

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.session import of_session
from hf_parallel.hooks import runtime
from hf_parallel.hooks.trl import online, servers
from hf_parallel.hooks.trl import servers as ahead
from tests.refusals import pattern_of_refusal

ADDRESS = "http://127.0.0.1:8001"


def trainer(name: str):
    """One of TRL's, as far as it is looked at."""
    return type(name, (), {"__module__": "trl.trainer.any", "_is_vlm": False, "router_aux_loss_coef": 0})()


def arguments(**changed):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": True, "beta": 0.1}
    return SimpleNamespace(**{**settings, "use_transformers_continuous_batching": False, **changed})


@pytest.fixture
def under(monkeypatch):
    """A layout without ranks."""

    def activate(spec: str) -> None:
        mesh = SimpleNamespace(config=ParallelConfig.parse(spec).resolve(1), data_size=1)
        monkeypatch.setattr(of_session(runtime._Active), "runtime", runtime.Runtime(mesh.config, "test", mesh))

    return activate


@pytest.mark.parametrize(
    ("spec", "name", "changed", "message"),
    [
        ("rollouts=one_step_behind", "RLOOTrainer", {}, "RLOOTrainer does not weigh.*GRPOTrainer does"),
        ("rollouts=one_step_behind", "GRPOTrainer", {"use_vllm": False}, "use_vllm=False; rollouts=in_turn works"),
        (
            "rollouts=one_step_behind",
            "GRPOTrainer",
            {"vllm_importance_sampling_correction": False},
            "vllm_importance_sampling_correction=True works",
        ),
        (f"reference={ADDRESS}", "SFTTrainer", {}, "SFTTrainer asks no reference model"),
        (f"reference={ADDRESS}", "GRPOTrainer", {"beta": 0.0}, "no reference with beta=0; reference=none works"),
        (f"reference={ADDRESS}", "GRPOTrainer", {"sync_ref_model": True}, "sync_ref_model=False works"),
        (f"reference={ADDRESS}", "DPOTrainer", {"precompute_ref_log_probs": True}, "reference=none works"),
    ],
)
def test_trainers_that_would_not_ask(under, spec, name, changed, message):
    under(spec)
    with pytest.raises(SpecError, match=message):
        servers.check_servers(trainer(name), arguments(**changed))


def test_loops_without_a_trainer(under):
    for spec, works in (("rollouts=one_step_behind", "rollouts=in_turn"), (f"reference={ADDRESS}", "reference=none")):
        under(spec)
        with pytest.raises(SpecError, match=pattern_of_refusal(spec, works=f"{works} works")):
            servers.refuse_loop()
    under("dp_shard=1")
    servers.refuse_loop()


@pytest.mark.parametrize(
    ("spec", "message"),
    [("reference=here:8001", "is no address"), (f"reference={ADDRESS},cp=2", "whole rows, of which cp=2 has parts")],
)
def test_addresses(spec, message):
    with pytest.raises(SpecError, match=message):
        ParallelConfig.parse(spec)


def test_a_packed_base_is_sent_to_no_server(under):
    pytest.importorskip("trl")
    under("dp_shard=1")
    with pytest.raises(SpecError, match=pattern_of_refusal("use_vllm=True", works="16 bits works")):
        online.check_online_trainer(trainer("GRPOTrainer"), arguments(), None, SimpleNamespace(is_quantized=True))
    online.check_online_trainer(trainer("GRPOTrainer"), arguments(), None, SimpleNamespace(is_quantized=False))


def test_rows_of_the_batch_after_a_batch():
    """`distance` calls later; the last ones of an epoch have none."""
    batches = type("Batches", (list,), {"batch_size": 2, "drop_last": False})([[1, 2], [1, 2], [3, 4], [3, 4]])
    found = list(ahead.Upcoming(batches, 2))
    assert found == [[1, 2, 3, 4], [1, 2, 3, 4], [3, 4], [3, 4]]
    inputs = ahead._collate_lengths(lambda rows: [{"prompt": row} for row in rows], 2, found[0])
    assert [row["prompt"] for row in inputs] == [1, 2]
    assert [row["prompt"] for row in inputs[0][ahead.NEXT_ROWS]] == [3, 4]
