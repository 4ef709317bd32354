"""How a training is watched: hangs, and numbers that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.axes.axis import Axis, Keys, key
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from hf_parallel.config import ParallelConfig

AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class WatchKeys(Keys):
    hang_timeout_s: str = key(
        AUTO,
        "seconds in which nothing ends, after which all ranks say where they are; `off`",
        shown="0.8 of the process group's time-out",
    )
    hang_action: str = key("stop", "then end the run, or only `report`", choices=("stop", "report"))
    nan_action: str = key(
        "report",
        "a gradient norm that is not finite: say where it comes from; `stop` ends the run, `skip` leaves the step out",
        choices=("report", "stop", "skip"),
    )


class Watch(Axis[None, None]):
    """Read by the monitor room while a Trainer trains."""

    name = "watch"
    alone = True

    def check(self, config: ParallelConfig) -> None:
        """Refuse what is no number of seconds."""
        value = config.hang_timeout_s
        if value in (AUTO, OFF):
            return
        try:
            good = 0 < float(value) < float("inf")
        except ValueError:
            good = False
        if not good:
            refuse(f"hang_timeout_s={value}", "neither seconds, nor off", "hang_timeout_s=600")


WATCH = WatchKeys.axis = Watch()
