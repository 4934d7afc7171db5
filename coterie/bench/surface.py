"""RC-DPFL's Figure 3: noise of a client's update against the batch sizes of round 1 and of later rounds.

Cells are planned but not trained. Equation (2) gives the variance of an update,

    Var(b_e) = K N lr^2 p c^2 z^2(epsilon, delta, b_1, b_>1, N, K, E) / b_e^3,

and the accountant gives z for every pair of batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from coterie.bench.outcome import heading
from coterie.bench.table import BenchError, Column, Row, Table
from coterie.privacy import RecordLevel, RecordPlan, Streams
from coterie.server import RunConfig, applicable
from coterie.server.run import initial_models


def surface(table: Table, *, command: str, seen: Callable[[str, int], None]) -> dict[str, Any]:
    """Return the document of a surface plot: rows set the first batch size, columns the later ones.

    Args:
        table: the table to plan.
        command: command that produces it.
        seen: called with every planned cell and the number of remaining ones.
    """
    configs = [[_config(table, row, column) for column in table.columns] for row in table.rows]
    size = initial_models(configs[0][0], Streams(0))[1].size
    left = len(table.rows) * len(table.columns)
    plans: list[list[RecordPlan]] = []
    for row, line in zip(table.rows, configs, strict=True):
        plans.append([])
        for column, config in zip(table.columns, line, strict=True):
            if not isinstance(config.plan, RecordLevel):
                raise BenchError(f"{table.name}: a noise surface requires record-level privacy")
            plans[-1].append(config.plan.worst)
            left -= 1
            seen(f"{row.name}, {column.name}: z = {config.plan.noise_multiplier:.3f}", left)
    lr = configs[0][0].training.lr

    def variance(plan: RecordPlan, first: bool) -> float:
        scale = plan.local_epochs * plan.num_examples * lr**2 * size
        return math.log10(scale * (plan.clip_norm * plan.noise_of_gradients(first)) ** 2 / plan.batch(first) ** 3)

    shown: dict[str, Callable[[RecordPlan], float]] = {
        "log10 Var of round 1": lambda plan: variance(plan, True),
        "log10 Var of a later round": lambda plan: variance(plan, False),
        "noise scale z": lambda plan: plan.noise_multiplier,
    }
    return heading(table, command, "cpu") | {
        "seeds": [],
        "set": {**table.settings, "parameters": size},
        "columns": [{"name": f"later b = {plan.batch(False)}", "score": "noise scale z"} for plan in plans[0]],
        "rows": [
            {
                "name": f"first b = {line[0].batch(True)}",
                "cells": [{"paper": None, "mean": p.noise_multiplier, "std": None, "why": None} for p in line],
            }
            for line in plans
        ],
        "surfaces": [
            {
                "title": title,
                "x": [plan.batch(False) for plan in plans[0]],
                "y": [line[0].batch(True) for line in plans],
                "values": [[value(plan) for plan in line] for line in plans],
            }
            for title, value in shown.items()
        ],
    }


def _config(table: Table, row: Row, column: Column) -> RunConfig:
    return RunConfig(applicable({**table.settings, **column.settings, **row.settings, **table.overrides}))
