"""The network that a run's hosts share, and the variables that make Gloo, NCCL and vLLM use it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.system.errors import ConfigError


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """This machine's interfaces that have an IPv4 address."""
    import psutil

    cards = [(name, entry) for name, addresses in psutil.net_if_addrs().items() for entry in addresses]
    return [Interface(name, entry.address) for name, entry in cards if entry.family == socket.AF_INET]


def ipv4_problem(peers: Iterable[str]) -> str:
    """Which node has no address of IPv4, which launcher, Ray and Gloo speak; "" if none is known."""
    for peer in peers:
        try:
            families = {entry[0] for entry in socket.getaddrinfo(peer, None)}
        except OSError:  # a name that is not known yet
            continue
        if families == {socket.AF_INET6}:
            problem = f"{peer} has an address of IPv6 alone, and launcher, Ray and Gloo speak IPv4"
            return f"{problem}: give the nodes IPv4 addresses"
    return ""


def route_address(peer: str) -> str:
    """This machine's address on the route to `peer`, from the kernel; nothing is sent. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return probe.getsockname()[0]


def interface_of(address: str, known: Iterable[Interface]) -> Interface:
    """The interface that holds `address`. Raises ConfigError if none does."""
    known = list(known)
    if holder := next((interface for interface in known if interface.address == address), None):
        return holder
    have = ", ".join(f"{i.name} {i.address}" for i in known)
    raise ConfigError(f"no network interface here has the address {address} (there are: {have})")


INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables by which NCCL, Gloo and TensorPipe are told their network interface."""


def network_variables(
    interface: Interface, env: Mapping[str, str], known: Iterable[Interface]
) -> dict[str, str]:
    """Every variable that must agree with the interface on which the nodes reach each other.

    A variable that is set stays if that interface exists (a faster fabric may have its own name), else
    ConfigError. NCCL matches prefixes unless the name begins with "=", and takes a list of what to leave out
    after "^"; Gloo takes exact names, TensorPipe one.
    """
    names = {i.name for i in known}
    wanted = {"GLOO_SOCKET_IFNAME": interface.name, "TP_SOCKET_IFNAME": interface.name}
    if not interface.address.startswith("127."):
        wanted |= {"NCCL_SOCKET_IFNAME": f"={interface.name}"}
    for name in list(wanted):
        given = env.get(name, "")
        if why := interface_problem(name, given, names):
            raise ConfigError(why)
        if given:
            wanted[name] = given
    return wanted | {"VLLM_HOST_IP": interface.address}


def interface_problem(variable: str, given: str, names: Iterable[str]) -> str:
    """Why a variable's value names no interface of `names` as its library reads it; "" if it does."""
    if not given or chosen_interfaces(variable, given, names):
        return ""
    have = ", ".join(sorted(names))
    if given.startswith("^") and variable != "NCCL_SOCKET_IFNAME":
        return f"{variable} is {given}: only NCCL leaves out what follows ^; unset it, or name one of {have}"
    return f"{variable} is {given}, and this node has {have}: unset it"


def chosen_interfaces(variable: str, given: str, names: Iterable[str]) -> list[str]:
    """Interfaces of `names` that a library takes by its variable, in its list's order."""
    if not given:
        return []
    if variable != "NCCL_SOCKET_IFNAME":
        items = [item for item in re.split(r"[\s,]+", given) if item]
        single = variable == "TP_SOCKET_IFNAME" and len(items) > 1
        return [] if single or not set(items) <= set(names) else list(items)
    if given.startswith("^"):
        left_out = [item.lstrip("=") for item in re.split(r"[\s,]+", given[1:])]
        exact = given.startswith("^=")
        return [name for name in names if name != "lo" and not _is_one_of(name, left_out, exact)]
    wanted = re.split(r"[\s,]+", given.removeprefix("="))
    return [name for name in names if _is_one_of(name, wanted, given.startswith("="))]


def _is_one_of(name: str, wanted: Iterable[str], exact: bool) -> bool:
    return any(name == other or (not exact and name.startswith(other)) for other in wanted)
