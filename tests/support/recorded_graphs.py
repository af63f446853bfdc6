"""A graph API for CPU tensors that is as strict as a real one: what is captured is recorded op by op with the tensors it saw.

A replay runs exactly these ops on exactly this memory, with the host's numbers of the moment of capture. So a number that has
changed since, or a buffer that has moved, shows as a wrong token. As on a device, nothing is computed by a capture: ops that
write into a tensor are only recorded, and what the others made is poisoned afterwards. Refused is what a real capture refuses: to
look at a value on the host, to bring one from there, and ops whose result has a size that depends on values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CaptureRefusedError", "RecordedGraph", "RecordingGraphApi"]

POISON = -(2**40)  # as a token or a slot it is out of every range
HOST_FUNCTIONS: dict[Any, str] = {
    Tensor.item: "waits for the device",
    Tensor.tolist: "waits for the device",
    Tensor.numpy: "waits for the device",
    Tensor.cpu: "waits for the device",
    Tensor.__bool__: "waits for the device",
    Tensor.__int__: "waits for the device",
    Tensor.__float__: "waits for the device",
    Tensor.__index__: "waits for the device",
    torch.tensor: "copies from pageable memory",
    torch.as_tensor: "copies from pageable memory",
    torch.from_numpy: "copies from pageable memory",
}
HOST_OPS = {
    "aten::_local_scalar_dense": "waits for the device",
    "aten::item": "waits for the device",
    "aten::is_nonzero": "waits for the device",
    "aten::equal": "waits for the device",
    "aten::nonzero": "has a size that depends on values",
    "aten::masked_select": "has a size that depends on values",
    "aten::_unique2": "has a size that depends on values",
    "aten::unique_dim": "has a size that depends on values",
    "aten::repeat_interleave": "has a size that depends on values",
    "aten::bincount": "has a size that depends on values",
    "aten::lift_fresh": "copies from pageable memory",
}


class CaptureRefusedError(RuntimeError):
    """What cannot be captured was tried during a capture."""


@dataclass
class _Call:
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[Tensor]  # made by it, in the order of its outputs; empty where it writes into what it was given

    def run(self) -> None:
        outputs = self.function(*self.args, **self.kwargs)
        for result, output in zip(self.results, _tensors(outputs) if self.results else [], strict=True):
            result.copy_(output)


@dataclass
class RecordedGraph:
    """Ops in order."""

    calls: list[_Call] = field(default_factory=list)
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call.run()

    def poison(self) -> None:
        for result in (result for call in self.calls for result in call.results):
            if result.dtype.is_floating_point:
                result.fill_(torch.nan)
            elif result.dtype in (torch.int64, torch.int32):
                result.fill_(POISON if result.dtype == torch.int64 else -(2**31))


@dataclass
class RecordingGraphApi:
    """See the top of this module.

    Attributes:
        graphs: every graph that was captured.
        pools: how many pools were asked for.
        fail_from: the capture of this number, counted from 0, and all later ones raise; None: none does.
    """

    graphs: list[RecordedGraph] = field(default_factory=list)
    pools: int = 0
    fail_from: int | None = None

    def pool(self) -> object:
        self.pools += 1
        return self

    @contextmanager
    def capture(self, pool: object) -> Iterator[RecordedGraph]:
        assert pool is self, "memory that no pool gave"
        if self.fail_from is not None and len(self.graphs) >= self.fail_from:
            raise RuntimeError("out of graph memory")
        graph = RecordedGraph()
        with _HostGuard(), _Recorder(graph):
            yield graph
        graph.poison()
        self.graphs.append(graph)

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


class _HostGuard(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in HOST_FUNCTIONS:
            raise CaptureRefusedError(f"{getattr(function, '__name__', function)} {HOST_FUNCTIONS[function]}")
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        given = _tensors((args, kwargs))
        if name in HOST_OPS:
            raise CaptureRefusedError(f"{name} {HOST_OPS[name]}")
        if name in ("aten::index", "aten::index_put_") and any(tensor.dtype == torch.bool for tensor in _tensors(args[1])):
            raise CaptureRefusedError(f"{name} by a mask has a size that depends on values")
        if function._schema.is_mutable:
            self._graph.calls.append(_Call(function, args, kwargs, []))
            return kwargs["out"] if "out" in kwargs else args[0]
        outputs = function(*args, **kwargs)
        made = _tensors(outputs)
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        shared = [tensor.untyped_storage().data_ptr() in memory for tensor in made]
        if not any(shared):
            self._graph.calls.append(_Call(function, args, kwargs, made))
        else:
            assert all(shared), f"{name} returns views and new tensors"
        return outputs


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
