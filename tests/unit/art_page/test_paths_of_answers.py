"""The table of paths: whatever is asked of them, the answer is one of its type, or an error that a client may see."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path

from art.errors import InvalidRequestError, NotFoundError
from art.storage.layout import DataDir
from art_page.page import PATHS, query_parameters
from art_page.viewer import Viewer
from tests.support.logged_run import log_run

VALUES = [
    "0", "1", "-1", "99999999999", "x", "train", "val", "none", "any", "\x00", '"', "* OR a", "a AND", "NEAR(", "é😀",
    "1e400", "nan", "true", "reward", "'; DROP TABLE runs", "(", "train/reward",
]  # fmt: skip
PARAMETERS = {
    "project": ["games", "0", ".."], "name": ["agent", "0"], "split": ["train", "val", "x"],
    "step": ["1", "2", "99", "99999999999", "-1"], "group": ["0", "1", "99"], "index": ["0", "1", "99"],
    "comparison": ["none", ".."],
}  # fmt: skip


async def test_odd_questions_get_plain_answers(tmp_path: Path) -> None:
    await log_run(tmp_path, steps=2, groups=2, size=2)
    chance, outcomes = random.Random(0), Counter[str]()
    messages: list[str] = []
    with contextlib.closing(Viewer(DataDir(tmp_path))) as viewer:
        for row in PATHS:
            for _ in range(25):
                named = [name for name in PARAMETERS if f"{{{name}}}" in row.path]
                drawn = {
                    name: PARAMETERS[name][0] if chance.random() < 0.6 else chance.choice(PARAMETERS[name])
                    for name in named
                }
                query = {name: [chance.choice(VALUES)] for name in query_parameters(row) if chance.random() < 0.35}
                try:
                    answer = row.read(viewer, row.asked(drawn, query))
                except (InvalidRequestError, NotFoundError) as error:
                    messages.append(error.message)
                    outcomes[type(error).__name__] += 1
                else:
                    row.answer.model_validate_json(answer.model_dump_json())
                    outcomes["answer"] += 1
    assert min(outcomes["answer"], outcomes["InvalidRequestError"], outcomes["NotFoundError"]) > 30
    assert not [message for message in messages if str(tmp_path) in message]
