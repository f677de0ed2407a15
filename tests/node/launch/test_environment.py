"""A node's place on every platform, as the platforms set their variables, and the variables of the
network."""

import re

import pytest

from trainer.config import ConfigError
from trainer.node.topology import expand_hostlist, misplaced_rank, read_node_environment
from trainer.system.network import (
    Interface,
    chosen_interfaces,
    interface_of,
    interfaces,
    ipv4_problem,
    network_variables,
    route_address,
)

CARDS = [Interface("lo", "127.0.0.1"), Interface("eth0", "172.17.0.2"), Interface("eth1", "10.50.0.12")]


def variables(text: str) -> dict[str, str]:
    """The environment of "NAME=value NAME=value"; a plus stands for a line's end."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value.replace("+", "\n") for name, _, value in pairs}


def place(env, **more):
    node = read_node_environment(env, **more)
    return node.platform, node.rank, node.nodes, node.head, node.gpus_per_node


SKYPILOT = "SKYPILOT_NODE_IPS=10.0.0.1+10.0.0.2+ SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2"
DSTACK = "DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=0 DSTACK_MASTER_NODE_IP=10.1.0.4"
SLURM = "SLURM_JOB_ID=7 SLURM_NODEID=2 SLURM_JOB_NUM_NODES=4 SLURM_STEP_NUM_NODES=3 SLURM_GPUS_ON_NODE=8"
BATCH = "SLURM_JOB_ID=7 SLURM_NODEID=0"
RUNPOD = "PRIMARY_ADDR=10.65.0.2 NUM_NODES=4 NODE_RANK=3 NUM_TRAINERS=8 WORLD_SIZE=32 MASTER_ADDR=10.65.0.2"
TORCHRUN = "GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=a RANK=1 WORLD_SIZE=2 LOCAL_RANK=0"


@pytest.mark.parametrize(("text", "node"), [
    ("", ("local", 0, 1, "127.0.0.1", None)),
    (SKYPILOT + " SKYPILOT_NUM_GPUS_PER_NODE=8", ("skypilot", 1, 2, "10.0.0.1", 8)),
    (DSTACK + " DSTACK_NODES_IPS=10.1.0.4+10.1.0.5 DSTACK_GPUS_PER_NODE=8 DSTACK_GPUS_NUM=16",
     ("dstack", 0, 2, "10.1.0.4", 8)),
    (SLURM + " SLURM_STEP_NODELIST=gpu[07-08,11] SLURM_JOB_NODELIST=gpu[07-09,11]",
     ("slurm", 2, 3, "gpu07", 8)),
    (BATCH + " SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=h1", ("slurm", 0, 1, "h1", None)),
    (RUNPOD, ("runpod", 3, 4, "10.65.0.2", 8)),
    (TORCHRUN + " LOCAL_WORLD_SIZE=1", ("torchrun", 1, 2, "a", None)),
    ("SPOTRL_PEERS=10.0.0.1,10.0.0.2 SPOTRL_NODE_RANK=1 SKYPILOT_NODE_IPS=1.1.1.1",
     ("spotrl", 1, 2, "10.0.0.1", None)),
    ("SPOTRL_NODES=1 SLURM_JOB_ID=7 SLURM_NODEID=0", ("spotrl", 0, 1, "127.0.0.1", None)),
])  # fmt: skip
def test_a_node_finds_its_place_in_the_variables_of_its_platform(text, node):
    assert place(variables(text)) == node


def test_nodes_have_the_names_of_their_peers():
    assert read_node_environment(variables(SKYPILOT)).name_of(1) == "node 1 (10.0.0.2)"
    env = variables(SLURM + " SLURM_STEP_NODELIST=gpu[07-08,11]")
    assert read_node_environment(env).peers == ("gpu07", "gpu08", "gpu11")


def test_pbs_node_file_repeats_hosts_and_the_rank_is_the_hosts_place_in_it():
    env = {"PBS_NODEFILE": "/var/nodes", "PBS_JOBID": "3", "PBS_GPUFILE": "/var/gpus"}
    files = {
        "/var/nodes": "n4.site\nn4.site\nn2.site\nn2.site\n",
        "/var/gpus": "n4.site-gpu0\nn2.site-gpu0\nn2.site-gpu1\n",
    }
    assert place(env, hostname="n2", read_text=files.__getitem__) == ("pbs", 1, 2, "n4.site", 2)
    del env["PBS_GPUFILE"]
    assert place(env | {"PBS_NODENUM": "0"}, hostname="other", read_text=files.__getitem__)[1:3] == (0, 2)
    with pytest.raises(ConfigError, match="PBS_NODENUM or PBS_VNODENUM is missing"):
        read_node_environment(env, hostname="other", read_text=files.__getitem__)


@pytest.mark.parametrize(("text", "message"), [
    ("SPOTRL_NODES=2", "SPOTRL_NODE_RANK is missing"),
    ("SPOTRL_NODES=2 SPOTRL_NODE_RANK=1", "SPOTRL_HEAD"),
    ("SPOTRL_NODES=two", "SPOTRL_NODES is 'two'"),
    ("SPOTRL_NODES=2 SPOTRL_NODE_RANK=2 SPOTRL_HEAD=h", "ranks go from 0 to 1"),
    ("SPOTRL_NODES=3 SPOTRL_NODE_RANK=0 SPOTRL_PEERS=a,b", "3 nodes, but 2 addresses"),
    ("DSTACK_NODES_NUM=1 DSTACK_NODE_RANK=0 DSTACK_GPUS_PER_NODE=many", "SPOTRL_GPUS_PER_NODE"),
    ("PBS_NODEFILE=/nowhere/nodes", "set SPOTRL_PEERS"),
    (TORCHRUN + " LOCAL_WORLD_SIZE=8", "--nproc-per-node=1"),
    (BATCH + " SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=h[1-2]", "srun --ntasks-per-node=1"),
    (BATCH + " SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1", "more than one launcher"),
])  # fmt: skip
def test_what_contradicts_itself_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        read_node_environment(variables(text))


@pytest.mark.parametrize(("text", "names"), [
    ("h1", ["h1"]), ("h1,h2", ["h1", "h2"]), ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
    ("a[1,3-4]b,c", ["a1b", "a3b", "a4b", "c"]), ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
])  # fmt: skip
def test_slurm_host_lists(text, names):
    assert list(expand_hostlist(text)) == names


def test_network_variables_agree_on_the_card_of_the_route():
    card = interface_of("10.50.0.12", CARDS)
    assert network_variables(card, {}, CARDS) == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
        "VLLM_HOST_IP": "10.50.0.12",
    }
    assert "NCCL_SOCKET_IFNAME" not in network_variables(CARDS[0], {}, CARDS)


def test_a_card_that_the_user_named_stays_if_it_is_here():
    card = CARDS[2]
    assert network_variables(card, {"NCCL_SOCKET_IFNAME": "eth"}, CARDS)["NCCL_SOCKET_IFNAME"] == "eth"
    assert (
        network_variables(card, {"NCCL_SOCKET_IFNAME": "^docker0"}, CARDS)["NCCL_SOCKET_IFNAME"] == "^docker0"
    )
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME is ens1, and this node has eth0, eth1, lo"):
        network_variables(card, {"NCCL_SOCKET_IFNAME": "ens1"}, CARDS)


@pytest.mark.parametrize(
    ("variable", "given", "taken"),
    [
        ("GLOO_SOCKET_IFNAME", "^lo,docker", None),
        ("GLOO_SOCKET_IFNAME", "eth", None),
        ("GLOO_SOCKET_IFNAME", "eth1,ens9", None),
        ("GLOO_SOCKET_IFNAME", "eth1,eth0", ["eth1", "eth0"]),
        ("TP_SOCKET_IFNAME", "eth1,eth0", None),
        ("NCCL_SOCKET_IFNAME", "=eth", None),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", ["eth0", "eth1"]),
        ("NCCL_SOCKET_IFNAME", "^eth", None),
    ],
)
def test_an_interface_is_read_as_its_library_reads_it(variable, given, taken):
    names = [card.name for card in CARDS]
    assert sorted(chosen_interfaces(variable, given, names)) == sorted(taken or [])
    if taken is None:
        with pytest.raises(ConfigError, match=re.escape(f"{variable} is {given}")):
            network_variables(CARDS[2], {variable: given}, CARDS)


@pytest.mark.parametrize(
    ("peers", "named"),
    [(["10.0.0.1", "fd00::2"], "fd00::2"), (["::1"], "::1"), (["10.0.0.1", "no.such"], "")],
)
def test_a_node_with_an_address_of_ipv6_alone_is_named(peers, named):
    problem = ipv4_problem(peers)
    assert problem.startswith(named) and ("give the nodes IPv4 addresses" in problem) is bool(named)


def test_a_node_with_the_address_of_another_rank_is_misplaced():
    here = read_node_environment({"SPOTRL_PEERS": "10.0.0.1 10.0.0.2 10.0.0.3", "SPOTRL_NODE_RANK": "1"})

    def resolve(name: str) -> list[str]:
        return [name]

    assert misplaced_rank(here, ["127.0.0.1", "10.0.0.2"], resolve) is None
    assert misplaced_rank(here, ["192.168.0.2"], resolve) is None, (
        "addresses behind a translation say nothing"
    )
    assert misplaced_rank(here, ["10.0.0.3"], resolve) == 2
    assert misplaced_rank(here, ["10.0.0.2", "10.0.0.3"], resolve) is None, "named by the check of duplicates"


def test_an_address_that_no_card_holds():
    with pytest.raises(ConfigError, match=r"10\.9\.9\.9 \(there are: lo 127\.0\.0\.1"):
        interface_of("10.9.9.9", CARDS)


def test_the_route_to_this_machine_is_its_loopback():
    assert route_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1", interfaces()).name == "lo"
