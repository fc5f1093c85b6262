"""The compiler does not trace the tracker: it compiled its methods, up to the recompilation limit."""

from __future__ import annotations

from typing import Any

import torch

from memscale import MemoryTracker
from support.wrapping import Stack


def test_a_compiled_model_under_the_tracker() -> None:
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.extend(node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
        return graph.forward

    def peak(model: Any) -> int:
        with MemoryTracker(model) as tracker:
            model(torch.ones(4, 8)).sum().backward()
        return tracker.peak_bytes()

    plain, model = Stack().eval(), Stack().eval()
    compiled = torch.compile(model, backend=backend)
    assert peak(compiled) == peak(plain)
    assert not [each for each in traced if "memscale" in each]
