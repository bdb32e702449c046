"""docs/errors.md: the tree of errors with codes, HTTP statuses, meanings and what to do."""

from __future__ import annotations

from art import errors
from art.errors import ArtError
from art.server.answers import STATUS
from tools.pages.markdown import escaped, header, table
from tools.pages.source import own_docstring

_INTRODUCTION = """
Every error that ART raises on purpose is an `art.ArtError`. Catch a class of [the tree](#the-tree) to catch everything
below it. An error of the server arrives in your program as the same class with the same message: its `code` names it on
the wire.

```python
import art

try:
    art.TrainConfig(learning_rate=-1)
except art.errors.ConfigError as error:
    print(error.code, error)  # invalid_config TrainConfig: `learning_rate` must be greater than 0, got -1
```

Over HTTP the body is OpenAI's: `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`. *Again* means
that the same call may succeed a little later: the client repeats it, and the answer carries `x-should-retry: true`.
"""

ADVICE: dict[type[ArtError], str] = {
    errors.ArtError: "Look up the id that the message names in the server's log, and report it as a bug.",
    errors.ConfigError: "Change the setting that the message names.",
    errors.RequestError: "Change the call as the message says.",
    errors.AuthenticationError: "Set `ART_API_KEY` to a key of the server; `art keys list` shows which exist.",
    errors.PermissionDeniedError: "Use a key with the scope and project that the message names.",
    errors.InvalidRequestError: "Change the parameter that `param` names.",
    errors.ContextLengthError: "Shorten the prompt, lower `max_completion_tokens`, or raise `max_context`.",
    errors.NotFoundError: "Check the name; register a model before it is used.",
    errors.ConflictError: "Use another id, or send the same request again under the same id.",
    errors.PromotionError: "Measure on more scenarios or train on; the message has the figures. `--force` promotes it.",
    errors.RequestTimeoutError: "Send the body faster.",
    errors.PayloadTooLargeError: "Send less in one call, or raise the setting of the server that the message names.",
    errors.UnsupportedMediaError: "Send the body plain.",
    errors.OverloadedError: "Wait; run fewer rollouts at once, or raise the limit that the message names.",
    errors.QuotaError: "Wait for the next month, or have the operator raise the quota: `art quota set`.",
    errors.TrajectoryError: "Leave the trajectory out, or repair what the message names.",
    errors.TrajectoryMismatchError: "Append the `Choice` objects as they came, and do not edit their text.",
    errors.NothingTrainableError: "Make the rewards of a group differ; `metrics.md` explains the findings.",
    errors.ConstraintMismatchError: "Check that server and trainer have the same tokenizer; sample new rollouts.",
    errors.TrainingError: "Read the message: usually the learning rate is too high, or the rewards are not finite.",
    errors.JobCancelledError: "Nothing of the step was kept; submit it again if you want it.",
    errors.PublishError: "The last published step is still served. Read the trainer's and engine's logs.",
    errors.AdapterError: "Check the folder: a PEFT adapter of the same base model, with all its files.",
    errors.HandshakeError: "Use the same dtype for engine and trainer; `art doctor` measures the gap. "
    "Leave layers that the message names out of `lora.target_modules`, or use another engine.",
    errors.JudgeError: "Check the judge's address, key and limits. The group has no reward until it is judged.",
    errors.JudgeAnswerError: "Use a stronger judge, or a clearer rubric.",
    errors.BudgetError: "Raise the budget, or stop here: every finished step is kept.",
    errors.FaultRateError: "Repair what most rollouts failed of (the message counts the causes), or raise `max_rate`.",
    errors.GenerationError: "Use a stronger generator, or describe the task in more detail.",
    errors.RolloutError: "Nothing, if it is rare: the rollout is left out and counted.",
    errors.ToolServerError: "Check that the MCP server runs, and start it again.",
    errors.KeysUnavailableError: "Restore `keys.db` from a copy, or remove it and make new keys, then start the server "
    "again; the key that it was started with works meanwhile.",
    errors.StorageError: "Check the data directory and its permissions.",
    errors.DirectoryGoneError: "End the server, restore the directory from a copy, and start again.",
    errors.DiskFullError: "Free space, or delete checkpoints: `await model.delete_checkpoints()`.",
    errors.CorruptCheckpointError: "Train on from an earlier checkpoint; the message names the file.",
    errors.MachineError: "Do what the message says, on that machine or in your configuration of ssh; see docs/ssh.md.",
    errors.UnreachableError: "Check that the machine runs and that `ssh HOST` works; then try again.",
    errors.ProcessError: "Read the lines of its log in the message; a process that dies is restarted.",
}
"""What to do about each error. A class without an entry fails `tests/unit/project/test_pages.py`."""


def error_classes(root: type[ArtError] = ArtError, depth: int = 0) -> list[tuple[type[ArtError], int]]:
    """List the errors of `art.errors` from the root down, each with its depth in the tree."""
    children = [cls for cls in root.__subclasses__() if cls.__module__ == errors.__name__]
    return [(root, depth), *(pair for child in children for pair in error_classes(child, depth + 1))]


def status_of(cls: type[ArtError]) -> int:
    """Return the HTTP status of `cls`: that of the nearest ancestor in the server's table."""
    return next(STATUS[base] for base in cls.__mro__ if base in STATUS)


def render_page() -> str:
    """Render the page as Markdown."""
    tree = "".join(f"{'    ' * depth}{cls.__name__}\n" for cls, depth in error_classes())
    rows = []
    for cls, _ in error_classes():
        names = (f"`{cls.__name__}`", f"`{cls.code}`", str(status_of(cls)), "again" if cls.transient else "")
        rows.append((*names, escaped(own_docstring(cls)), escaped(ADVICE[cls])))
    headings = ("error", "code", "status", "again", "means", "what to do")
    drawing = f"## The tree\n\n```text\n{tree}```\n\n"
    return f"{header('Errors', _INTRODUCTION)}{drawing}## Each error\n\n{table(headings, rows)}"
