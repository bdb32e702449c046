"""Runs the verifier of a task directory in the sandbox that an agent left, and reads the reward that it writes."""

from __future__ import annotations

import json
import math

from art.errors import ToolServerError
from art.integrations.harbor.sandbox import Sandbox
from art.integrations.harbor.task_folder import TaskFolder

_LOGS = "/logs/verifier"


async def verify(folder: TaskFolder, sandbox: Sandbox) -> tuple[float, dict[str, float]]:
    """Run the verifier of a task. Returns the reward, and the values of `reward.json` as metrics.

    Raises:
        ToolServerError: it wrote no reward, or none that is a number.
    """
    await sandbox.run(f"rm -rf /tests {_LOGS} && mkdir -p {_LOGS}", timeout_s=30)
    await sandbox.put(folder.tests())
    env, cwd = {**folder.image.env, **folder.verifier_env}, folder.image.workdir
    done = await sandbox.run("bash /tests/test.sh", cwd=cwd, env=env, timeout_s=folder.verifier_timeout_s)
    read = f"cd {_LOGS} && for f in reward.json reward.txt; do [ -f $f ] && head -c 10000 $f && exit; done; exit 9"
    written = await sandbox.run(read, timeout_s=30)
    how = f"timed out after {folder.verifier_timeout_s:g} s" if done.timed_out else f"ended with code {done.code}"
    tail = f"tests/test.sh of {folder.path} {how}: {done.output.strip()[-1500:]}"
    if done.timed_out or written.code:
        raise ToolServerError(f"the verifier wrote no reward to {_LOGS}/reward.txt or reward.json; {tail}")
    try:
        return read_reward(written.output)
    except ValueError as error:
        raise ToolServerError(f"the verifier's reward {written.output[:200]!r} {error}; {tail}") from None


def read_reward(text: str) -> tuple[float, dict[str, float]]:
    """Read the text of `reward.txt` or `reward.json`.

    Example: "1" gives 1.0; {"reward": 0.5, "style": 1} gives 0.5 and metrics `reward/reward`, `reward/style`.

    Raises:
        ValueError: it is no number, or several of which none is named `reward`.
    """
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError("is neither a number nor JSON") from None
    parts = value if isinstance(value, dict) else {"reward": value}
    numbers = {key: float(part) for key, part in parts.items() if isinstance(part, int | float)}
    reward = numbers.get("reward", next(iter(numbers.values())) if len(numbers) == 1 else None)
    if reward is None or len(numbers) < len(parts) or not all(map(math.isfinite, numbers.values())):
        raise ValueError("must be one finite number, or JSON of numbers with one named `reward`")
    return reward, {f"reward/{key}": number for key, number in numbers.items()} if isinstance(value, dict) else {}
