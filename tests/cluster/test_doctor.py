"""The doctor on simulated hosts: healthy ones, and every fault that can be made there, each found by its own line.

Oracle: the changes made to each host. The hosts are started once, for four examinations.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import bed
from ranks import REPOSITORY
from requirements import need

pytestmark = pytest.mark.cold

need("tc", "faketime")

NUM_HOSTS = 7
SITE_PACKAGES = Path(importlib.util.find_spec("torch").origin).parents[1]
[PACKAGE] = SITE_PACKAGES.glob("timm-*.dist-info")
FAKETIME = subprocess.run(["faketime", "-f", "+0s", "printenv", "LD_PRELOAD"], capture_output=True, text=True).stdout
SLOW_BYTES_PER_SECOND = 5_000_000  # 40 Mbit/s, though the interfaces claim 10 Gbit/s

# Commands on the launcher host, which changes the other hosts. server1 stays healthy.
SCRIPT = """
cd {folder}
examine() {{
  name=$1; shift
  (cd {repository} && allstep doctor --json "$@") >$name.json
  echo $? >$name.status
}}
sshd_anew() {{
  kill -HUP "$(pgrep -P "$(cat /run/bed/$1.pid)")"
  until [ "$(grep -c 'Server listening on 0' /run/bed/$1.log)" = 2 ]; do sleep 0.05; done
}}

examine well -H server1:2,server2:1

tc qdisc add dev v1 root tbf rate 40mbit burst 32k latency 400ms
examine slow -H server1:1,server2:1 --skip frameworks,data,ports
tc qdisc del dev v1 root

cp /etc/ssh/sshd_config sshd_config
echo 'SetEnv LD_PRELOAD={faketime} FAKETIME=+90s' >>/etc/ssh/sshd_config
sshd_anew server2
sed 's|^AuthorizedKeysFile .*|AuthorizedKeysFile none|' sshd_config >/etc/ssh/sshd_config
sshd_anew server4
{{ cat sshd_config; echo 'SetEnv TMPDIR=/run/full'; }} >/etc/ssh/sshd_config
sshd_anew server7
cat sshd_config >/etc/ssh/sshd_config
sed -i '1iHost server3\\n  StrictHostKeyChecking yes' /etc/ssh/ssh_config

# Each host has a home directory of its own.
for i in 1 2; do
  ssh server$i "mkdir -p .cache/allstep/datasets/mnist; echo $i >.cache/allstep/datasets/mnist/train"
done
sed 's/^Version: .*/Version: 0.0.1/' {package}/METADATA >METADATA
sed 's/"tensorflow": ".*"/"tensorflow": "2.20.0"/' {site_packages}/horovod/metadata.json >metadata.json
echo "# changed" >train.py
mkdir empty
ssh server2 "
  mount --bind $PWD/METADATA {package}/METADATA
  mount --bind $PWD/train.py {repository}/pytorch/train.py
  mount --bind $PWD/metadata.json {site_packages}/horovod/metadata.json
  mount --bind $PWD/empty {site_packages}/torch/lib"
ssh server5 mount -t tmpfs tmpfs {prefix}
ip link set v6 down
ip -n server7 rule add to 10.77.0.1 ipproto tcp dport 1024-65534 prohibit
ip -n server7 link set eth0 mtu 1400
ssh server7 "mkdir /run/full; mount -t tmpfs -o size=64k tmpfs /run/full"
examine faults -H server1:1,server2:1,server3:1,server4:1,server5:1,server6:1,server7:1 --skip frameworks
examine libraries -H server2:1 --skip data,ports,all-reduce
"""
# Name of the examination, host of the finding (none where several are concerned), subject and text.
FAULTS = {
    "a clock that is wrong": ("faults", "server2", "clock", r"^(89\.\d|90(\.\d)?) s ahead of launcher"),
    "another package": ("faults", "server2", "packages", r"^timm 0\.0\.1, and [\d.]+ on launcher"),
    "a changed file": ("faults", "server2", "checkout", r"^pytorch/train\.py unlike that of launcher"),
    "other data": ("faults", "", "data", "^mnist of server2 is not that of server1"),
    "a host key that ssh asks about": ("faults", "server3", "ssh", "asks whether the host's key is right"),
    "ssh that asks for a password": ("faults", "server4", "ssh", "asks for a password"),
    "no checkout": ("faults", "server5", "checkout", "no allstep at the path that it has here"),
    "a host that is cut off": ("faults", "server6", "ssh", "there is no way to it|does not answer"),
    "a port that is closed": ("faults", "", "ports", "^server7 does not reach server1: Permission denied"),
    "the answer that does not come": ("faults", "", "ports", "^server1 does not reach server7: timed out"),
    "another MTU": ("faults", "", "network mtu", r"^unlike MTUs on 10\.77\.0\.0/24: .*server7 1400"),
    "a full disk": ("faults", "server7", "disk", "^65.5 kB free in /run/full: it is full"),
    "a library that is missing": ("libraries", "server2", "pytorch", "cannot be imported: .*libtorch.*"),
    "a Horovod for others": ("libraries", "server2", "tensorflow", r"but Horovod was built for 2\.20\.0"),
}


@pytest.fixture(scope="module")
def examined(tmp_path_factory) -> dict[str, tuple[int, list[dict]]]:
    """Return the exit status and the findings of each examination."""
    folder = tmp_path_factory.mktemp("doctor")
    script = SCRIPT.format(
        folder=folder,
        repository=REPOSITORY,
        prefix=sys.prefix,
        site_packages=SITE_PACKAGES,
        package=PACKAGE,
        faketime=FAKETIME.strip(),
    )
    result = bed.run("bash", "-c", script, num_hosts=NUM_HOSTS, timeout=500)
    print(result.output)
    return {
        file.stem: (int(file.read_text()), json.loads(file.with_suffix(".json").read_text())["findings"])
        for file in folder.glob("*.status")
    }


def found(findings: list[dict], subject: str, host: str = "") -> list[dict]:
    return [one for one in findings if one["subject"] == subject and one["host"] == host]


def test_hosts_that_are_well(examined):
    status, findings = examined["well"]
    assert [one for one in findings if one["level"] == "fault"] == []
    assert status == 0
    for host in ("server1", "server2"):
        subjects = {one["subject"] for one in findings if one["host"] == host}
        assert {"ssh", "pytorch", "tensorflow", "horovod", "memory", "disk", "software", "clock"} <= subjects
    assert {one["subject"] for one in findings if not one["host"]} == {"network", "ports", "all-reduce"}
    assert "2 ranks: " in found(findings, "all-reduce", "server1")[0]["found"]
    assert "10 Gbit/s" in found(findings, "network")[0]["found"]


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_line(name, examined):
    examination, host, subject, pattern = FAULTS[name]
    status, findings = examined[examination]
    lines = found(findings, subject, host)
    assert [one for one in lines if one["level"] == "fault" and one["fix"] and re.search(pattern, one["found"])], lines
    assert status == 1


def test_nothing_else_is_told(examined):
    """Control: server1 has no fault, and the other hosts have only those that were made."""
    _, findings = examined["faults"]
    faults = {(one["host"], one["subject"]) for one in findings if one["level"] == "fault"}
    assert faults == {(host, subject) for examination, host, subject, _ in FAULTS.values() if examination == "faults"}


def test_a_slow_link(examined):
    """The measured rate is close to the limit, and is shown next to the rate that the interfaces claim."""
    _, findings = examined["slow"]
    [line] = found(findings, "all-reduce")
    number, unit = re.search(r"2 hosts: ([\d.]+) (kB|MB)/s", line["found"]).groups()
    assert float(number) * {"kB": 1e3, "MB": 1e6}[unit] < 1.2 * SLOW_BYTES_PER_SECOND
    assert line["level"] == "warning" and "1.25 GB/s" in line["found"] and line["fix"]
