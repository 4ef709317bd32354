"""Keys of what runs in a pipeline's bubbles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_parallel.ask.keys.pipeline import SINGLE_SCHEDULES, PipelineKeys, refuse_settings_beside
from hf_parallel.ask.keys.sizes import key
from hf_parallel.ask.spec import refuse

KFAC = "kfac"
_DAMPING, _INTERVAL = 0.01, 4
#: Key -> the value that `pipeline_fill=kfac` takes, and why it takes no other.
_PLAIN_LAYERS: dict[str, tuple[int | bool | str, str]] = {
    "cp_size": (1, "multiplies whole sequences"),
    "tp_size": (1, "inverts the curvature of whole matrices"),
    "ep_size": (1, "has too few tokens per expert"),
    "offload": ("none", "reads gradients where the layers are"),
    "compile": ("none", "reads the inputs of each linear layer by hooks"),
    "precision": ("auto", "has not been compared with one process in 8 bits"),
    "activation_checkpointing": ("none", "would see each forward pass twice"),
    "tiled_mlp": (False, "would see each piece of an MLP's forward pass twice"),
    "activation_offload": (False, "keeps activations until a bubble has room for them"),
    "batch_shares": ("even", "takes the curvature of a whole batch"),
}


@dataclass(frozen=True)
class FillKeys(PipelineKeys):
    """Settings of the work that runs in bubbles."""

    pipeline_fill: str = key(
        "none",
        "`kfac`: bubbles compute the curvature of linear layers, by which gradients are preconditioned (K-FAC); "
        "another algorithm",
        choices=("none", KFAC),
    )
    kfac_damping: float | None = key(
        None, "damping of `pipeline_fill=kfac`, shared between both factors of a layer", shown=f"{_DAMPING}"
    )
    kfac_interval: int | None = key(
        None, "optimizer steps from one curvature of `pipeline_fill=kfac` to the next", shown=f"{_INTERVAL}"
    )

    pipeline_energy: str = key(
        "none",
        "`slack`: actions that have time run at lower clocks; needs NVML and administrator rights",
        choices=("none", "slack"),
    )

    @property
    def fills_bubbles(self) -> bool:
        """Does a rank compute curvature while it waits?"""
        return self.pipeline_fill != "none"

    @property
    def damping(self) -> float:
        """The damping in force."""
        return _DAMPING if self.kfac_damping is None else self.kfac_damping

    @property
    def curvature_interval(self) -> int:
        """Optimizer steps from one curvature to the next."""
        return _INTERVAL if self.kfac_interval is None else self.kfac_interval

    @property
    def sharing_size(self) -> int:
        """Number of ranks whose gradients FSDP2 averages; with K-FAC the pipeline averages whole gradients itself."""
        return 1 if self.fills_bubbles else super().sharing_size

    def check_keys(self) -> None:
        """Reject layouts in which a rank has no bubble or not the whole of a layer, or actions have no slack."""
        asked, of_energy = f"pipeline_fill={self.pipeline_fill}", f"pipeline_energy={self.pipeline_energy}"
        fills, schedule = " and ".join(SINGLE_SCHEDULES), f"pipeline_schedule={self.pipeline_schedule}"
        if self.pipeline_energy != "none":
            if self.pp_size == 1:
                refuse(of_energy, "pp_size=1 has no bubbles", "pp_size=2")
            if self.pipeline_schedule not in SINGLE_SCHEDULES:
                refuse(schedule, f"{of_energy} knows the slack of {fills}", "pipeline_schedule=1f1b")
            if self.fills_bubbles:
                refuse(asked, f"{of_energy} takes the bubbles", "pipeline_fill=none")
        if not (math.isfinite(self.damping) and self.damping > 0):
            works = f"kfac_damping={_DAMPING if self.fills_bubbles else 'none'}"
            refuse(f"kfac_damping={self.damping}", "a damping is more than 0", works)
        if self.curvature_interval < 1:
            works = f"kfac_interval={_INTERVAL if self.fills_bubbles else 'none'}"
            refuse(f"kfac_interval={self.curvature_interval}", "is one step at least", works)
        if not self.fills_bubbles:
            for name in ("kfac_damping", "kfac_interval"):
                if getattr(self, name) is not None:
                    refuse(f"{name}={getattr(self, name)}", f"{asked} has no curvature", "pipeline_fill=kfac")
            return
        if self.pp_size == 1:
            refuse(asked, "pp_size=1 has no bubbles", "pp_size=2")
        if self.pipeline_schedule not in SINGLE_SCHEDULES:
            refuse(schedule, f"{asked} fills the bubbles of {fills} alone", "pipeline_schedule=1f1b")
        if getattr(self, "nan_action", "report") == "skip":
            why = f"{asked} has the curvature of the step that is left out"
            refuse("nan_action=skip", why, "nan_action=stop")
        refuse_settings_beside(self, asked, _PLAIN_LAYERS, "needs whole gradients of a layer")
