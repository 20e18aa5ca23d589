"""All checks of the doctor, on each host and between hosts, in the order in which findings are printed."""

import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.commands.doctor import all_reduce, gpus, launchers, machine, network
from allstep.commands.doctor.agent import Address, Connected, Question
from allstep.commands.doctor.conversation import Agent, Clock, NoAnswer, is_this_host
from allstep.commands.doctor.facts import Facts
from allstep.commands.doctor.finding import Finding, fault, ok, several, warning
from allstep.commands.doctor.software import Software, check_frameworks
from allstep.commands.hosts.command import Host
from allstep.common.base.progress_bar import ProgressBar


@dataclass(frozen=True)
class Visit:
    """Answers of a host."""

    agent: Agent
    facts: Facts
    clock: Clock
    port: int


def examine(
    hosts: Sequence[Host], *, progress: ProgressBar, skip: Collection[str] = (), data_dir: Path | None = None
) -> list[Finding]:
    """Check all hosts at once, then what is between them.

    `skip` are checks to leave out: frameworks, data, ports, all-reduce. `data_dir` is the folder of the data sets; None
    for the default of --data-dir.
    """
    here = next((host.name for host in hosts if is_this_host(host.name)), socket.gethostname())
    agents = [_agent(host.name, is_here=host.name == here, skip=skip, data_dir=data_dir) for host in hosts]
    if here not in [host.name for host in hosts]:  # this host only launches ranks on others
        agents.append(_agent(here, is_here=True, skip=("frameworks", "data", *skip), data_dir=data_dir))
    progress.begin(f"looking at {', '.join(agent.host for agent in agents)}", in_log=False)
    try:
        with ThreadPoolExecutor(len(agents)) as pool:
            answers = list(pool.map(_visit, agents))
        progress.advance()
        visits = {answer.agent.host: answer for answer in answers if isinstance(answer, Visit)}
        findings = [answer for answer in answers if isinstance(answer, Finding)]
        if here not in visits:  # all others would be compared with this host
            return findings
        slots = {host.name: host.slots for host in hosts}
        for name, visit in visits.items():
            findings += [replace(one, host=name) for one in _check_host(visit, slots.get(name, 0), visits[here])]
        if len(agents) > 1:
            findings += _check_between(visits, slots, skip)
    finally:
        for agent in agents:
            agent.end()
    progress.begin("measuring all-reduce", in_log=False)
    if "all-reduce" not in skip and launchers.find_mpirun():
        findings += _check_all_reduce(hosts, visits, findings)
    return findings


def _agent(name: str, *, is_here: bool, skip: Collection[str], data_dir: Path | None) -> Agent:
    flags = [f"--{part}" for part in ("frameworks", "data") if part not in skip]
    flags += ["--data-dir", str(data_dir.absolute())] if data_dir else []
    return Agent(name, flags, is_here=is_here)


def _visit(agent: Agent) -> Visit | Finding:
    try:
        clock, port = agent.clock()
        return Visit(agent, agent.ask(Question("facts"), Facts), clock, port)
    except NoAnswer as error:
        return replace(error.finding, host=agent.host)


def _check_host(visit: Visit, num_ranks: int, here: Visit) -> list[Finding]:
    """Check one host; `num_ranks` is 0 if it only launches ranks on other hosts."""
    facts, is_here = visit.facts, visit is here
    findings = [] if is_here else [ok("ssh", "logs in without a prompt")]
    findings += launchers.check(facts.launchers)
    if is_here:
        findings += launchers.check_path(facts.launchers)
    if num_ranks:
        findings.append(facts.toolchain)
        findings += check_frameworks(facts.frameworks) if facts.frameworks else []
        findings += gpus.check(facts.gpus, facts.frameworks)
        findings += machine.check(facts.machine, num_ranks, len(facts.gpus.names))
    findings += machine.check_folders(facts.disk)
    if not is_here:
        findings += check_software(facts.software, here.facts.software, here.agent.host)
        findings.append(check_clock(visit.clock, here.agent.host))
    return findings


def _check_between(visits: Mapping[str, Visit], hosts: Collection[str], skip: Collection[str]) -> list[Finding]:
    """Check networks, data and ports between all visited hosts, of which `hosts` run ranks."""
    findings = network.check({name: visit.facts.interfaces for name, visit in visits.items()})
    if "data" not in skip:
        findings += check_data({name: visits[name].facts.software for name in hosts if name in visits})
    if "ports" not in skip and len(visits) > 1:
        with ThreadPoolExecutor(len(visits)) as pool:
            reasons = pool.map(lambda visit: _unreached(visit, visits), visits.values())
            findings += check_ports(dict(zip(visits, reasons, strict=True)), len(visits))
    return findings


def _unreached(visit: Visit, visits: Mapping[str, Visit]) -> dict[str, str]:
    """Return the reasons for which a host does not reach others, by their names."""
    others = tuple(Address(name, other.port) for name, other in visits.items() if other is not visit)
    try:
        return visit.agent.ask(Question("connect", others), Connected).unreached
    except NoAnswer as error:  # the host has gone down since it answered the first question
        return {address.host: str(error) for address in others}


def _check_all_reduce(hosts: Sequence[Host], visits: Mapping[str, Visit], before: Sequence[Finding]) -> list[Finding]:
    """Measure all-reduce on each host with several ranks, and across hosts if ranks can be started there."""
    several = [[host] for host in hosts if host.name in visits and host.slots > 1]
    with ThreadPoolExecutor(max(1, len(several))) as pool:
        measured = zip(several, pool.map(all_reduce.measure, several), strict=True)
        findings = [replace(all_reduce.check_host(found), host=host.name) for [host], found in measured]
    hindered = any(one.level == "fault" and one.subject in ("ssh", "checkout", "ports", "mpi daemon") for one in before)
    if len(hosts) < 2 or hindered:
        return findings
    shared = network.common_networks({host.name: visits[host.name].facts.interfaces for host in hosts})
    speed = max((network.slowest(interfaces) for interfaces in shared.values()), default=0)
    return [*findings, all_reduce.check_across(all_reduce.measure([Host(host.name, 1) for host in hosts]), speed)]


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
    findings = []
    for one, reasons in unreached.items():
        for other, why in reasons.items():
            fix = "open the ports from 1024 to 65535 between the hosts: ranks listen at any of them"
            if "known" in why or "resolution" in why:
                fix = "correct the name in /etc/hosts or DNS of the first"
            findings.append(fault("ports", f"{one} does not reach {other}: {why}", fix))
    return findings or [ok("ports", f"all {num_hosts} hosts reach each other")]
