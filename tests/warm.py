"""Work that each forked rank would repeat, done once in the process that forks.

A typical rank works for half a second: a tenth of that went into parsing the metadata of packages, a quarter into
looking through all modules for copies of replaced functions. Results are those that a rank would find itself.
"""

import email
import functools
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace

from transformers.core_model_loading import WeightRenaming

from hf_parallel.hooks import patching

#: Weights of each layer of most tiny models: transformers compiles a pattern for each weight that it loads.
OF_LAYERS = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
)
Copies = dict[int, list[tuple[ModuleType, str]]]


class KnownCopies:
    """Where modules hold the functions that patches replace, read before the fork.

    To look at a module copies the pages that its rank shared with the others: 50 MB for all modules. So a rank reads
    those that it has imported itself, and those that take in names when they are asked for.
    """

    def __init__(self) -> None:
        self.originals: dict[int, object] = {}
        self.places: Copies = {}
        self.last_module = ""
        self.filled_later: list[str] = []
        self.find_everywhere = patching.find_names_of

    def prepare(self) -> None:
        """Read all modules for the functions that patches replace, if there are new modules or new patches."""
        before = self.last_module, len(self.originals)
        for patch in patching.list_declared():
            if patch.copies and patch.module in sys.modules:
                original = patching._find_target(patch)
                self.originals[id(original)] = original  # held, or another object may get its id
        self.last_module = next(reversed(sys.modules))
        if before != (self.last_module, len(self.originals)):
            self.places = self.find_everywhere(self.originals.values())
            modules = list(sys.modules.items())
            self.filled_later = [key for key, one in modules if type(one) is not ModuleType and key.count(".") < 2]

    def find_names_of(self, functions: Iterable[Callable]) -> Copies:
        """Return what `patching.find_names_of` would."""
        wanted = list(functions)
        found = self.find_everywhere(function for function in wanted if id(function) not in self.originals)
        known = {
            id(function): list(self.places[id(function)]) for function in wanted if id(function) in self.originals
        }
        for module in self.list_unread_modules() if known else []:
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in known and (module, name) not in known[id(value)]:
                    known[id(value)].append((module, name))
        return {**found, **known}

    def list_unread_modules(self) -> list[ModuleType]:
        """Return modules that may hold more than when all were read: `sys.modules` has the latest at its end."""
        latest = itertools.takewhile(lambda key: key != self.last_module, reversed(sys.modules))
        return [module for key in [*latest, *self.filled_later] if (module := sys.modules.get(key)) is not None]


def parse_metadata_once() -> None:
    """Let `importlib.metadata` keep what it parsed of a text: accelerate asks for packages at each loader it makes."""
    parse = functools.cache(email.message_from_string)
    importlib.metadata.email = SimpleNamespace(message_from_string=parse)  # type: ignore[attr-defined]


def compile_patterns() -> None:
    """Compile the patterns of tiny models' weights, and drop none: imports alone fill the 512 places there are."""
    re._MAXCACHE = 4096  # type: ignore[attr-defined]
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(7) for part in OF_LAYERS]
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", *names):
        WeightRenaming(name, name)


def warm_up(copies: KnownCopies) -> None:
    """Do what ranks would repeat."""
    parse_metadata_once()
    compile_patterns()
    for library in ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "datasets", "numpy"):
        try:
            importlib.metadata.metadata(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    copies.prepare()
    patching.find_names_of = copies.find_names_of
