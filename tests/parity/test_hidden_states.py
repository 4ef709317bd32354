"""A model's layers give their hidden states, as in one process."""

import pytest
import torch
from transformers import AutoModel

import hf_parallel
from tests import models
from tests.distributed import run, run_alone
from tests.training import activate, axes


def states():
    """Those of one process and of the same weights over data ranks."""
    torch.manual_seed(models.SEED)
    activate("dp_shard=2")
    model = AutoModel.from_config(models.bert()).eval()
    batch = {"input_ids": torch.arange(4, 37).view(1, -1), "output_hidden_states": True}
    alone = model(**batch).hidden_states
    hf_parallel.parallelize(model, "dp_shard=2")
    return alone, model(**batch).get("hidden_states")


def test_hidden_states_over_data_ranks():
    alone, sharded = run(states, 2, init=False)[0]
    torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-6)  # the same operations


def read_states(
    spec: str | None, name: str, asked: object, kind: str = "hidden_states"
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Hidden states, and gradient norms by name of a loss of them; 33 tokens, which no number of ranks divides."""
    activate(spec)
    unlike = {"decoder_attention_heads": 8} if name == "bart" else {}  # the encoder has four
    model = models.build(name, **unlike, **({"attn_implementation": "eager"} if kind == "attentions" else {})).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if spec:
        hf_parallel.parallelize(model, spec)
    tokens = torch.arange(4, 70, device=model.device).view(2, 33)
    batch = {"input_ids": tokens, **({"decoder_input_ids": tokens[:, :7]} if name in ("t5", "bart") else {})}
    outputs = model(**batch, **{f"output_{kind}": asked})
    parts = [outputs.get(key) or () for key in (kind, f"encoder_{kind}", f"decoder_{kind}", f"cross_{kind}")]
    states = [state for part in parts for state in part if state is not None]
    loss = sum(
        (state * torch.linspace(-1, 1, state.shape[-2], device=model.device)[:, None]).square().mean()
        for state in states
    )
    loss.backward()
    norms = {
        key: hf_parallel.full_tensor(p.grad).norm().item() for key, p in model.named_parameters() if p.grad is not None
    }
    return [state.detach().cpu() for state in states], norms


NAMES = ("llama", "gpt2", "mixtral", "bert", "t5", "bart")


@pytest.mark.parametrize(
    ("spec", "name", "asked"),
    [
        *(("tp=2", name, True) for name in NAMES),
        ("tp=4", "mixtral", True),
        ("tp=2,cp=2", "gpt2", True),
        ("dp_shard=2,tp=2", "llama", True),
        ("tp=4,tp_mesh=2x2", "llama", True),
        ("tp=2", "llama", 1),
        ("tp=2", "llama", [0, 2, -1]),
    ],
)
def test_hidden_states_over_heads(spec, name, asked):
    """Between layers a rank has its tokens alone."""
    alone, norms = run_alone(read_states, None, name, asked)
    states, ours = run(read_states, axes(spec)["world"], spec, name, asked, init=False)[-1]
    assert len(states) >= (1 if asked == 1 else 3)
    torch.testing.assert_close(states, alone, rtol=1e-5, atol=1e-5)  # sums over heads in another order
    assert ours == pytest.approx(norms, rel=1e-4, abs=1e-7)  # the same, and over tokens


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        *(("tp=2", name) for name in (*NAMES, "gpt_neox", "falcon", "bloom", "gemma3")),
        ("tp=2,sequence_parallel=false", "llama"),
        ("tp=4", "llama"),
        ("dp_shard=2,tp=2", "qwen3"),
        *(("dp_shard=2", name) for name in ("llama", "bart", "mixtral")),
    ],
)
def test_scores(spec, name):
    """A loss that reads scores alone, of attention or of routers, asks for no layer's output."""
    kind = "router_logits" if (spec, name) == ("dp_shard=2", "mixtral") else "attentions"
    alone, norms = run_alone(read_states, None, name, True, kind)
    scores, ours = run(read_states, axes(spec)["world"], spec, name, True, kind, init=False)[-1]
    assert len(scores) >= 2
    torch.testing.assert_close(scores, alone, rtol=1e-5, atol=1e-6)  # probabilities
    assert ours == pytest.approx(norms, rel=1e-4, abs=1e-7)


def asked_by_config():
    """What a model's config asks for is refused as an argument is: its ranks have parts of the scores."""
    activate("cp=2")
    config = models.bert()
    config._attn_implementation, config.output_attentions = "eager", True
    model = AutoModel.from_config(config).eval()
    hf_parallel.parallelize(model, "cp=2")
    batch = {"input_ids": torch.arange(4, 37).view(1, -1)}
    with pytest.raises(ValueError, match="output_attentions=True .* cp_size=1"):
        model(**batch)
    return model(**batch, output_attentions=False).last_hidden_state.shape[1]


def test_attention_that_a_config_asks_for():
    assert run(asked_by_config, 2, init=False) == [33, 33]
