"""The other nodes of a launch, as the head sees them."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.node.launch import rendezvous
from trainer.node.launch.launcher import LaunchEnded
from trainer.node.topology import NodeEnvironment
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST


class OtherNodes:
    """The node workers of this launch: what they said, and whether one of them is lost."""

    def __init__(self, node: NodeEnvironment, links: rendezvous.RendezvousHead | None):
        """links: None in a launch of one node, which has no others."""
        self.node, self.links = node, links
        self.noticed = False
        """Whether the machine of one is about to be taken away."""

    @property
    def ranks(self) -> list[int]:
        """Ranks of those that have connected."""
        return sorted(self.links.links) if self.links else []

    def names(self, ranks: Iterable[int]) -> str:
        """The names of nodes, for a message."""
        return ", ".join(self.node.name_of(rank) for rank in sorted(ranks))

    def tell(self, message: rendezvous.Message) -> None:
        """Sends a message to all of them."""
        if self.links:
            self.links.send(message)

    def messages(self) -> list[tuple[int, rendezvous.Message]]:
        """What they have said since the last call, by rank. Raises Ended if one has failed or is lost."""
        if self.links is None:
            return []
        received = self.links.receive()
        for rank, message in received:
            if message["kind"] == "failed":
                why = f"{self.node.name_of(rank)}: {message['why']}"
                raise LaunchEnded(message["code"], why, died=message["died"])
            if message["kind"] == "notice":
                self.noticed = True
        for rank, why in self.links.lost().items():
            raise LaunchEnded(EXIT_NODE_LOST, f"{self.node.name_of(rank)} is lost: it {why}")
        return received

    @property
    def quiet(self) -> bool:
        """Whether the heartbeats of one are late: it may be lost soon."""
        return self.links is not None and self.links.quiet()

    @property
    def head_address(self) -> str:
        """The head's address as the others reached it. Raises Ended if they disagree."""
        if self.links is None:
            return "127.0.0.1"
        reached = {link.local_address for link in self.links.links.values()}
        if len(reached) > 1:
            raise LaunchEnded(
                EXIT_CONFIG,
                f"the nodes reach the head at different addresses ({', '.join(sorted(reached))}): "
                "give all of them the one on the network that they share in SPOTRL_HEAD",
            )
        return reached.pop()

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of all nodes by rank, the head's included. Raises Ended if the head has several."""
        found = {0: self.head_address}
        for rank in self.ranks:
            assert self.links is not None
            found[rank] = self.links.links[rank].peer_address
        return found

    def close(self) -> None:
        """Closes the connections to all of them."""
        if self.links:
            self.links.close()
