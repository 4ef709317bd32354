"""A server of log-probabilities by a model that does not change: the reference of GRPO, RLOO and DPO.

    python -m hf_parallel.rollouts --reference Qwen/Qwen3-0.6B --port 8001

What a trainer's ranks ask is rows of token ids, a mask, and which tokens count; the answer has one number per token.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.weights import make_buckets
from hf_parallel.checkpoint.writers import view_as_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---- Weights from a trainer to a rollout server over gloo: the seam in the place of vLLM's NCCL engine --------------
# The trainer's rank 0 is rank 0 of a group of two, beside its own world. What is sent was announced over HTTP before,
# as names, dtypes and shapes; then consecutive tensors travel as one bucket of bytes.


#: The server's name for it in `weight_transfer_config`, where vLLM says "nccl".
BACKEND = "gloo"
#: Bytes of a bucket; a larger tensor is one of its own.
BUCKET = 256 << 20
_LIMIT = timedelta(minutes=30)


class Channel:
    """The group of a trainer (rank 0) and a server; each side makes its own with the same facts."""

    def __init__(self, init_info: dict, rank: int) -> None:
        host, port = init_info["master_address"], init_info["master_port"]
        size = init_info["world_size"]
        self.store: dist.Store | None = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=_LIMIT)
        prefixed = dist.PrefixStore("hf_parallel/rollouts", self.store)
        self.group: Any = dist.ProcessGroupGloo(prefixed, rank, size, _LIMIT)
        self._from_trainer = dist.BroadcastOptions()
        self._from_trainer.rootRank = 0

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """In the order in which they were announced; no more than a bucket is held."""
        try:
            for bucket in make_buckets(tensors, BUCKET):
                data = torch.cat([view_as_bytes(tensor.cpu()) for tensor in bucket])
                self.group.broadcast([data], self._from_trainer).wait()
                del data  # before the next bucket is gathered
        except BaseException:  # as when a rank that has a part is lost: the server must not wait for the rest
            self.group = self.store = None  # closes the connection
            raise

    def receive(self, announced: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive tensors one by one."""
        for bucket in make_buckets(announced, BUCKET):
            data = torch.empty(sum(one.nbytes for one in bucket), dtype=torch.uint8)
            self.group.broadcast([data], self._from_trainer).wait()
            for one, part in zip(bucket, data.split([one.nbytes for one in bucket]), strict=True):
                yield one.name, part.clone().view(one.dtype).view(one.shape)  # a view need not start at its size


def find_address_towards(host: str | None) -> str:
    """Return the address of this machine that `host` can be reached from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host or "127.0.0.1", 9))  # sends nothing
            found = str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
    return "127.0.0.1" if found == "0.0.0.0" else found


#: Numbers in the logits of a call: more rows are asked one part after another.
_LOGITS = 1 << 28
#: The label of a token that is not scored.
IGNORED = -100
#: Answers that are kept: all stages of a pipeline ask about the same rows.
_KEPT = 64


class Facts(TypedDict):
    """A server's description of its model."""

    model: str
    dtype: str
    vocabulary: int


class Reference:
    """The model, with the answers of a server."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        self.name, self.model = name, model.eval()
        self.lock = threading.Lock()
        self.answers = {
            "/health": lambda asked: {},
            "/reference": lambda asked: self.facts(),
            "/log_probs": self.score,
        }
        self._known = functools.lru_cache(_KEPT)(self._score_rows)

    def facts(self) -> Facts:
        """Return the facts that the trainer compares with its policy."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": self.name, "dtype": dtype, "vocabulary": self.model.config.get_text_config().vocab_size}

    def score(self, asked: dict) -> dict[str, str]:
        """Return log p(label | tokens before it) of each token but the first; 0 where nothing is to be scored."""
        with self.lock:
            return {"log_probs": self._known(json.dumps(asked, sort_keys=True))}

    def _score_rows(self, text: str) -> str:
        asked, device = json.loads(text), self.model.device
        ids, mask, labels = (torch.tensor(asked[key], device=device) for key in ("input_ids", "mask", "labels"))
        labels = labels[:, 1:]
        counted = (labels != IGNORED).any(0).nonzero()
        scores = torch.zeros(labels.shape, device=device)
        if len(counted):
            first = int(counted[0])
            each = max(1, _LOGITS // (labels[:, first:].shape[1] * self.facts()["vocabulary"]))
            parts = (part.split(each) for part in (ids, mask, labels))
            dtype = asked["autocast"]
            autocast: contextlib.AbstractContextManager = contextlib.nullcontext()
            if dtype is not None:
                autocast = torch.autocast(self.model.device.type, getattr(torch, dtype))
            wanted: dict[str, object] = {"use_cache": False}
            if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
                wanted["logits_to_keep"] = ids.shape[1] - first
            found = []
            with torch.no_grad(), autocast:
                for part, seen, targets in zip(*parts, strict=True):
                    logits = self.model(input_ids=part, attention_mask=seen, **wanted).logits
                    logits, targets = logits[:, -(part.shape[1] - first) : -1], targets[:, first:]
                    chosen = (logits.float() / asked["temperature"]).log_softmax(-1)
                    chosen = chosen.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
                    found.append(chosen.masked_fill(targets == IGNORED, 0))
                    del logits  # before those of the next rows are made
            scores[:, first:] = torch.cat(found)
        return base64.b64encode(scores.float().cpu().contiguous().numpy().tobytes()).decode()


def decode_scores(text: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return the numbers of such a text."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).view(shape)


def ask_server(address: str, route: str, timeout: float, told: dict[str, object] | None = None) -> dict:
    """Return the answer of a server of this package.

    Args:
        timeout: seconds in which it must answer: ranks that wait for one that hangs would wait for ever.

    Raises:
        RuntimeError: the server is not there, refuses, or does not answer.
    """
    url = f"{address.rstrip('/')}/{route}"
    request = urllib.request.Request(url, json.dumps(told or {}).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
    except OSError as error:
        reason = str(error)
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            reason = f"no answer in {timeout:g} s; look at what the server prints and start it again"
            reason += f", or give it longer: reference_timeout_s={math.ceil(4 * timeout)}"
    raise RuntimeError(f"hf_parallel: {url}: {reason}")
