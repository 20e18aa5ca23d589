"""Checks of the hosts' network interfaces: shared networks, their speed and their packet size."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.commands.doctor.finding import Finding, fault, ok, warning


@dataclass(frozen=True)
class Interface:
    """Network interface that is up, with one of its IPv4 addresses."""

    name: str
    address: str
    network: str
    """Network, as in 10.0.0.0/24."""
    megabits: int
    """Speed in Mbit/s; 0 if the driver does not report it."""
    mtu: int
    """Maximum packet size in bytes."""


def read() -> tuple[Interface, ...]:
    """Return the interfaces with an address that other hosts can use: neither loopback nor link-local."""
    import psutil  # imported late, since --help does not need it

    stats, found = psutil.net_if_stats(), []
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family.name == "AF_INET" and name in stats and stats[name].isup and one.netmask:
                interface = ipaddress.ip_interface(f"{one.address}/{one.netmask}")
                if not interface.is_loopback and not interface.is_link_local:
                    speed = max(0, stats[name].speed)
                    found.append(Interface(name, one.address, str(interface.network), speed, stats[name].mtu))
    return tuple(found)


def common_networks(hosts: Mapping[str, tuple[Interface, ...]]) -> dict[str, dict[str, Interface]]:
    """Return the interfaces by network and host for the networks that all hosts share, the fastest network first."""
    by_host = [{interface.network for interface in interfaces} for interfaces in hosts.values()]
    shared = {
        network: {
            host: next(interface for interface in interfaces if interface.network == network)
            for host, interfaces in hosts.items()
        }
        for network in set.intersection(*by_host)
    }
    return dict(sorted(shared.items(), key=lambda item: -slowest(item[1])))


def slowest(interfaces: Mapping[str, Interface]) -> int:
    """Return the speed of a network in Mbit/s, i.e. of its slowest interface; 0 if a speed is unknown."""
    return min(interface.megabits for interface in interfaces.values())


def check(hosts: Mapping[str, tuple[Interface, ...]]) -> list[Finding]:
    """Check whether the hosts share a network, and whether its interfaces agree in speed and packet size."""
    lonely = [host for host, interfaces in hosts.items() if not interfaces]
    if lonely:
        return [fault("network", f"{lonely[0]} has no interface with an address", "look at ip address there")]
    shared = common_networks(hosts)
    if not shared:
        listed = "; ".join(f"{host}: {', '.join(one.network for one in found)}" for host, found in hosts.items())
        fix = "route between them, and name the interface by HOROVOD_GLOO_IFACE and --network-interfaces"
        return [warning("network", f"no network is common to all hosts ({listed})", fix)]
    return [finding for network, interfaces in shared.items() for finding in _check_network(network, interfaces)]


def _check_network(network: str, interfaces: Mapping[str, Interface]) -> list[Finding]:
    names = sorted({interface.name for interface in interfaces.values()})
    findings = []
    speeds = {host: interface.megabits for host, interface in interfaces.items()}
    if len(set(speeds.values())) > 1:
        listed = ", ".join(f"{host} {speed_name(speed)}" for host, speed in speeds.items())
        fix = "look at cable, port and ethtool of the slower one: it sets the pace of all"
        findings.append(warning("network speed", f"unlike speeds on {network}: {listed}", fix))
    mtus = {host: interface.mtu for host, interface in interfaces.items()}
    if len(set(mtus.values())) > 1:
        listed = ", ".join(f"{host} {mtu}" for host, mtu in mtus.items())
        fix = "give all interfaces of a network one MTU: large packets get lost without a word"
        findings.append(fault("network mtu", f"unlike MTUs on {network}: {listed}", fix))
    speed = speed_name(slowest(interfaces))
    return findings or [ok("network", f"{network} on all hosts by {', '.join(names)}, {speed}")]


def speed_name(megabits: int) -> str:
    """Format a speed, as in 10 Gbit/s."""
    if not megabits:
        return "of unknown speed"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"
