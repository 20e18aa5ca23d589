"""`allstep prove` over the corpus. Oracle: which fault was planted; none in a right script."""

from __future__ import annotations

import pytest
from prove_corpus import FAULTS, SCRIPTS

from allstep.benchmarks.proving.checks import findings
from allstep.benchmarks.proving.runs import Runs

RIGHT = sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("family", RIGHT)
def test_nothing_is_found_in_a_right_script(family, observe, alone):
    assert findings(Runs(alone(family), observe(SCRIPTS / f"{family}.py", family, 2))) == []


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=f"{fault.finding}-{fault.script}-{number}", marks=[pytest.mark.full] * fault.is_full)
        for number, fault in enumerate(FAULTS)
    ],
)
def test_a_planted_fault_is_found(fault, observe, alone, tmp_path):
    path = tmp_path / f"{fault.script}.py"
    path.write_text(fault.planted())
    found = findings(Runs(alone(fault.script), observe(path, fault.script, 2)))
    assert [finding.name for finding in found] == [fault.finding]
    assert all(finding.evidence and finding.mend for finding in found)
