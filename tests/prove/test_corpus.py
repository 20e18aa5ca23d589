"""`allstep prove` over the corpus. Oracle: the planted fault, and no fault in a correct script."""

from __future__ import annotations

import pytest
from prove_corpus import FAULTS, SCRIPTS, Fault, planted
from ranks import full

from allstep.commands.prove.checks import findings
from allstep.commands.prove.runs import Runs

pytestmark = pytest.mark.launch

RIGHT = sorted(path.stem for path in SCRIPTS.glob("*.py"))
COMBINED = dict.fromkeys(fault.script for fault in FAULTS if fault.is_combined)

QUICK = ("horovod_images", "keras_fit")
QUICK_COMBINED = ("ddp_imagenet", "horovod_images", "horovod_tape", "mirrored_own_loop")


def name(fault: Fault) -> str:
    return f"{fault.finding or 'right'}-{fault.script}-{FAULTS.index(fault)}"


@pytest.mark.parametrize("family", [one if one in QUICK else full(one) for one in RIGHT])
def test_nothing_is_found_in_a_right_script(family, observe, alone):
    assert findings(Runs(alone(family), observe(SCRIPTS / f"{family}.py", family, 2), SCRIPTS / f"{family}.py")) == []


@pytest.mark.parametrize("fault", [fault if fault.is_quick else full(fault) for fault in FAULTS], ids=name)
def test_a_planted_fault_is_found(fault, observe, alone, tmp_path):
    path = tmp_path / f"{fault.script}.py"
    path.write_text(planted([fault]))
    found = findings(Runs(alone(fault.script), observe(path, fault.script, 2), path))
    assert [finding.name for finding in found] == [fault.finding] * bool(fault.finding)
    assert all(finding.evidence and finding.mend for finding in found)


@pytest.mark.parametrize("family", [one if one in QUICK_COMBINED else full(one) for one in COMBINED])
def test_faults_beside_each_other_are_all_found(family, observe, alone, tmp_path):
    faults = [fault for fault in FAULTS if fault.is_combined and fault.script == family]
    path = tmp_path / f"{family}.py"
    path.write_text(planted(faults))
    found = findings(Runs(alone(family), observe(path, family, 2), path))
    assert sorted(finding.name for finding in found) == sorted(fault.finding for fault in faults)
