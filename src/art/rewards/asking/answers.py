"""Describes the answer of a judge model as a JSON schema, and reads it.

Scores are matched by id, never by position. A deviation with only one possible meaning is repaired: a number in quotes,
a score that is written twice, a fence around the JSON, 1.0000001. Any other fault is described to the judge, which is
then asked again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from art.errors import JudgeAnswerError
from art.rewards.judge import Verdict

OVERSHOOT = 0.02
"""A score outside 0 to 1 by at most this is set to the bound. A larger one means another scale, and is a fault."""
_MAX_EXPLANATION = 2000
_MAX_STARTS = 1000
"""Number of brackets at which a JSON value is searched."""


def response_format(criteria: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a judge's answer as OpenAI's `response_format`. With criteria, each one has its own score."""
    text, number = {"type": "string"}, {"type": "number"}
    scored = {"criteria": _object({name: number for name in criteria})} if criteria else {"score": number}
    item = _object({"trajectory_id": text, "explanation": text, **scored})
    schema = _object({"scores": {"type": "array", "items": item}})
    return {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": schema}}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_scores(text: str, ids: Sequence[str], weights: dict[str, float]) -> tuple[dict[str, Verdict], int]:
    """Read a judge's answer: a verdict for each trajectory id, and the number of deviations that were repaired.

    Args:
        weights: weights of the criteria by name; empty if there is a single score.

    Raises:
        JudgeAnswerError: the answer cannot be used. The message, which is sent back to the judge, contains no text of
            the answer, since that may quote an agent.
    """
    rows, repaired = _find_rows(text)
    faults: list[str] = []
    verdicts: dict[str, Verdict] = {}
    num_repairs = int(repaired)
    num_unknown = 0
    for row in rows:
        name = str(row.get("trajectory_id", row.get("id", ""))).strip()
        if name not in ids:
            num_unknown += 1
            continue
        try:
            verdict, repairs = _read_row(row, weights)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        num_repairs += repairs
        if name in verdicts:
            if verdicts[name].score != verdict.score:
                faults.append(f"{name}: two different scores")
            num_repairs += 1
        verdicts[name] = verdict
    known_bad = {fault.partition(":")[0] for fault in faults}
    if missing := [name for name in ids if name not in verdicts and name not in known_bad]:
        unknown = f" ({num_unknown} have an id that does not exist)" if num_unknown else ""
        faults.append(f"no score for {', '.join(missing)}{unknown}")
    if faults:
        raise JudgeAnswerError("; ".join(faults))
    return verdicts, num_repairs + num_unknown


def _read_row(row: dict[str, Any], weights: dict[str, float]) -> tuple[Verdict, int]:
    explanation = str(row.get("explanation") or "")[:_MAX_EXPLANATION]
    if not weights:
        score, repaired = _read_number(row.get("score"), "score")
        return Verdict(score=score, explanation=explanation), repaired
    criteria = row.get("criteria")
    if not isinstance(criteria, dict):
        raise ValueError("no object `criteria`")
    parts: dict[str, float] = {}
    num_repairs = 0
    for name in weights:
        parts[name], repaired = _read_number(criteria.get(name), name)
        num_repairs += repaired
    total = sum(weights[name] * parts[name] for name in weights) / sum(weights.values())
    return Verdict(score=total, explanation=explanation, parts=parts), num_repairs


def _read_number(value: Any, name: str) -> tuple[float, int]:
    """Return a score, and 1 if it had to be repaired, else 0."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is not a number")
    if not -OVERSHOOT <= number <= 1 + OVERSHOOT:
        raise ValueError(f"{name} is {number:g}, outside of 0 to 1")
    return min(max(number, 0.0), 1.0), int(isinstance(value, str) or not 0 <= number <= 1)


def _find_rows(text: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the list of scores, and whether it had to be searched in other text.

    If there are several lists, the last one counts, since models may think aloud before they answer.
    """
    try:
        candidates, repaired = [json.loads(text)], False
    except (ValueError, RecursionError):
        candidates, repaired = objects_in(text), True
    for value in reversed(candidates):
        rows = value.get("scores") if isinstance(value, dict) else value
        if isinstance(rows, dict):  # {"t-abcd": 0.5} has only one possible meaning
            rows, repaired = [{"trajectory_id": key, "score": score} for key, score in rows.items()], True
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
            return [row for row in rows if isinstance(row, dict)], repaired
    raise JudgeAnswerError("it is not a JSON object with a list `scores`, or it was cut short")


def objects_in(text: str) -> list[Any]:
    """The outermost JSON objects and lists in a text, in order."""
    decoder, values, position = json.JSONDecoder(), [], 0
    for match in islice(re.finditer(r"[\[{]", text), _MAX_STARTS):
        if match.start() < position:
            continue
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        values.append(value)
    return values
