"""Checks that hosts agree in what all ranks of a job must share: Python, packages, checkout, data sets, time."""

from collections.abc import Mapping

from allstep.commands.doctor.conversation import Clock
from allstep.commands.doctor.finding import Finding, fault, ok, several, warning
from allstep.commands.doctor.software import Software

# Clock skew puts files on a shared disk and log lines out of order; Slurm's munge and Kerberos fail at 300 s.
CLOCK_FAULT_SECONDS = 5.0
CLOCK_WARNING_SECONDS = 0.5


def check_software(software: Software, here: Software, here_name: str) -> list[Finding]:
    """Report in which software a host differs from the host where the doctor runs."""
    findings = []
    if software.python != here.python:
        found = f"Python {software.python}, and {here.python} on {here_name}"
        findings.append(fault("python", found, "have the same Python on every host"))
    if unlike := differences(software.packages, here.packages):
        fix = "install the same versions on every host, in a checkout by make setup"
        findings.append(fault("packages", f"{several(unlike)} on {here_name}", fix))
    if unlike := [name for name in here.sources if software.sources.get(name) != here.sources[name]]:
        commit = f" (commit {software.commit[:10]})" if software.commit and software.commit != here.commit else ""
        found = f"{several(unlike)} unlike that of {here_name}{commit}"
        findings.append(fault("checkout", found, "bring every host to the same commit, without changes"))
    if findings:
        return findings
    return [ok("software", f"Python, {len(here.packages)} packages and {len(here.sources)} files as on {here_name}")]


def differences(packages: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return packages whose versions differ, as in `torch 2.13.0, and 2.14.1`; a missing package is `none`."""
    names = sorted({*packages, *expected})
    pairs = ((name, packages.get(name, "none"), expected.get(name, "none")) for name in names)
    return [f"{name} {found}, and {wanted}" for name, found, wanted in pairs if found != wanted]


def check_data(hosts: Mapping[str, Software]) -> list[Finding]:
    """Check whether data sets that are on several hosts have the same files."""
    findings = []
    for name in sorted({name for one in hosts.values() for name in one.data_sets}):
        digests = {host: one.data_sets[name].digest for host, one in hosts.items() if name in one.data_sets}
        first, *others = digests
        unlike = [host for host in others if digests[host] != digests[first]]
        lacking = [host for host in hosts if host not in digests]
        if unlike:
            sizes = {host: hosts[host].data_sets[name] for host in (first, unlike[0])}
            listed = "; ".join(f"{host}: {one.num_files} files, {one.num_bytes} bytes" for host, one in sizes.items())
            fix = f"remove {name} on one, and copy it from the other"
            findings.append(fault("data", f"{name} of {unlike[0]} is not that of {first} ({listed})", fix))
        elif lacking:
            fix = "copy it there, unless it is one that a trainer downloads"
            findings.append(warning("data", f"{name} is not on {several(lacking)}", fix))
        else:
            findings.append(ok("data", f"{name} is the same on {several(list(digests))}"))
    return findings


def check_clock(clock: Clock, here_name: str) -> Finding:
    """Check whether a host's clock agrees with that of the host where the doctor runs."""
    away = abs(clock.seconds_ahead) - clock.uncertainty
    found = f"{abs(clock.seconds_ahead):.3g} s {'ahead of' if clock.seconds_ahead > 0 else 'behind'} {here_name}"
    fix = "start chrony or systemd-timesyncd on both"
    if away > CLOCK_FAULT_SECONDS:
        return fault("clock", found, fix)
    if away > CLOCK_WARNING_SECONDS:
        return warning("clock", found, fix)
    return ok("clock", f"that of {here_name}, within {abs(clock.seconds_ahead) + clock.uncertainty:.2g} s")


def check_ports(unreached: Mapping[str, Mapping[str, str]], num_hosts: int) -> list[Finding]:
    """Check whether all hosts reach each other at arbitrary free ports.

    `unreached` has for each host the reasons by name of the hosts that it does not reach.
    """
    pairs = [(one, other, why) for one, others in unreached.items() for other, why in others.items()]
    if not pairs:
        return [ok("ports", f"all {num_hosts} hosts reach each other")]
    advice = {
        True: "correct the name in /etc/hosts or DNS of the first",
        False: "open the ports from 1024 to 65535 between the hosts: ranks listen at any of them",
    }
    return [
        fault("ports", f"{one} does not reach {other}: {why}", advice["known" in why or "resolution" in why])
        for one, other, why in pairs
    ]
