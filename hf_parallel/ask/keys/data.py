"""Keys of the data axes: what is sharded (ZeRO), when gradients are reduced, how few bytes travel, where it rests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction

from hf_parallel.ask.keys.sizes import Keys, Sizes, key
from hf_parallel.ask.spec import refuse

#: `batch_shares` where data ranks have as many examples, and where their speeds are measured.
EVEN, MEASURED = "even", "auto"
#: Ways of `offload` that have a folder: only states in files, and all that rests.
NVME, NVME_ALL = "nvme:", "nvme_all:"
#: The folder of planned layouts, which the user puts a real one for.
FOLDER_TO_NAME = "PATH"
#: Numbers of `quantize_gradients` and `quantize_weights` that are packed, or unpacked, at a time.
PIECE = 2**24


def parse_shares(text: str) -> tuple[Fraction, ...]:
    """Return the numbers of `3:3:1`, or of `3x2:1`.

    Raises:
        ValueError, ZeroDivisionError: it is none.
    """
    found: list[Fraction] = []
    for part in text.split(":"):
        share, several, times = part.partition("x")
        if several and not int(times) > 0:
            raise ValueError(part)
        found += [Fraction(share)] * (int(times) if several else 1)
    return tuple(found)


@dataclass(frozen=True)
class DataKeys(Sizes):
    """Settings of `dp_shard` and `dp_replicate`."""

    zero_stage: int = key(
        3,
        "what `dp_shard` shards: nothing (0), optimizer states (1), gradients too (2), weights too (3)",
        choices=(0, 1, 2, 3),
    )
    gradient_reduction: str = key(
        "auto",
        "`micro_step` reduces gradients in every micro-step of an accumulation; `step` once, and holds them whole",
        choices=("auto", "micro_step", "step"),
    )
    pack_tokens: int = key(
        0,
        "a Trainer's batch of a data rank is whole examples of at most so many tokens, joined to one row without "
        "padding, and all data ranks have about as many; 0: per_device_train_batch_size",
    )
    padding_free: bool = key(
        False, "a Trainer's batches keep their rows, joined to one without padding; `--parallel auto` may choose it"
    )
    batch_shares: str = key(
        EVEN,
        "how data ranks share the examples of each batch: `2:2:1` is a number for every data rank, by its speed, "
        "`3x8:1x8` eight of 3 and eight of 1; "
        "`auto` measures speeds; the global batch stays that of `even`",
    )

    @property
    def shares_batches(self) -> bool:
        """Do data ranks have unlike parts of a batch?"""
        return self.batch_shares != EVEN

    @property
    def shares(self) -> tuple[Fraction, ...] | None:
        """Return the share of each data rank in a batch; None: all have as many examples, or as measured."""
        return None if self.batch_shares in (EVEN, MEASURED) else parse_shares(self.batch_shares)

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Return whether gradients are reduced in every micro-step. By default they are where that holds less of them.

        Not where replicas would have to reduce them as often over slow links. Needs a resolved config.
        """
        if self.gradient_reduction != "auto":
            return self.gradient_reduction == "micro_step"
        return self.zero_stage >= 2 and self.dp_shard_size > 1 and self.dp_replicate_size == self.pp_size == 1

    @property
    def reduces_each_run(self) -> bool:
        """Return whether a pipeline reduces gradients in every run of its schedule, rather than once per step."""
        return self.pp_size > 1 and self.zero_stage >= 2 and self.gradient_reduction == "auto"

    def check_keys(self) -> None:
        """Require shards to hold what a micro-step reduces, and whole batches to join."""
        if self.pack_tokens < 0:
            works = "pack_tokens=8192" if self.pp_size == 1 and not self.padding_free else "pack_tokens=0"
            refuse(f"pack_tokens={self.pack_tokens}", "not a number of tokens", works)
        instead, own = "dp_shard in the place of pp", (field for field in fields(self) if "pipeline_" in field.name)
        staged = any(getattr(self, field.name) != field.default for field in own)  # settings that need stages
        if self.pack_tokens and self.pp_size != 1:
            why = f"a pipeline (pp_size={self.pp_size}) cuts batches by rows, and a packed batch is one row"
            refuse(f"pack_tokens={self.pack_tokens}", why, "pack_tokens=0" if staged else instead)
        if self.padding_free and self.pp_size != 1:
            why = f"a pipeline (pp_size={self.pp_size}) cuts batches by rows, and a joined batch is one row"
            refuse("padding_free=true", why, "padding_free=false" if staged else instead)
        if self.padding_free and self.pack_tokens:
            why = f"pack_tokens={self.pack_tokens} makes batches of its own, without padding"
            refuse("padding_free=true", why, "padding_free=false")
        if self.shares_batches:  # a number for each data rank, of batches that are counted in examples
            what, ranks = f"batch_shares={self.batch_shares}", self.data_parallel_size
            known = -1 not in self.sizes.values()
            works = "batch_shares=" + (":".join(["2"] * (ranks - 1) + ["1"]) if known else EVEN)
            if known and ranks == 1:
                refuse(what, "one data rank has nobody to share a batch with", "batch_shares=even")
            try:
                shares = self.shares or ()
            except (ValueError, ZeroDivisionError) as error:
                why = "not `even` or `auto`, and not numbers with colons between them, as 2:1 is"
                refuse(what, why, works, cause=error)
            if shares and min(shares) <= 0:
                refuse(what, "each data rank has a share above 0", works)
            if shares and known and len(shares) != ranks:
                refuse(what, f"{len(shares)} shares for {ranks} data ranks", works)
            if self.pack_tokens and self.batch_shares == MEASURED:
                refuse(what, f"pack_tokens={self.pack_tokens} deals an epoch before it begins", works)
        if self.gradient_reduction != "micro_step":
            return
        what = "gradient_reduction=micro_step"
        if self.pp_size != 1:
            refuse(what, "a pipeline reduces once per run of its schedule at most", "gradient_reduction=step")
        if self.zero_stage < 2:
            refuse(what, f"zero_stage={self.zero_stage} holds whole gradients", "zero_stage=2")

    def resolved_sizes(self) -> Mapping[str, int]:
        """Return the sizes that follow from settings, once all are known: shards of ZeRO-0 are replicas."""
        if self.zero_stage or self.dp_shard_size == 1:
            return {}
        return {"dp_replicate_size": self.dp_replicate_size * self.dp_shard_size, "dp_shard_size": 1}


@dataclass(frozen=True)
class CompressionKeys(DataKeys):
    """ZeRO++ (Wang et al., 2023): fewer bytes over slow links, for weights gathered and gradients reduced."""

    hierarchical_shard: int | None = key(
        None, "ranks of dp_shard that are close: the backward pass gathers weights among these alone (hpZ)"
    )
    quantize_weights: str = key(
        "none", "`int8` or `fp8`: gather weights in 8 bits (qwZ)", choices=("none", "int8", "fp8")
    )
    quantize_gradients: str = key(
        "none", "`int8` or `int4`: reduce gradients in fewer bits (qgZ)", choices=("none", "int8", "int4")
    )
    gradient_error_feedback: bool = key(False, "add what quantize_gradients has lost to the next step's gradients")

    @property
    def compressed(self) -> list[str]:
        """Return the settings that compress, as they stand in a spec."""
        names = ("hierarchical_shard", "quantize_weights", "quantize_gradients")
        return [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) not in (None, "none")]

    def check_keys(self) -> None:
        """Reject a key without the other one that it needs."""
        if self.gradient_error_feedback and self.quantize_gradients == "none":
            refuse("gradient_error_feedback=true", "quantize_gradients=none loses nothing", "quantize_gradients=int4")
        group = self.hierarchical_shard
        if group is not None and group < 2:
            works = f"hierarchical_shard={2 if self.zero_stage == 3 else 'none'}"
            refuse(f"hierarchical_shard={group}", "a group has 2 ranks or more", works)
        for asked in self.compressed:
            if self.zero_stage == 0:
                refuse(asked, "zero_stage=0 shards nothing", "zero_stage=3")
        if group is not None and self.zero_stage != 3:
            why = f"zero_stage={self.zero_stage} keeps weights until the backward pass, which gathers none"
            refuse(f"hierarchical_shard={group}", why, "zero_stage=3")


@dataclass(frozen=True)
class OffloadKeys(Keys):
    """Where the training state rests: on the device, in host memory, or on NVMe (ZeRO-Offload, ZeRO-Infinity)."""

    holds_alone = True

    offload: str = key(
        "none",
        "`optimizer`: its states and its step on the host, `optimizer@2:3` on these ranks alone; `cpu`: parameters "
        "and gradients, too; `nvme:PATH`: its states in files; `nvme_all:PATH`: parameters, too",
    )

    @property
    def offload_way(self) -> str:
        """The place of what rests elsewhere, on ranks that offload."""
        return self.offload if offload_folder(self.offload) else self.offload.partition("@")[0]

    @property
    def offload_ranks(self) -> frozenset[int] | None:
        """The ranks that offload; None: all."""
        return None if offload_folder(self.offload) else read_listed_ranks(self.offload)

    def check_keys(self) -> None:
        """Reject a way that is not known."""
        way = self.offload_way
        if way not in ("none", "optimizer", "cpu") and not offload_folder(way):
            refuse(f"offload={way}", "not one of none, optimizer, cpu, nvme:PATH, nvme_all:PATH", "offload=cpu")
        steps = "optimizer" if way == "cpu" else way  # what takes ranks
        check_rank_list(f"offload={self.offload}", steps, "" if offload_folder(way) else self.offload)
        if way == "cpu" and self.offload_ranks is not None:
            why = "parameters rest on the host of all ranks that gather them, or of none"
            refuse(f"offload={self.offload}", why, f"offload=optimizer@{self.offload.partition('@')[2]}")


def read_listed_ranks(setting: str) -> frozenset[int] | None:
    """Return the ranks of `full@2:3`, or of `full@8-15`; None: it names none.

    Raises:
        ValueError: these are no ranks.
    """
    _, several, text = setting.partition("@")
    if not several:
        return None
    found: set[int] = set()
    for part in text.split(":"):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def check_rank_list(what: str, way: str, setting: str) -> None:
    """Require ranks behind `@`, of a way that is on."""
    key = what.partition("=")[0]
    try:
        ranks = read_listed_ranks(setting)
    except ValueError as error:
        refuse(what, "ranks are numbers with colons between them, or a range", f"{key}={way}@0", cause=error)
    if ranks is not None and not ranks:
        refuse(what, "names no rank", f"{key}={way}@0")
    if ranks is not None and way == "none":
        refuse(what, "is off on all ranks", f"{key}=none")


def offload_folder(offload: str) -> str:
    """Return PATH of `nvme:PATH`, or an empty string where offloaded tensors rest in memory."""
    return offload.partition(":")[2] if offload.startswith((NVME, NVME_ALL)) else ""


def parameters_rest(offload: str) -> bool:
    """Do parameters and gradients rest on the host, and go to the device to be gathered?"""
    return offload.partition(":")[0] in ("cpu", "nvme_all")
