"""A name of the Hub that is not on this machine while no Hub answers: told at once, with what may have been meant."""

import contextlib
import json
import re
import socket
import time
import types

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import http_backoff

from hf_parallel import cli
from hf_parallel.ask import hub
from hf_parallel.ask.spec import SpecError, check_model_name, locate_spec_file
from hf_parallel.hooks.transformers import ask_hub, cached_files
from tests.commands import ROOT
from tests.refusals import pattern_of_refusal

MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A Hub at a port that nobody listens to, and an empty cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ask_for_hub(monkeypatch, tmp_path, f"http://127.0.0.1:{free.getsockname()[1]}")
        yield


@pytest.fixture
def a_hub(monkeypatch, tmp_path):
    """A Hub that accepts connections."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        ask_for_hub(monkeypatch, tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


def ask_for_hub(monkeypatch, cache, endpoint):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


COMMANDS = {
    "plan": ["plan", "{}", "--gpus", "8", "--gpu", "h100-80gb"],
    "doctor": ["doctor", "{}", "--parallel", "tp=2"],
    "prove": ["prove", "--parallel", "tp=2", "{}"],
    "launch": ["launch", "--num_processes", "2", "-m", "trl.scripts.sft", "--model_name_or_path", "{}"],
    "recipe": ["launch", "--num_processes", "2", "--parallel", "{}", "train.py"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_answers_at_once(name, no_hub, capsys, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    began = time.monotonic()
    assert cli.main([word.format("Qwen/Qwen3-8") for word in COMMANDS[name]]) == 2
    err = capsys.readouterr().err
    assert time.monotonic() - began < 3
    assert re.match(r"hf_parallel: Qwen/Qwen3-8\S*: not on this machine", err)
    assert ("recipe list" if name == "recipe" else "did you mean Qwen/Qwen3-8B") in err


def test_sizes_that_are_here_work(no_hub, capsys):
    """The file that stands in for a model whose weights are not needed is accepted by `doctor`."""
    with pytest.raises(SpecError) as refused:
        check_model_name(MODEL, "-", needs_weights=False)
    file = re.search(r"; (\S+) works$", str(refused.value))[1]
    assert json.loads((ROOT / "hf_parallel/recipes/models/llama-3.1-8b.json").read_text())["model"] == MODEL
    assert cli.main(["doctor", file, "--parallel", "tp=2"]) == 0
    assert "tp=2" in capsys.readouterr().out


def test_with_a_hub_nothing_is_refused(a_hub, tmp_path):
    assert hub.why_no_hub_answers() is None
    check_model_name("acme/none", "-")


def test_what_is_cached_or_no_name_passes(no_hub, tmp_path):
    snapshot = tmp_path / "models--acme--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--acme--model" / "refs").mkdir()
    (tmp_path / "models--acme--model" / "refs" / "main").write_text("0" * 40)
    for source in ("acme/model", str(tmp_path), None, "https://example.org/a/b", "a/b/c"):
        check_model_name(source, "-")
    with pytest.raises(SpecError, match=pattern_of_refusal("acme/modell", works="acme/model?")):
        check_model_name("acme/modell", "-")
    with pytest.raises(SpecError, match=r"acme/model: "):
        check_model_name("acme/model", "-", revision="other")


def test_an_answer_that_never_comes(no_hub, monkeypatch):
    """A firewall that drops packets, or a name server that is silent: a connection has two seconds."""

    def silent(*_, **__):
        time.sleep(3)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    began = time.monotonic()
    assert "no answer in 0.2 s" in hub.why_no_hub_answers()
    assert time.monotonic() - began < 2
    assert hub.PATIENCE_S <= 2


def test_a_proxy_is_asked_instead(no_hub, monkeypatch):
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
        monkeypatch.setenv("no_proxy", "")
        assert hub.why_no_hub_answers() is None


def test_a_recipe_of_the_hub(no_hub):
    with pytest.raises(SpecError, match=r"acme/recipe:recipe\.yaml@v1: "):
        locate_spec_file("acme/recipe@v1")


def original(path_or_repo_id, filenames, **kwargs):
    """Does as transformers' own: an error where it may look only here."""
    if kwargs.get("local_files_only"):
        raise OSError("We couldn't connect")
    return kwargs


def test_scripts_do_not_wait_either(no_hub):
    """They get the error of transformers, which they may catch; uncaught it is the line of a refusal."""
    with pytest.raises(OSError, match="We couldn't connect") as raised:
        cached_files(original, "Qwen/Qwen3-8", ["config.json"], revision=None)
    assert isinstance(raised.value.__cause__, SpecError)
    assert "did you mean Qwen/Qwen3-8B" in str(raised.value.__cause__)
    given = {"local_files_only": False, "cache_dir": "x"}
    with contextlib.suppress(OSError):
        cached_files(original, "Qwen/Qwen3-8", ["config.json"], **given)
    assert given["local_files_only"] is False


def test_scripts_with_a_hub_are_left_alone(a_hub):
    given = {"revision": "main", "local_files_only": False}
    assert cached_files(original, "acme/none", ["config.json"], **given) == given


def test_adapters_and_data_sets_do_not_wait(no_hub, monkeypatch):
    """PEFT and datasets ask huggingface_hub itself: it tries once, and its own error is raised."""
    pauses = []
    monkeypatch.setattr("huggingface_hub.utils._http.time", types.SimpleNamespace(sleep=pauses.append))
    with pytest.raises(Exception, match="refused"):
        ask_hub(http_backoff, "HEAD", f"{constants.ENDPOINT}/datasets/acme/none/resolve/main/README.md")
    assert not pauses


@pytest.mark.parametrize(("method", "url"), [("PUT", "{}/acme"), ("GET", "http://elsewhere.invalid/acme")])
def test_other_requests_are_tried_again(no_hub, method, url):
    assert ask_hub(lambda *_, **kwargs: kwargs, method, url.format(constants.ENDPOINT)) == {}


def test_a_hub_that_answers_is_asked_again(a_hub):
    assert ask_hub(lambda *_, **kwargs: kwargs, "GET", f"{constants.ENDPOINT}/acme") == {}
