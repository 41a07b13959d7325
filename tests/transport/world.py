"""Nodes of one kind, which are closed together, and the size of their caches."""

from tests.transport.planes import Node

NUM_BLOCKS = 24
BLOCK_BYTES = 3 * 64


class World:
    """Makes nodes of one kind and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._nodes: list[Node] = []

    def node(self, **options: object) -> Node:
        node = Node(self.kind, **{"seed": len(self._nodes)} | options)  # type: ignore[arg-type]
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in self._nodes:
            for gate in (node.layout.gather_gate, node.layout.scatter_gate):
                if gate is not None:
                    gate.open(1000)
            node.plane.close()
