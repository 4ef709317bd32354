"""Where what training keeps rests: on the device, in host memory, or on NVMe (ZeRO-Offload, ZeRO-Infinity).

And how what is sharded travels: keys of ZeRO++ (Wang et al., 2023), fewer bytes over slow links, for weights gathered
and gradients reduced.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from hf_parallel.ask.keys.data import FOLDER_TO_NAME, NVME, NVME_ALL, offload_folder, parameters_rest
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis
from hf_parallel.ranks.mesh import check_alike

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


class Offload(Axis[None, list[str]]):
    """An optimizer that steps on the host; parameters on the host are the data axes' doing."""

    name = key = "offload"
    off = "none"

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> list[str]:
        """Parameters on the host are gathered from there, by FSDP2; files need a folder."""
        offload, path = config.offload, offload_folder(config.offload)
        # Along these axes ranks hold the same parameters: replicas, norms under tp, ends of a pipeline.
        ends = getattr(anatomy.facts.get("pp"), "tied_embedding", None)
        copying = "dp_replicate", "tp", *(("pp",) if ends is not None else ())
        why = "step on copies of the same parameters, which must stay equal to the bit"
        check_alike(f"offload={offload}", config.offload_ranks, config, copying, why)
        if parameters_rest(offload) and config.sharing_size == 1:
            works = f"offload={NVME}{path}" if path else "offload=optimizer"
            refuse(f"offload={offload}", "one data rank gathers no parameters, it needs them all", works)
        if offload.startswith(NVME_ALL) and config.sharing_size == config.dp_replicate_size:
            why = "replicas alone keep all parameters for every pass"
            refuse(f"offload={offload}", why, f"offload={NVME}{path}")
        if not path:
            return []
        way, path = offload.split(":", 1)
        if path == FOLDER_TO_NAME:
            refuse(f"offload={way}:{path}", f"{path} stands for a folder on a fast disk", f"offload={way}:/scratch")
        above = os.path.abspath(path)
        while not os.path.exists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above):
            refuse(f"offload={offload}", f"{above} is no folder", f"offload={way}:{os.path.dirname(above)}")
        try:
            tempfile.TemporaryFile(dir=above).close()  # more than permissions: /proc takes no files from anybody
        except OSError as error:
            refuse(f"offload={offload}", f"{above} cannot be written to ({error.strerror})", "offload=optimizer")
        what = "parameters and optimizer states" if offload.startswith(NVME_ALL) else "optimizer states"
        return [f"offload: {what} are in files below {path} that end with the process; checkpoints have them"]

    def notes(self, part: list[str]) -> list[str]:
        return part

    def finish(self, model: nn.Module, part: list[str], building: Building) -> None:
        """Let optimizers of this model step on the host, and parameters lie in files."""
        from hf_parallel.axes.data.files import keep_parameters_in_file
        from hf_parallel.axes.data.host_step import step_on_host

        config, offload = building.mesh.config, building.mesh.config.offload_way
        if config.offload_ranks is not None and building.mesh.rank not in config.offload_ranks:
            return
        step_on_host(model, offload)
        if offload.startswith(NVME_ALL):
            for root, _ in building.roots:
                keep_parameters_in_file(root, offload)


OFFLOAD = Offload()


class Compression(Axis[None, list[str]]):
    """Other collectives for the units that the data axes have sharded."""

    name = "compression"

    def is_on(self, config: ParallelConfig) -> bool:
        return bool(config.compressed)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> list[str]:
        """Nothing is chosen but what to tell; the ranks must be there."""
        ranks, group = config.dp_shard_size, config.hierarchical_shard
        if ranks == 1:
            asked = config.compressed[0]
            refuse(asked, "dp_shard_size=1 gathers no weights and scatters no gradients", "dp_shard_size=2")
        if group is not None and (ranks % group or group == ranks):
            divisors = [n for n in range(2, ranks) if ranks % n == 0]
            works = f"hierarchical_shard={divisors[-1]}" if divisors else "hierarchical_shard=none"
            refuse(f"hierarchical_shard={group}", f"no whole part of dp_shard_size={ranks}", works)
        if group is None or config.pp_size == 1:
            return []
        return ["hierarchical_shard saves traffic but no memory here: a pipeline keeps weights for its backward pass"]

    def notes(self, part: list[str]) -> list[str]:
        return part

    def finish(self, model: nn.Module, part: list[str], building: Building) -> None:
        """Give each unit its collectives."""
        from hf_parallel.axes.data.compressed import compress

        for root, _ in building.roots:
            compress(root, building.mesh)


COMPRESSION = Compression()
