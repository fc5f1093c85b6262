"""Offloaded parameters under a loop with a schedule, clipping, accumulation and groups: the plain model's numbers.

Reported as ao#959, ao#1209 and in torchao's README: offloading optimizers ignore schedulers, and do not work with
gradient clipping and accumulation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from support.steps import AGGRESSIVE, assert_has_techniques
from support.wrapping import Stack


def train(model: nn.Module) -> list[float]:
    torch.manual_seed(1)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-1, total_steps=6)
    seen = []
    for step in range(12):
        loss = model(torch.randn(8, 16)).pow(2).mean() / 2
        loss.backward()
        if step % 2:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen += [loss.item(), *schedule.get_last_lr()]
    return seen


@pytest.mark.parametrize("given", [True, False])
def test_a_schedule_clipping_accumulation_and_groups(given: bool) -> None:
    """With the batch given to `wrap`, and with a plan from the first one."""
    torch.manual_seed(0)
    plain = Stack(width=16)
    expected = train(plain)
    torch.manual_seed(0)
    model = memscale.wrap(Stack(width=16), AGGRESSIVE, torch.ones(8, 16) if given else None)
    assert train(model) == expected
    assert_has_techniques(model, "offloading")
    assert model._memscale_executor.report().bytes_read > 0
    memscale.detach(model)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
