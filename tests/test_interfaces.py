"""A variable that names no network interface."""

from __future__ import annotations

from trainer.system import network


def test_a_variable_that_is_not_set_chooses_nothing():
    for variable in network.INTERFACE_VARIABLES:
        assert network.chosen_interfaces(variable, "", ["lo", "eth0"]) == []
