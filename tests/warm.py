"""Work that each forked rank would repeat, done once in the process that forks.

Half a second of work is a typical rank's whole test: a tenth of it went into parsing the metadata of packages, a fifth
into looking through all modules for copies of replaced functions. Results are those that a rank would find itself.
"""

import email
import functools
import importlib.metadata
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
    """Where modules hold the functions that patches replace; a module is read again only when its names changed.

    A name that gets another value while its module keeps as many names is missed where that value is such a function.
    """

    def __init__(self) -> None:
        self.originals: dict[int, object] = {}
        self.of_module: dict[str, tuple[int, int, list[tuple[int, ModuleType, str]]]] = {}
        self.find_unknown = patching.find_names_of

    def prepare(self) -> None:
        """Read all modules for the functions that the patches known so far replace."""
        for patch in patching.list_declared():
            if patch.copies and patch.module in sys.modules:
                original = patching._find_target(patch)
                if id(original) not in self.originals:
                    self.of_module.clear()
                    self.originals[id(original)] = original  # held, or another object may get its id
        self.read_changed_modules()

    def read_changed_modules(self) -> None:
        """Read the modules that are new, or have more or fewer names than before."""
        known = self.originals.keys()
        for key, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", {})
            before = self.of_module.get(key)
            if before is not None and before[:2] == (id(module), len(names)):
                continue
            found = []
            if not known.isdisjoint(map(id, names.values())):
                found = [(id(value), module, name) for name, value in list(names.items()) if id(value) in known]
            self.of_module[key] = id(module), len(names), found

    def find_names_of(self, functions: Iterable[Callable]) -> Copies:
        """Return what `patching.find_names_of` would."""
        wanted = list(functions)
        found = self.find_unknown(function for function in wanted if id(function) not in self.originals)
        known: Copies = {id(function): [] for function in wanted if id(function) in self.originals}
        if known:
            self.read_changed_modules()
        for key in list(sys.modules) if known else []:
            for original, module, name in self.of_module[key][2]:
                if original in known:
                    known[original].append((module, name))
        return {**found, **known}


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
    patching.find_names_of = copies.find_names_of
