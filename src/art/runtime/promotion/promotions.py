"""Promote checkpoints: judge the gate, let the engine load the checkpoint, record the decision.

Until a checkpoint is loaded and recorded, and if either fails, `project/name@promoted` goes on to mean the one before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from art.errors import ConfigError, PromotionError
from art.protocol.organisation.promotions import Decision, Gate, PromoteRequest, Promotion, PromotionHistory
from art.runtime.models import Models
from art.runtime.promotion.history import NewDecision, PromotionStore
from art.runtime.promotion.verdicts import Evidence, has_figures, judge, logged_evidence, measured_evidence
from art.runtime.registry import RegisteredModel
from art.storage.database import uninterrupted

logger = logging.getLogger(__name__)

ChangeLock = Callable[[RegisteredModel], AbstractAsyncContextManager[None]]
"""Function that makes a context manager in which nobody else promotes or deletes checkpoints of a model."""


class Promotions:
    """Promotes checkpoints of models, and keeps the history of it."""

    def __init__(
        self, models: Models, store: PromotionStore, changing: ChangeLock, *, required: float | None = None
    ) -> None:
        """
        Args:
            required: bound of a gate that every promotion has to pass; `None` if each caller chooses.
        """
        self.required = required
        self._models = models
        self._store = store
        self._changing = changing

    async def promote(self, project: str, name: str, request: PromoteRequest, key_id: str) -> Promotion:
        """Make a checkpoint the promoted one of its model, if it passes the gate of the request or is forced.

        Nothing is compared and recorded if it is the promoted one already.

        Args:
            key_id: id of the key that asks, for the history.

        Raises:
            NotFoundError: there is no such model or published checkpoint.
            ConfigError: the model's engine cannot serve a step beside the newest, the split is not held out, or the
                request asks for less than the server requires.
            PromotionError: the checkpoint does not pass the gate. The refusal is recorded.
            ConflictError: measured scores compare with another checkpoint than the promoted one.
            CorruptCheckpointError, AdapterError, HandshakeError: the checkpoint cannot be served.
            ProcessError: the engine cannot start, or another promotion or deletion took too long.
        """
        model, host = self._models.find(project, name)
        step = request.step
        if host.one_policy:
            raise ConfigError(
                f'{model.key} cannot have a promoted checkpoint: with `weights="merged"` vLLM serves one step at a '
                'time, the newest. Register the model with `weights="lora"` or the embedded engine, or fork step '
                f"{step} to a model of another name on a server of its own",
                param="step",
            )
        request = self._with_required_gate(request)
        async with self._changing(model):
            path = await asyncio.to_thread(self._models.folder, project, name, step)
            previous = self._models.find(project, name)[0].promoted_step
            if step == previous:
                return Promotion(step=step, inference_name=f"{model.key}@promoted", previous_step=step)
            decision = await self._decide(model, previous, request, key_id)
            if decision.decision == "refused":
                await self._store.add(project, name, decision)
                assert decision.verdict is not None
                refusal = f"step {step} of {model.key} is not promoted. {decision.verdict.reason}"
                raise PromotionError(refusal if self.required is None else f"{refusal}. {self._rule()}")
            await host.adapters.load(model.adapter_id(step), path)
            await uninterrupted(self._record(model, decision))
        logger.info("promoted step %d of %s (%s); before it was %s", step, model.key, decision.decision, previous)
        return Promotion(
            step=step, inference_name=f"{model.key}@promoted", previous_step=previous, verdict=decision.verdict
        )

    async def history(self, project: str, name: str) -> PromotionHistory:
        """Return all decisions about the promoted checkpoint of a model.

        Raises:
            NotFoundError: there is no such model.
        """
        self._models.find(project, name)
        return PromotionHistory(promotions=await self._store.records(project, name))

    async def _record(self, model: RegisteredModel, decision: NewDecision) -> None:
        """Record a promotion, and let requests to the promoted name get its checkpoint."""
        await self._store.add(model.project, model.name, decision)
        self._models.set_promoted(model.key, decision.step)

    def _with_required_gate(self, request: PromoteRequest) -> PromoteRequest:
        """Give the request the gate that the server requires, unless its own asks for as much.

        Raises:
            ConfigError: its own asks for less.
        """
        if self.required is None:
            return request
        if request.gate is None:
            return request.model_copy(update={"gate": Gate(require=self.required)})
        if request.gate.require < self.required:
            raise ConfigError(
                f"`require` is {request.gate.require:g}, which is less than {self.required:g}. {self._rule()}. Ask for "
                f"{self.required:g} or more, or leave `require` out",
                param="require",
            )
        return request

    def _rule(self) -> str:
        return (
            f"This server requires {self.required:+g} of every promotion (`promotion.require` in its configuration), "
            "and only a key with scope `admin` may force one"
        )

    async def _decide(
        self, model: RegisteredModel, previous: int | None, request: PromoteRequest, key_id: str
    ) -> NewDecision:
        decision: Decision = "forced" if request.force else "ungated"
        verdict, evidence = None, None
        if (gate := request.gate) is not None:
            scores = await self._evidence(model, previous or 0, request)
            refused = await self._store.refused_evidence(model.project, model.name)
            verdict = await asyncio.to_thread(
                judge, scores, gate.require, step=request.step, refused=refused, model=model.key
            )
            evidence = scores.digest if has_figures(verdict) else None
            decision = "passed" if verdict.passed else decision if request.force else "refused"
        return NewDecision(
            step=request.step, previous_step=previous, decision=decision, key_id=key_id, note=request.note,
            verdict=verdict, evidence=evidence,
        )  # fmt: skip

    async def _evidence(self, model: RegisteredModel, reference: int, request: PromoteRequest) -> Evidence:
        assert request.gate is not None
        if request.gate.measured is not None:
            return measured_evidence(request.gate.measured, reference_step=reference)
        paths = self._models.paths(model)
        return await asyncio.to_thread(
            logged_evidence, paths, request.gate, step=request.step, reference_step=reference
        )
