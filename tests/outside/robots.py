"""LeRobot: policies that are no models of Transformers, in its own loop of Accelerate."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "robots.py")
ROBOTS = {
    f"LeRobot {kind}{more}": Case(
        SCRIPT, f"--kind {kind} --output_dir OUT --batch_size ROWS {words}", needs=("lerobot",)
    )
    for kind in ("act", "diffusion")
    for more, words in (("", ""), (", pads", "--pads"))
}
