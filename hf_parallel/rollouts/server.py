"""A rollout server with transformers underneath, for where vLLM cannot be installed: small models, CPUs, tests.

    python -m hf_parallel.rollouts Qwen/Qwen3-0.6B --port 8000

It answers what TRL's client asks of `vllm serve`: completions by token ids with log-probabilities, chats, new weights.
What vLLM does and this does not, it refuses by name (HTTP 400): no setting is ignored.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.rollouts.reference import BACKEND, Channel, Reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Keys of a request for completions; each is used, or has the one value that changes nothing.
_SAMPLING = {"n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "logprobs"}
_OTHERS = {"model", "prompt", "messages", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
_OTHERS |= {"chat_template", "chat_template_kwargs", "tools", "tool_choice"}


class Refused(Exception):
    """A request for something the stand-in does not do; its message goes back to the client."""


class Engine:
    """The model, and the trainer's end of the weights."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        self.parameters = dict(model.named_parameters())
        self.lock = threading.Lock()  # requests of one client come at the same time
        self.channel: Channel | None = None
        config = {  # as far as TRL reads it
            "model_config": {"model": name, "logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": BACKEND},
        }
        self.answers: dict[str, Callable[[dict], dict]] = {
            "/health": lambda asked: {},
            "/v1/models": lambda asked: {"data": [{"id": name}]},
            "/server_info": lambda asked: {"vllm_config": config},
            "/get_world_size": lambda asked: {"world_size": 1},
            "/v1/completions": self.complete,
            "/v1/chat/completions": self.chat,
            "/init_weight_transfer_engine": self.connect,
            "/start_weight_update": lambda asked: {},
            "/update_weights": self.update,
            "/finish_weight_update": lambda asked: {},
            "/reset_prefix_cache": lambda asked: {"success": True},  # nothing is kept between requests
        }

    # ---- completions ------------------------------------------------------------------------------------------------

    def complete(self, asked: dict) -> dict:
        """Return `n` completions of each prompt, prompt by prompt."""
        prompts = asked["prompt"]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        ids = [self.tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in prompts]
        return {"choices": self._generate(ids, asked)}

    def chat(self, asked: dict) -> dict:
        """Return `n` completions of one conversation, which is rendered here."""
        ids = self.tokenizer.apply_chat_template(
            asked["messages"],
            tools=asked.get("tools"),
            chat_template=asked.get("chat_template"),
            add_generation_prompt=True,
            return_dict=True,
            **(asked.get("chat_template_kwargs") or {}),
        )["input_ids"]
        wanted = asked.get("top_logprobs") if asked.get("logprobs") else None
        return {"prompt_token_ids": ids, "choices": self._generate([ids], {**asked, "logprobs": wanted})}

    def _generate(self, prompts: list[list[int]], asked: dict) -> list[dict]:
        unknown = sorted(asked.keys() - _SAMPLING - _OTHERS)
        if unknown:
            raise Refused(f"{unknown[0]}: not part of the stand-in for vLLM; leave it out, or use `vllm serve`")
        if asked.get("model", self.name) != self.name:
            raise Refused(f"model={asked['model']}: not here; {self.name} is")
        if asked.get("tool_choice", "auto") not in (None, "none", "auto"):
            raise Refused(f"tool_choice={asked['tool_choice']}: what is drawn is not constrained; auto works")
        if asked.get("logprobs"):
            raise Refused(f"logprobs={asked['logprobs']}: only those of the drawn tokens; logprobs=0 works")
        seed = asked.get("seed")
        found = []
        with self.lock, torch.no_grad():
            # A seed belongs to a prompt, whatever else is asked for beside it
            for drawn_at_once in [prompts] if seed is None else [[prompt] for prompt in prompts]:
                if seed is not None:
                    torch.manual_seed(seed)
                found += self._draw_tokens(drawn_at_once, asked)
        choices = []
        for index, (prompt, tokens, logprobs) in enumerate(found):
            told = None
            if logprobs is not None:
                names = [f"token_id:{token}" for token in tokens]
                tops = [{name: value} for name, value in zip(names, logprobs, strict=True)]
                told = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops}
            choices.append({"index": index, "prompt_token_ids": prompt, "token_ids": tokens, "logprobs": told})
        return choices

    def _draw_tokens(self, prompts: list[list[int]], asked: dict) -> list[tuple]:
        own, temperature = self.model.generation_config, asked.get("temperature", 1.0)
        end = own.eos_token_id if own.eos_token_id is not None else self.tokenizer.eos_token_id
        padding = own.pad_token_id if own.pad_token_id is not None else self.tokenizer.pad_token_id
        warped = {"temperature": temperature, "top_p": asked.get("top_p", 1.0), "top_k": asked.get("top_k") or 0}
        if asked.get("min_p"):
            warped["min_p"] = asked["min_p"]
        config = GenerationConfig(
            max_new_tokens=asked.get("max_tokens", 16),
            do_sample=temperature > 0,
            repetition_penalty=asked.get("repetition_penalty", 1.0),
            eos_token_id=end,
            pad_token_id=end if padding is None else padding,
            return_dict_in_generate=True,
            output_scores=True,
            disable_compile=True,
            **(warped if temperature > 0 else {}),
        )
        rows = [prompt for prompt in prompts for _ in range(asked.get("n") or 1)]
        longest = max(map(len, rows))
        device = self.model.device
        ids = torch.tensor([[config.pad_token_id] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        drawn = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        tokens = drawn.sequences[:, longest:]
        scores = [step.float().log_softmax(-1) for step in drawn.scores]
        chosen = torch.stack([s.gather(1, t[:, None])[:, 0] for s, t in zip(scores, tokens.T, strict=True)], 1)
        wanted = asked.get("logprobs") is not None
        stops, found = set(end) if isinstance(end, list) else {end}, []
        for i, row in enumerate(rows):
            own_tokens = tokens[i].tolist()
            # Up to and with the first token that ends it
            length = next((place + 1 for place, token in enumerate(own_tokens) if token in stops), len(own_tokens))
            found.append((row, own_tokens[:length], chosen[i, :length].tolist() if wanted else None))
        return found

    # ---- weights ----------------------------------------------------------------------------------------------------

    def connect(self, asked: dict) -> dict:
        """Meet the trainer, which waits for it."""
        info = asked["init_info"]
        self.channel = Channel(info, info["rank_offset"])
        return {}

    def update(self, asked: dict) -> dict:
        """Take what is announced, as it comes."""
        if self.channel is None:
            raise Refused("/update_weights before /init_weight_transfer_engine")
        info = asked["update_info"]
        columns = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        announced = [Entry(name, tuple(shape), getattr(torch, dtype)) for name, dtype, shape in columns]
        shapes = {name: tuple(own.shape) for name, own in self.parameters.items()}
        wrong = [one.name for one in announced if shapes.get(one.name) != one.shape]
        with self.lock, torch.no_grad():
            for name, tensor in self.channel.receive(announced):  # also what does not fit: the trainer sends it all
                if name not in wrong:
                    self.parameters[name].copy_(tensor)
        if wrong:
            raise Refused(f"{wrong[0]}: no weight of {self.name} has this name and shape")
        return {}


class _Handler(BaseHTTPRequestHandler):
    """JSON in, JSON out; the engine is the server's."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = json.loads(body or b"{}")
        answer = self.server.engine.answers.get(urlparse(self.path).path)  # type: ignore[attr-defined]
        if answer is None:
            code, text = 404, json.dumps({"error": f"{self.path}: not part of the stand-in for vLLM"})
        else:
            try:
                code, text = 200, json.dumps(answer(asked))
            except Exception as error:  # whatever it is, the client shows it; of 500 it would ask again
                code, text = 400, json.dumps({"error": f"{type(error).__name__}: {error}"})
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not shown."""


def load(name: str, dtype: str = "auto") -> Engine:
    """Load the model of a folder or a Hub id, on the GPU, if there is one."""
    return Engine(name, _load_model(name, dtype), AutoTokenizer.from_pretrained(name))


def load_reference(name: str, dtype: str = "auto") -> Reference:
    """Load such a model to give log-probabilities of the tokens it is sent."""
    return Reference(name, _load_model(name, dtype))


def _load_model(name: str, dtype: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model


def serve(engine: Engine | Reference, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server that is bound and does not serve yet; port 0 takes a free one."""
    server = ThreadingHTTPServer((host, port), _Handler)
    server.daemon_threads = True
    server.engine = engine  # type: ignore[attr-defined]
    return server


def main(argv: list[str] | None = None) -> None:
    """Serve a model until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m hf_parallel.rollouts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--reference", action="store_true", help="serve log-probabilities instead: `reference=…`")
    args = parser.parse_args(argv)
    make = load_reference if args.reference else load
    server = serve(make(args.model, args.dtype), args.host, args.port)
    print(f"hf_parallel: {args.model} is served at port {server.server_port}", flush=True)
    server.serve_forever()
