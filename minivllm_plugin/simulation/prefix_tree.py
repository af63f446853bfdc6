"""What was sent to one replica: prompts as paths of content ids, the oldest forgotten first. Knows no engine."""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PrefixTree"]

Contents = Sequence[tuple[int, int]]


class PrefixTree:
    """Starts of prompts. A node is known by its parent node and its content.

    Args:
        max_nodes: beyond, the node touched longest ago goes. A parent is touched after its children, so leaves go first.
    """

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._nodes: OrderedDict[tuple[int, tuple[int, int]], int] = OrderedDict()
        self._next_node = 1

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, contents: Contents) -> int:
        """Tokens at the start of these contents that were sent before."""
        node = tokens = 0
        for content in contents:
            found = self._nodes.get((node, content))
            if found is None:
                break
            node = found
            tokens += content[1]
        return tokens

    def insert(self, contents: Contents) -> None:
        """Remember that this was sent."""
        node = 0
        path = []
        for content in contents:
            key = (node, content)
            found = self._nodes.get(key)
            if found is None:
                found = self._nodes[key] = self._next_node
                self._next_node += 1
            path.append(key)
            node = found
        for key in reversed(path):
            self._nodes.move_to_end(key)
        while len(self._nodes) > self._max_nodes:
            self._nodes.popitem(last=False)
