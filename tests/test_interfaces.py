"""The card that Gloo takes on hosts whose own name is a loopback address, as Debian's /etc/hosts has it."""

from __future__ import annotations

import pytest

from trainer.config import ConfigError
from trainer.system import network
from trainer.system.network import Interface, shared_variables

CARDS = [Interface("lo", "127.0.0.1"), Interface("eth0", "172.17.0.2"), Interface("eth1", "10.50.0.11")]


@pytest.fixture(autouse=True)
def this_host(monkeypatch):
    """Routes of a host with these cards: 10.50 is on eth1, everything else goes out by eth0."""
    monkeypatch.setattr(network, "interfaces", lambda: CARDS)
    monkeypatch.setattr(
        network, "route_address", lambda peer: "10.50.0.11" if peer.startswith("10.50.") else "172.17.0.2"
    )


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "10.50.0.11"])
def test_the_master_and_the_others_take_the_card_between_them(own):
    places = [("one", own), ("one", own), ("two", "10.50.0.12")]
    found = shared_variables(own, "one", places, {})
    assert found["GLOO_SOCKET_IFNAME"] == "eth1" and found["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_one_host_keeps_what_it_has():
    assert shared_variables("127.0.1.1", "one", [("one", "127.0.1.1")] * 2, {}) == {}


def test_hosts_that_all_know_the_master_as_themselves_are_refused():
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        shared_variables("127.0.1.1", "one", [("one", "127.0.1.1"), ("two", "127.0.1.1")], {})


def test_a_card_that_is_named_already_stays():
    places = [("one", "127.0.1.1"), ("two", "10.50.0.12")]
    found = shared_variables("127.0.1.1", "one", places, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_variable_that_is_not_set_chooses_nothing():
    for variable in network.INTERFACE_VARIABLES:
        assert network.chosen_interfaces(variable, "", ["lo", "eth0"]) == []
