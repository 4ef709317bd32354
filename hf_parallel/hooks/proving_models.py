"""Models and examples of a script that is proved: small ones, alike in one process and on all ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from transformers import AutoConfig, PreTrainedModel

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks.patching import Patch, with_first
from hf_parallel.model.shrink import Layout, list_small_values
from hf_parallel.prove.small_run import Proving

#: Parameters beside the embeddings up to which a model is proved as it is.
SMALL_ENOUGH = 10_000_000


def list_model_patches(proving: Proving) -> list[Patch]:
    """Return the changes for models and examples."""
    of, made = functools.partial(with_first, proving), "transformers.modeling_utils:PreTrainedModel"
    fetched = "torch.utils.data._utils.fetch:_MapDatasetFetcher"
    collated = "transformers.data.data_collator:DataCollatorForLanguageModeling"
    return [
        of(f"{made}.from_pretrained", _note_model(_load_small_model), "small models"),
        of(f"{made}._from_config", _note_model(_make_small_model), "small models"),
        of(
            "hf_parallel.hooks.library:parallelize",
            _note_model(_train_model_itself),
            "one process is the model itself",
        ),
        of(f"{fetched}.fetch", _fetch_batch, "draws by example; notes the order"),
        of(f"{collated}.torch_mask_tokens", _mask_by_example, "by example"),
    ]


# ---- models ------------------------------------------------------------------------------------------------------


def _note_model(make: Callable) -> Callable:
    """Remember the model that is made."""

    @functools.wraps(make)
    def make_noted(proving: Proving, *args: Any, **kwargs: Any) -> Any:
        model = make(proving, *args, **kwargs)
        if isinstance(model, nn.Module):
            proving.made.append(model)
        return model

    return make_noted


def _train_model_itself(
    proving: Proving, original: Callable, model: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    """Train the model itself in one process."""
    return model if proving.alone else original(model, *args, **kwargs)


def _load_small_model(
    proving: Proving, original: Callable, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load the small model of the kind that the script asks for."""
    source = pretrained_model_name_or_path
    known = {name: kwargs[name] for name in ("revision", "trust_remote_code", "token", "cache_dir") if name in kwargs}
    if not proving.sizes.keep_dtype:
        kwargs.pop("torch_dtype", None)
        kwargs["dtype"] = torch.float32
    kwargs.pop("device_map", None)
    if source is None or os.path.isfile(str(source)) or not issubclass(cls, PreTrainedModel):
        return original(cls, source, *args, **kwargs)
    config = kwargs.get("config")
    try:
        if not hasattr(config, "to_diff_dict"):
            config = cls.config_class.from_pretrained(source, **known) if cls.config_class else None
            config = config or AutoConfig.from_pretrained(source, **known)
    except OSError as error:
        refuse(str(source), "is not on this machine, and a proof downloads nothing", do="load it once", cause=error)
    small = _make_small_config(proving, cls, config)
    if small is None:
        return original(cls, source, *args, **kwargs)
    if "config" in kwargs:
        kwargs["config"] = small
    kwargs.pop("variant", None)
    kwargs.pop("subfolder", None)
    # The first process that asks for the folder of the small model writes it.
    name = hashlib.sha256(f"{cls.__name__}{small.to_json_string()}".encode()).hexdigest()[:16]
    folder = proving.models / name
    if not folder.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = cls(small)
        mine = folder.with_name(f"{name}-{os.getpid()}")
        model.save_pretrained(mine)
        with contextlib.suppress(OSError):  # another process was first
            mine.rename(folder)
        del model
    return original(cls, str(folder), *args, **kwargs)


def _make_small_model(proving: Proving, original: Callable, cls: Any, config: Any, **kwargs: Any) -> Any:
    """Make the small model of the kind that the script asks for."""
    if not proving.sizes.keep_dtype:
        kwargs.pop("torch_dtype", None)
        kwargs["dtype"] = torch.float32
    small = _make_small_config(proving, cls, config)
    return original(cls, config if small is None else small, **kwargs)


def _make_small_config(proving: Proving, cls: type[PreTrainedModel], config: Any) -> Any:
    """Return the config of a small model of this kind; None where the model itself is small enough."""
    with torch.device("meta"):
        whole = cls(config)
    embeddings = None
    with contextlib.suppress(NotImplementedError):  # as of models of sounds
        embeddings = whole.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    in_vocabulary = 0 if weight is None else 2 * weight.numel()
    if sum(p.numel() for p in whole.parameters()) - in_vocabulary <= SMALL_ENOUGH:
        _drop_nothing(config)
        return None
    values = list_small_values(config, ("vocab_size",), Layout(proving.sizes.heads, proving.sizes.stages))
    small = type(config)(**values)
    small._attn_implementation = config._attn_implementation
    _drop_nothing(small)
    layers = getattr(small, "num_hidden_layers", "few")
    proving.record.note(f"{cls.__name__} has {layers} layers of width {getattr(small, 'hidden_size', '?')}")
    return small


def _drop_nothing(config: Any) -> None:
    """Set all dropout of a config to zero, parts included, and let no masks of SpecAugment be drawn."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif name == "apply_spec_augment":
            setattr(config, name, False)
        elif hasattr(value, "to_diff_dict"):
            _drop_nothing(value)


def turn_dropout_off(proving: Proving) -> None:
    functional = torch.nn.functional
    original = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if p > 0 and training:
            proving.record.note("dropout is off")
        return original(input, 0.0, training, inplace)

    functional.dropout = dropout


# ---- data --------------------------------------------------------------------------------------------------------


def _fetch_batch(proving: Proving, original: Callable, self: _MapDatasetFetcher, possibly_batched_index: Any) -> Any:
    """Read a batch example by example, each under random numbers of its own; note which ones training reads."""
    indices = possibly_batched_index
    if not self.auto_collation:
        return original(self, indices)
    if torch.is_grad_enabled():
        proving.record.examples.extend(int(index) for index in indices if isinstance(index, int))
    examples = []
    for index in indices:
        with _draw_by_seed(index):
            examples.append(self.dataset[index])
    with _draw_by_seed(len(examples)):
        before = _read_random_state()
        batch = self.collate_fn(examples)
        drew = before != _read_random_state()
    if drew and proving.sizes.data_ranks > 1:
        name = type(self.collate_fn).__name__ if not inspect.isfunction(self.collate_fn) else self.collate_fn.__name__
        why = "draws random numbers for a whole batch, which is another on each data rank"
        refuse(f"prove: the collator {name}", why, do="prove a layout with one data rank, such as tp=2")
    return batch


@contextlib.contextmanager
def _draw_by_seed(seed: Any) -> Iterator[None]:
    """Make random numbers depend on this seed alone, inside the context."""
    number = int(seed) if isinstance(seed, int) else abs(hash(str(seed)))
    numpy_state, python_state = numpy.random.get_state(), random.getstate()
    seed_all = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=[]):
        seed_all(number)  # without a GPU torch's own notes a stack for each that might come
        numpy.random.seed(number % (1 << 31))
        random.seed(number)
        try:
            yield
        finally:
            numpy.random.set_state(numpy_state)
            random.setstate(python_state)


def _read_random_state() -> tuple[bytes, bytes, int]:
    state: Any = numpy.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        state[1].tobytes() + bytes([state[2] % 251]),
        hash(random.getstate()),
    )


def _mask_by_example(
    proving: Proving,
    original: Callable,
    self: Any,
    inputs: Any,
    special_tokens_mask: Any = None,
    *args: Any,
    **kw: Any,
) -> Any:
    """Mask the tokens of each example under random numbers of its own: one process draws for larger batches."""
    masked = []
    for index in range(len(inputs)):
        special = None if special_tokens_mask is None else special_tokens_mask[index : index + 1]
        kept = int((inputs[index] != self.tokenizer.pad_token_id).sum())  # padding depends on the batch
        with _draw_by_seed(int(inputs[index, :kept].sum())):
            part = inputs[index : index + 1, :kept].clone()
            ids, labels = original(self, part, None if special is None else special[:, :kept], *args, **kw)
        filler = inputs[index : index + 1, kept:]
        masked.append((torch.cat([ids, filler], 1), torch.cat([labels, torch.full_like(filler, -100)], 1)))
    return tuple(torch.cat(parts) for parts in zip(*masked, strict=True))
