"""The stand-in for vLLM's server, asked by TRL's own client; and what a rank holds while it sends weights."""

import contextlib
import copy
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl")
pytest.importorskip("requests")

from hf_parallel.hooks import patching
from hf_parallel.hooks.trl import servers
from tests import models, rollout_servers, trl_scripts
from tests.distributed import run, run_alone
from tests.training import activate, axes

_SAMPLED = {"model", "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs"}
_SAMPLED |= {"return_token_ids", "return_tokens_as_token_ids"}
_INIT = {"master_address", "master_port", "rank_offset", "world_size"}
#: What the installed TRL asks for with texts, in its words. All of it is in the source of `vllm serve` 0.33 but
#: rank_offset, which was not found there.
ROUTES = {
    "GET /health": set(),
    "GET /v1/models": set(),
    "GET /server_info": {"config_format"},
    "GET /get_world_size": set(),
    "POST /v1/completions": {*_SAMPLED, "prompt", "seed"},
    "POST /v1/chat/completions": {*_SAMPLED, "messages", "top_logprobs"},
    "POST /init_weight_transfer_engine": {f"init_info.{name}" for name in _INIT},
    "POST /start_weight_update": set(),
    "POST /update_weights": {f"update_info.{name}" for name in ("names", "dtype_names", "shapes")},
    "POST /finish_weight_update": set(),
    "POST /reset_prefix_cache": set(),
}
PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55, 56]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape with other weights."""
    root = tmp_path_factory.mktemp("models")

    def write() -> None:
        trl_scripts.write_model(str(root / "one"))
        other = AutoModelForCausalLM.from_pretrained(root / "one")
        torch.manual_seed(5)
        for parameter in other.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        other.save_pretrained(root / "other")

    run_alone(write)
    return root


def noting() -> dict[str, set[str]]:
    """From now on: what this process asks servers for, and the fields it tells, of what they hold in one word too."""
    import requests

    asked: dict[str, set[str]] = {}
    request = requests.Session.request

    def noted(self, method, url, **kwargs):
        fields = asked.setdefault(f"{method.upper()} {urlparse(url).path}", set())
        for key, value in {**(kwargs.get("json") or {}), **(kwargs.get("params") or {})}.items():
            fields.update([f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key])
        return request(self, method, url, **kwargs)

    requests.Session.request = noted
    return asked


def activated(spec: str) -> None:
    activate(spec)


def greedy(model, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, a forward at a time."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
        if ids[-1] == model.generation_config.eos_token_id:
            break
    return ids[len(prompt) :], logprobs


def check_answers(client, model) -> None:
    found = client.generate(PROMPTS, max_tokens=6, temperature=0.0)
    assert found["prompt_ids"] == PROMPTS
    for i, prompt in enumerate(PROMPTS):
        tokens, logprobs = greedy(model, prompt, 6)
        assert found["completion_ids"][i] == tokens
        assert [ids[0] for ids in found["logprob_token_ids"][i]] == tokens
        assert [values[0] for values in found["logprobs"][i]] == pytest.approx(logprobs, abs=1e-5)


@torch.no_grad()
def conversation(root, server: rollout_servers.Server) -> dict[str, set[str]]:
    """All that TRL's client asks for; what stands in for vLLM on its side is in place, and no layout."""
    from trl.generation.vllm_client import VLLMClient

    patching.apply_patches([patch for patch in patching.list_declared() if patch.room == servers.__name__])
    asked = noting()
    one, other = (AutoModelForCausalLM.from_pretrained(root / name) for name in ("one", "other"))
    client = VLLMClient(base_url=server.url, group_port=server.group_port)
    assert client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    check_answers(client, one)
    check_draws(client, one)
    check_texts(client, root / "one")
    client.init_communicator("cpu")
    client.update_model_params(other)
    check_answers(client, other)
    with client.weight_update():
        for name, parameter in one.named_parameters():
            client.update_named_param(name, parameter.data)
    client.reset_prefix_cache()
    check_answers(client, one)
    told = copy.deepcopy(asked)
    check_refusals(client)
    return told


def check_draws(client, model) -> None:
    """Seeded per prompt; log-probabilities are those after the temperature."""
    settings = {"n": 3, "max_tokens": 5, "temperature": 0.7, "generation_kwargs": {"seed": 3}}
    both, last = client.generate(PROMPTS, **settings), client.generate(PROMPTS[1:], **settings)
    assert len(both["completion_ids"]) == 6
    assert both["completion_ids"][3:] == last["completion_ids"]
    ids = torch.tensor([PROMPTS[1] + last["completion_ids"][0]])
    scores = (model(ids).logits[0] / 0.7).log_softmax(-1)[len(PROMPTS[1]) - 1 : -1]
    expected = scores.gather(1, ids[0, len(PROMPTS[1]) :, None])[:, 0].tolist()
    assert [values[0] for values in last["logprobs"][0]] == pytest.approx(expected, abs=1e-5)


def check_texts(client, folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "assert"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert client.generate(["assert"], max_tokens=1)["prompt_ids"] == [tokenizer("assert")["input_ids"]]
    chat = client.chat([messages], n=2, max_tokens=3, temperature=0.0)
    assert chat["prompt_ids"] == [rendered]
    plain = client.generate([rendered], n=2, max_tokens=3, temperature=0.0)
    assert chat["completion_ids"] == plain["completion_ids"]
    assert chat["logprobs"] == plain["logprobs"]


def check_refusals(client) -> None:
    for settings, said in (
        ({"logprobs": 5}, "logprobs=5"),
        ({"structured_outputs_regex": "a"}, "structured_outputs"),
        ({"generation_kwargs": {"model": "another"}}, "model=another"),
        ({"generation_kwargs": {"tool_choice": "required"}}, "tool_choice=required"),
    ):
        with pytest.raises(Exception, match=f"400.*{said}"):
            client.generate(PROMPTS, **settings)
    with pytest.raises(Exception, match="400.*model.nothing: no weight"):
        client.update_named_param("model.nothing", torch.ones(3))

    def lost():
        yield "model.norm.weight", torch.ones(4)
        raise RuntimeError("a rank was lost")

    with pytest.raises(RuntimeError, match="a rank was lost"):  # at once: the server is not left to wait
        client.update_named_params([("model.norm.weight", "float32", [4]), ("lm_head.weight", "float32", [4])], lost())


def test_what_the_client_asks_for(folders):
    with rollout_servers.running(str(folders / "one")) as server:
        assert run_alone(conversation, folders, server) == ROUTES


def held(root, spec: str, limit: int) -> tuple[dict, int]:
    """What a rank yields, and the most bytes of whole tensors that it holds at a time."""
    activated(spec)
    from trl.generation.vllm_generation import VLLMGeneration

    from hf_parallel.checkpoint import weights
    from hf_parallel.rollouts import reference

    sizes, gathered, reference.BUCKET = [0], weights.gather_item, limit

    def counted(*args):
        whole = gathered(*args)
        sizes.append(sum(tensor.nbytes for tensor in whole.values()))
        return whole

    weights.gather_item = counted
    sent: dict[str, torch.Tensor] = {}
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.mode = AutoModelForCausalLM.from_pretrained(root), "server"
    generation._weight_metadata = None
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=contextlib.nullcontext)
    generation.accelerator = Accelerator(cpu=True)
    generation.vllm_client = SimpleNamespace(
        update_named_params=lambda metadata, named: sent.update(checked(metadata, named)),
        reset_prefix_cache=lambda: None,
    )
    generation.sync_weights()
    return sent, max(sizes)


def checked(metadata: list, named) -> dict[str, torch.Tensor]:
    """What is sent, if it is what was announced."""
    sent = dict(named)
    found = [(name, str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in sent.items()]
    assert found == metadata
    return sent


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2,pp=2"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_no_rank_holds_the_model(tmp_path, spec, kind):
    """Names and values are those of one process; a bucket is the most that rank 0 holds, others hold nothing whole."""

    def write() -> dict:
        model = models.build(kind)
        model.save_pretrained(tmp_path / "model")
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    expected, limit = run_alone(write), 40_000
    (sent, most), *others = run(held, axes(spec)["world"], tmp_path / "model", spec, limit, init=False)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], value) for name, value in expected.items())
    sizes = [value.nbytes for value in expected.values()]
    assert most <= max(limit, max(sizes)) < sum(sizes) / 4
    assert others == [({}, 0)] * len(others)
