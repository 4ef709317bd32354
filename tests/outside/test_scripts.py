"""Example scripts of other projects, unchanged under every layout, against one process."""

import importlib.util
from functools import partial

import pytest

from tests.distributed import RankFailure, run, run_alone
from tests.training import axes, none, spec_id

pytest.importorskip("datasets")

from tests.outside import materials, watching
from tests.outside.cases import CASES


class Desk:
    """A folder with models, data and what the scripts write; each reference runs once."""

    def __init__(self, root):
        self.root, self.references, self.count = root, {}, 0
        run_alone(materials.write_all, str(root))

    def run(self, name, spec=None):
        """What each rank of the layout does with the script, or one plain process."""
        case, self.count = CASES[name], self.count + 1
        out = str(self.root / f"run-{self.count}")
        seen = self.launch(case, case.arguments, out, spec)
        return self.launch(case, f"{case.arguments} {case.again}", out, spec) if case.again else seen

    def launch(self, case, arguments, out, spec):
        """One launch of the script."""
        words = case.words(arguments, str(self.root), out, spec)
        call = partial(watching.run_script, case.script, words, str(self.root), out, spec)
        environment = {"TQDM_DISABLE": "1", "ACCELERATE_USE_CPU": "true"}
        if spec is None:
            return [run_alone(call, env=environment)]
        return run(call, axes(spec)["world"], init=False, env=environment)

    def reference(self, name):
        """What the script does in one plain process."""
        if name not in self.references:
            (self.references[name],) = self.run(name)
        return self.references[name]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("outside"))


def cases():
    """A parameter per script and layout, with its cell of the support matrix."""
    for name, case in CASES.items():
        for spec in case.specs:
            outcome = "refused" if spec in case.refused else "passed"
            marks = [pytest.mark.support(spec, name, outcome=outcome)]
            marks += [
                pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")
                for library in case.needs
            ]
            yield pytest.param(name, spec, marks=marks, id=f"{name.replace(' ', '_')}-{spec_id(spec)}")


@pytest.mark.parametrize(("name", "spec"), list(cases()))
def test_as_in_one_process(desk, name, spec):
    case = CASES[name]
    if spec in case.refused:
        with pytest.raises(RankFailure, match=f"SpecError: .*{case.refused[spec]}"):
            desk.run(name, spec)
        return
    reference = desk.reference(name)
    none(watching.differences(desk.run(name, spec), reference, case.tolerance))
