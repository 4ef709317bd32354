"""What scripts ask of `generate`, after a step of training: any of its options at once, with prompts of any lengths.

Compared are the tokens, and the scores, logits, hidden states and attentions that a script asks for.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests import models
from tests.drawn import trainers
from tests.drawn.bench import EXPERTS, TWO_STACKS, Choices, Kind
from tests.drawn.loops import adapt
from tests.rows import VOCABULARY, Pairs, Rows
from tests.training import TRAIN_SEED, activate

#: Options of `generate` as they are; the plain one is left out.
OPTIONS: dict[str, tuple] = {
    "num_beams": (None, 2, 3),
    "num_return_sequences": (None, 2),
    "length_penalty": (None, 2.0, 0.0),
    "early_stopping": (None, True, "never"),
    "do_sample": (None, True),
    "temperature": (None, 0.7, 1.9),
    "top_k": (None, 0, 7),
    "top_p": (None, 0.6),
    "min_p": (None, 0.02),
    "typical_p": (None, 0.5),
    "epsilon_cutoff": (None, 1e-3),
    "eta_cutoff": (None, 1e-3),
    "top_h": (None, 0.4),
    "repetition_penalty": (None, 1.4),
    "no_repeat_ngram_size": (None, 2),
    "min_new_tokens": (None, 5),
    "max_new_tokens": (7, 1, 12),
    "exponential_decay_length_penalty": (None, (2, 1.3)),
    "bad_words_ids": (None, [[3], [7, 9]]),
    "suppress_tokens": (None, [11, 300]),
    "begin_suppress_tokens": (None, [7]),
    "forced_bos_token_id": (None, 5),
    "forced_eos_token_id": (None, 2),
    "sequence_bias": (None, [[[10, 45], -5.0], [[514], 3.0]]),
    "renormalize_logits": (None, True),
    "remove_invalid_values": (None, True),
    "guidance_scale": (None, 1.5),
    "eos_token_id": (None, 2, list(range(0, VOCABULARY, 7))),
    "use_cache": (True, None, False),
    "cache_implementation": (None, "static", "dynamic"),
    "prefill_chunk_size": (None, 3),
    "prompt_lookup_num_tokens": (None, 2),
    "output_scores": (None, True),
    "output_logits": (None, True),
    "output_hidden_states": (None, True),
    "output_attentions": (None, True),
}
#: What else a script does in one way or another.
WAYS: dict[str, tuple] = {
    "model": ("llama", *trainers.DECODERS, *trainers.DECODERS, *EXPERTS, "t5", "bart"),
    "lora": ((), (("r", 3), ("target_modules", "all-linear"))),
    "rows": (3, 1, 4),
    "prompts": ("alike", "padded", "of_each_rank", "of_lengths_of_each_rank"),
    "from": ("tokens", "embeddings", "beginning"),
    "mode": ("eval", "train"),
    "trains": (True, False),
    "turns": (1, 2),
    "own": ("nothing", "processor", "criteria", "prefix", "streamer", "assistant"),
    "options_in": ("call", "config", "model"),
    "attention": (None, "eager"),
}
CHOICES = {**WAYS, **OPTIONS}
PLAIN = {name: values[0] for name, values in CHOICES.items()}
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
OF_BEAMS = ("length_penalty", "early_stopping")
#: Sets of prompts, where data ranks have their own.
SETS = 4
OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    plain: set[str] = set()
    encoder = chosen["model"] in TWO_STACKS
    if not chosen["do_sample"]:
        plain |= set(OF_SAMPLING)
        plain |= {"num_return_sequences"} if not chosen["num_beams"] else set()
    if not chosen["num_beams"]:
        plain |= set(OF_BEAMS)
    elif (chosen["num_return_sequences"] or 1) > chosen["num_beams"]:
        plain |= {"num_return_sequences"}
    if chosen["prompt_lookup_num_tokens"] or chosen["own"] == "assistant":
        plain |= {"num_beams", "num_return_sequences", "cache_implementation", *OF_BEAMS, "turns", "use_cache"}
        plain |= {"prefill_chunk_size", "guidance_scale"}
        chosen = {**chosen, "rows": 1}
    if chosen["own"] == "assistant":
        plain |= {"prompt_lookup_num_tokens"}
    if chosen["own"] == "streamer":
        plain |= {"num_beams", "num_return_sequences", *OF_BEAMS}
        chosen = {**chosen, "rows": 1}
    if chosen["do_sample"] and "each_rank" in chosen["prompts"]:
        plain |= {"prompts"}  # each data rank draws for rows of its own
    if chosen["model"] not in trainers.ADAPTED or chosen["model"] == "qwen2":
        plain |= {"lora"}
    if chosen["model"] in ("mamba", "bloom", "mpt", *EXPERTS) or encoder:
        plain |= {"from", "cache_implementation", "prefill_chunk_size", "output_attentions", "turns"}
        plain |= {"attention"}
    if chosen["model"] == "mamba" or encoder:
        plain |= {"prompts", "output_hidden_states", "prompt_lookup_num_tokens"}
        chosen = {**chosen, "own": "nothing" if chosen["own"] == "assistant" else chosen["own"]}
    if chosen["output_attentions"]:
        chosen = {**chosen, "attention": "eager"}
    if not chosen["use_cache"]:  # whose models' configs have none
        plain |= {"cache_implementation", "prefill_chunk_size", "turns"}
    if chosen["turns"] == 2:
        plain |= {"num_beams", "num_return_sequences", "cache_implementation", "from", "guidance_scale", *OF_BEAMS}
        plain |= {"prefill_chunk_size"}
    if chosen["from"] != "tokens":
        plain |= {"guidance_scale", "prefill_chunk_size", "prompt_lookup_num_tokens"}
        chosen = {**chosen, "own": "nothing" if chosen["own"] in ("assistant", "prefix") else chosen["own"]}
    if chosen["from"] == "beginning" and chosen["model"] == "qwen2":  # has no token to begin with
        plain |= {"from"}
    elif chosen["from"] == "beginning":
        plain |= {"rows", "prompts"}
    return {**chosen, **{name: PLAIN[name] for name in plain}}


def prefer_even(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's processor of logits."""
    scores = scores.clone()
    scores[:, ::2] += 0.5
    return scores


class SumIsLarge:
    """A user's criterion of when to stop."""

    def __call__(self, tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return tokens.sum(1) > 2500


class Kept(BaseStreamer):
    """A user's streamer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def make_prompts(chosen: Choices, number: int) -> dict[str, torch.Tensor]:
    """Set `number` of prompts, of which shorter ones are padded at their left."""
    tokens = (Pairs(8, 61) if chosen["model"] in TWO_STACKS else Rows(8, 61)).tokens
    if chosen["prompts"] in ("alike", "padded"):
        rows = tokens[: chosen["rows"], :9]
    else:
        width = 9 + number * (chosen["prompts"] == "of_lengths_of_each_rank")
        rows = tokens[[(row * SETS + number) % 8 for row in range(chosen["rows"])], :width]
    mask = torch.ones_like(rows)
    if chosen["prompts"] == "padded":
        for row in range(len(mask)):
            mask[row, : row * 2] = 0
    return {"input_ids": torch.where(mask > 0, rows, 0), "attention_mask": mask}


def extras(chosen: Choices, folder: str) -> dict[str, Any]:
    """What a script gives to `generate` beside prompts and options."""
    match chosen["own"]:
        case "processor":
            return {"logits_processor": LogitsProcessorList([prefer_even])}
        case "criteria":
            return {"stopping_criteria": StoppingCriteriaList([SumIsLarge()])}
        case "prefix":
            return {"prefix_allowed_tokens_fn": lambda row, tokens: list(range(len(tokens) % 3, VOCABULARY, 3))}
        case "streamer":
            return {"streamer": Kept()}
        case "assistant":
            config = AutoConfig.from_pretrained(folder)
            return {"assistant_model": models.auto_class(config).from_pretrained(folder).eval()}
    return {}


def place_options(chosen: Choices, model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Where a script has its options: in the call, in a config of the call, or in the model's config."""
    if chosen["options_in"] == "call":
        return options
    if chosen["options_in"] == "config":
        ids = {name: getattr(model.generation_config, name) for name in ("pad_token_id", "decoder_start_token_id")}
        return {"generation_config": GenerationConfig(**{**ids, **options})}
    model.generation_config.update(**options)
    return {}


def summarise_outputs(outputs: Any) -> dict[str, float]:
    """Tokens as they are, and of each step's tensors their shape and sum."""
    if isinstance(outputs, torch.Tensor):
        outputs = {"sequences": outputs}
    found = {f"token {place}": int(token) for place, token in enumerate(outputs["sequences"].flatten())}
    found |= {f"size {dim}": size for dim, size in enumerate(outputs["sequences"].shape)}
    for name in outputs:
        if name not in ("sequences", "past_key_values", "encoder_outputs"):
            found |= {f"{name} {key}": value for key, value in _sums(outputs[name], ())}
    return found


def _sums(parts: Any, place: tuple[int, ...]) -> list[tuple[str, float]]:
    if isinstance(parts, (tuple, list)):
        return [pair for number, part in enumerate(parts) for pair in _sums(part, (*place, number))]
    if not isinstance(parts, torch.Tensor):
        return []
    whole = parts.double()
    where = torch.isfinite(whole)
    weighed = whole[where] * torch.linspace(0.5, 1.5, int(where.sum()), dtype=whole.dtype)
    return [(f"{place} {tuple(parts.shape)} {int(where.sum())}", float(weighed.abs().sum()))]


class Numbered(Dataset):
    """Rows that say which they are."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.rows[index], "number": torch.tensor(index)}


def prepare(chosen: Choices, folder: str, data_ranks: int) -> tuple[Any, int]:
    """The script's model, after a step that moves its weights; and the number of this data rank."""
    config = AutoConfig.from_pretrained(folder)
    model = models.auto_class(config).from_pretrained(folder, attn_implementation=chosen["attention"])
    model = adapt({**trainers.PLAIN, **chosen, "checkpointing": False}, model.train())
    accelerator = Accelerator(cpu=True)
    rows = Pairs(8, TRAIN_SEED) if chosen["model"] in TWO_STACKS else Rows(8, TRAIN_SEED, even=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    loader = DataLoader(Numbered(rows), batch_size=8 // data_ranks)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        rank = int(batch.pop("number")[0]) // (8 // data_ranks)
        if chosen["trains"]:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).train(chosen["mode"] == "train"), rank


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name."""
    data_ranks = activate(spec)
    set_seed(5)
    model, rank = prepare(chosen, folder, data_ranks)
    model.generation_config.pad_token_id = 0
    found: dict[str, Any] = {}
    for number in range(rank, SETS, data_ranks) if "each_rank" in chosen["prompts"] else [0]:
        generate(chosen, model, folder, number, found)
    if spec is not None:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = {name: value for part in parts for name, value in part.items()} | found
    model.save_pretrained(f"{out}/saved")
    return {"found": found, "gradient_keys": [], "folder": f"{out}/saved"}


def generate(chosen: Choices, model: Any, folder: str, number: int, found: dict[str, Any]) -> None:
    """Generate once or in two turns, and keep what comes."""
    options = {key: chosen[key] for key in OPTIONS if chosen[key] is not None}
    if any(chosen[key] for key in OUTPUTS) or chosen["turns"] == 2:
        options["return_dict_in_generate"] = True
    given = make_prompts(chosen, number)
    inputs: dict[str, Any] = dict(given)
    if chosen["from"] == "embeddings":
        with torch.no_grad():
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    elif chosen["from"] == "beginning":
        inputs = {}
    more = extras(chosen, folder)
    torch.manual_seed(13)
    outputs = model.generate(**inputs, **more, **place_options(chosen, model, options))
    found[f"set {number}"] = summarise_outputs(outputs)
    if chosen["own"] == "streamer":
        found[f"streamed {number}"] = {str(place): token for place, token in enumerate(more["streamer"].tokens)}
    if chosen["turns"] == 2:
        tokens = torch.cat([outputs.sequences, torch.full((len(outputs.sequences), 2), 17)], 1)
        mask = torch.ones_like(tokens)
        mask[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
        inputs = {"input_ids": tokens, "attention_mask": mask, "past_key_values": outputs.past_key_values}
        again = model.generate(**inputs, **extras(chosen, folder), **place_options(chosen, model, options))
        found[f"second turn {number}"] = summarise_outputs(again)


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    return False


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    return 3e-5, 1e-5


LEFT_OUT = ("padding_free", "monitor", "nan_action", "async_save", "gradient_reduction", "batch_shares", "lean_loss")
KIND = Kind(CHOICES, fit, script, tolerances, leaves_out, left_out=LEFT_OUT)
