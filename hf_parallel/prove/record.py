"""A run writes down its numbers: what it logs, gradients and weights by parameter, tokens by module, examples seen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_parallel.apply.weights import full_tensor
from hf_parallel.axes.tensor.lean_loss import LazyLogits

#: Elements of a tensor that a record keeps; of a larger one as many, evenly spaced, and the norm of all.
SAMPLE = 1 << 16
#: The folder in OUTPUT_DIR that `monitor=trace:N` writes.
TRACE = "hf_parallel-trace"
#: Parts of the names of logged numbers that depend on time, or count processes.
NOT_COMPARED = ("runtime", "per_second", "total_flos", "step_time", "perf/", "num_tokens", "_time", "expert_")


@dataclass
class Sample:
    """A tensor in short: its shape, the norm of all elements, and up to `SAMPLE` of them."""

    shape: list[int]
    norm: float
    values: torch.Tensor


@dataclass
class Returned:
    """Gradients of a module's outputs: `tokens` [tokens, 2], `calls` and `kept` are as those of a `Step`."""

    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, 2))
    calls: list[int] = field(default_factory=list)
    kept: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))


@dataclass
class Step:
    """The numbers of an optimizer step.

    Attributes:
        gradients: by name of the parameter, as the optimizer reads them.
        tokens: by name of the module, in the order of the calls: two numbers per token of its output, [tokens, 2].
        calls: by name of the module, how many of these tokens each call had.
        kept: by name of the module, which of these tokens are no padding, where that is known.
        width: by name of the module, the size of the last dim of its output.
        unmarked: modules whose outputs have padding that no mask fits, such as parts of sequences.
        returned: gradients of these outputs, by name of the module in the order of the backward pass.
        settings: of the optimizer as it steps, such as "lr of group 0".
    """

    gradients: dict[str, Sample] = field(default_factory=dict)
    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    width: dict[str, int] = field(default_factory=dict)
    unmarked: list[str] = field(default_factory=list)
    returned: dict[str, Returned] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """All that one process of a run has seen.

    Attributes:
        logs: what the script logs, numbers only.
        losses: what a hand-written loop hands to `Accelerator.backward`.
        examples: indices that data loaders read, in order.
        predictions: what evaluations and predictions give back.
        facts: of the model and the script, for the certificate.
        notes: what was changed to make the run small.
    """

    rank: int = 0
    data_rank: int = 0
    logs: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Sample] = field(default_factory=dict)
    examples: list[int] = field(default_factory=list)
    predictions: list[torch.Tensor] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the record; `read` reads it in another process."""
        torch.save(self, path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read the record of another process.

        Raises:
            TypeError: the file holds something else.
        """
        with torch.serialization.safe_globals([Record, Step, Sample, Returned]):
            record = torch.load(path, weights_only=True)
        if not isinstance(record, cls):
            raise TypeError(f"a record of this version is no {type(record).__name__}")
        return record

    def step(self, number: int) -> Step:
        """Return the numbers of an optimizer step, which counts from 0."""
        while len(self.steps) <= number:
            self.steps.append(Step())
        return self.steps[number]

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers of one call of `log` that do not depend on time."""
        kept = {
            key: float(value)
            for key, value in values.items()
            if isinstance(value, (int, float, torch.Tensor)) and not any(part in key for part in NOT_COMPARED)
        }
        if kept:
            self.logs.append(kept)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


@torch.no_grad()
def sample_of(tensor: torch.Tensor, most: int = SAMPLE) -> Sample:
    """Return a sample of a whole tensor, of `most` elements."""
    values = tensor.detach().float().cpu().flatten()
    stride = max(1, -(-values.numel() // most))
    return Sample(list(tensor.shape), float(torch.linalg.vector_norm(values)), values[::stride].clone())


@torch.no_grad()
def sample_gradients(model: nn.Module, most: int = SAMPLE) -> dict[str, Sample]:
    """Samples of the gradients of all parameters that this process has a part of. Collective under a layout."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return {strip_wrapper_names(name): sample_of(full_tensor(gradient), most) for name, gradient in named}


@torch.no_grad()
def sample_weights(model: nn.Module, most: int = SAMPLE) -> dict[str, Sample]:
    """Samples of all trained parameters that this process has a part of. Collective under a layout."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {strip_wrapper_names(name): sample_of(full_tensor(parameter), most) for name, parameter in named}


def strip_wrapper_names(name: str) -> str:
    """Return the name of a parameter or module without what wrappers put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


class TokenWatch:
    """Hooks on all modules that write two numbers per token of their outputs, and of the gradients of these.

    The numbers are the squared norm of the token and its product with a fixed vector. They depend neither on the batch
    that a token came in nor on the rank, so that tokens of a layout are found among those of one process.

    Args:
        step: gives the step that is being computed.
        backward: gradients of outputs too.

    Attributes:
        dtypes: of the outputs.
    """

    def __init__(self, model: nn.Module, step: Callable[[], Step], backward: bool = False) -> None:
        self.step, self.backward = step, backward
        self.dtypes: set[torch.dtype] = set()
        self._kept: torch.Tensor | None = None
        self._directions: dict[int, torch.Tensor] = {}
        self._handles = [
            module.register_forward_hook(functools.partial(self._note_output, strip_wrapper_names(name)))
            for name, module in model.named_modules()
            if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Dropout))
        ]

    def mark_padding(self, model: nn.Module) -> None:
        """From here on know by the mask, [examples, tokens], which tokens a batch of `model` is padded with."""

        def note_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("attention_mask")
            self._kept = mask.bool().cpu() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None

        self._handles.append(model.register_forward_pre_hook(note_mask, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _note_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
        tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
        if isinstance(tensor, LazyLogits):  # to read them would make another run than the one that is looked at
            return
        if not torch.is_grad_enabled() or tensor is None or tensor.ndim < 2 or not tensor.is_floating_point():
            return
        self.dtypes.add(tensor.dtype)
        with torch.no_grad():
            numbers = self._compute_numbers(full_tensor(tensor.detach()))
        kept = self._kept
        known = kept is not None and numbers.shape[:-1] == kept.shape
        marks = kept.flatten() if kept is not None and known else torch.ones(numbers[..., 0].numel(), dtype=torch.bool)
        step, numbers = self.step(), numbers.reshape(-1, 2)
        step.width[name] = tensor.shape[-1]
        step.calls.setdefault(name, []).append(len(numbers))
        if kept is not None and not known and name not in step.unmarked:
            step.unmarked.append(name)
        former = name in step.tokens
        step.tokens[name] = torch.cat([step.tokens[name], numbers]) if former else numbers
        step.kept[name] = torch.cat([step.kept[name], marks]) if former else marks
        if self.backward and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._add_gradient(step, name, gradient, marks))

    @torch.no_grad()
    def _add_gradient(self, step: Step, name: str, gradient: torch.Tensor, marks: torch.Tensor) -> None:
        numbers = self._compute_numbers(full_tensor(gradient)).reshape(-1, 2)
        own = step.returned.setdefault(name, Returned())
        own.tokens, own.kept = torch.cat([own.tokens, numbers]), torch.cat([own.kept, marks])
        own.calls.append(len(numbers))

    def _compute_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        values, width = tensor.float().cpu(), tensor.shape[-1]
        if width not in self._directions:
            generator = torch.Generator().manual_seed(width)
            self._directions[width] = torch.randn(width, generator=generator)
        return torch.stack([values.square().sum(-1), values @ self._directions[width]], -1)
