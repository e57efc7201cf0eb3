"""Micro-batches that are gathered on the device, where all latents and fields are kept."""

from __future__ import annotations

import torch

from suite.ups.batches import Maker, MicroBatch, TaskPart


class Resident:
    """Builder of micro-batches whose examples are gathered on the device.

    Only indices are sent to the device, 8 bytes each. At the default sizes, the latents of a sample of 201 frames take
    13 MB and its fields 0.8 MB. On a CPU, the latents are not copied.
    """

    def __init__(self, maker: Maker, device: torch.device) -> None:
        self._maker, self._device = maker, device
        self._latents = [task.latents.rows.to(device) for task in maker.mixture.tasks]
        self._fields = []
        for task in maker.mixture.tasks:
            samples = [task.fields.read(sample) for sample in range(task.fields.samples)]
            self._fields.append(torch.cat(samples).unsqueeze(-1).to(device))

    def batch(self, number: int) -> MicroBatch:
        """Return micro-batch `number`, counted from 0.

        Latents, fields and time steps are on the device; query points and drop-path multipliers are on the CPU.
        """
        parts = [self._part(place, number) for place in range(len(self._latents))]
        return MicroBatch(number=number, parts=tuple(parts), scales=self._maker.scales(number))

    def _part(self, place: int, number: int) -> TaskPart:
        maker, task = self._maker, self._maker.mixture.tasks[place]
        rows = maker.rows(place, number)
        with_fields = maker.every or maker.config.has_inverse(number)
        coded = maker.coded(place, number, rows) if with_fields else rows[:0]
        if self._device.type == "cuda":  # a copy from pageable memory would wait for all queued work
            rows, coded = (r.pin_memory().to(self._device, non_blocking=True) for r in (rows, coded))
        return TaskPart(
            task=task.task,
            before=self._latents[place][rows],
            after=self._latents[place][rows + 1],
            dt=torch.full((len(rows),), task.fields.dt, device=self._device),
            coded=self._latents[place][coded],
            field=self._fields[place][coded],
            queries=maker.queries(place, number) if with_fields else coded,
        )
