"""Changes of other libraries by other ways than a `@patch`: each module that makes one lists it in `REPLACES`.

docs/reference/patches.md lists the rows. A test compares what a layout has changed in those libraries with both lists.
"""

from __future__ import annotations

from typing import NamedTuple


class Replaced(NamedTuple):
    """A replacement of `target` ("package.module:Class.attribute"), why it is needed and while what holds."""

    target: str
    why: str
    when: str
