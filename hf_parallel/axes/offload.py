"""Where what training keeps rests: on the device, in host memory, or on NVMe (ZeRO-Offload, ZeRO-Infinity)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.axes.axis import Building
    from hf_parallel.config import ParallelConfig
    from hf_parallel.model.anatomy import Anatomy

_NVME = "nvme:"


@dataclass(frozen=True)
class OffloadKeys(Keys):
    offload: str = key(
        "none",
        "`optimizer`: its states and its step on the host; `cpu`: parameters and gradients, too; `nvme:PATH`: its "
        "states in files",
    )


class Offload(Axis[None, list[str]]):
    """An optimizer that steps on the host; parameters on the host are the data axes' doing."""

    name = "offload"

    def check(self, config: ParallelConfig) -> None:
        """One of the ways that there are."""
        way, path = config.offload, folder(config.offload)
        if way not in ("none", "optimizer", "cpu") and not path:
            refuse(f"offload={way}", "not one of none, optimizer, cpu, nvme:PATH", "offload=cpu")

    def is_on(self, config: ParallelConfig) -> bool:
        return config.offload != "none"

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: None) -> list[str]:
        """Parameters on the host are gathered from there, by FSDP2; files need a folder."""
        if config.offload == "cpu" and config.sharing_size == 1:
            refuse("offload=cpu", "one data rank gathers no parameters, it needs them all", "offload=optimizer")
        path = folder(config.offload)
        if path:
            _check_folder(path)
            return [f"optimizer states in unnamed files below {path}, gone with the process; checkpoints hold them"]
        return []

    def notes(self, part: list[str]) -> list[str]:
        return part

    def finish(self, model: Any, part: list[str], building: Building) -> None:
        """Let optimizers of this model step on the host."""
        from hf_parallel.axes.data.host_step import step_on_host

        step_on_host(model, building.mesh.config.offload)


def folder(offload: str) -> str:
    """PATH of `nvme:PATH`; empty if states rest in memory."""
    return offload.removeprefix(_NVME) if offload.startswith(_NVME) else ""


def _check_folder(path: str) -> None:
    """One that can be written to, made if it is not there."""
    if path == "PATH":  # as `plan` writes it
        refuse(f"offload={_NVME}PATH", "PATH stands for a folder on a fast disk", f"offload={_NVME}/scratch")
    above = os.path.abspath(path)
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        refuse(f"offload={_NVME}{path}", f"{above} is no folder", f"offload={_NVME}{os.path.dirname(above)}")
    if not os.access(above, os.W_OK | os.X_OK):
        refuse(f"offload={_NVME}{path}", f"{above} cannot be written to", "offload=optimizer")


OFFLOAD = OffloadKeys.axis = Offload()
