"""What ART accepts, it reads: fields of settings, models and requests, and parameters of functions, by their syntax trees.

A field of a request that only advises is read too: to say that it is ignored.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
HOLDERS = ("config", "model", "trajectory.py", "costs.py", "rewards", "scenarios")
"""Parts whose classes take values from users."""
REQUESTS = ("protocol/chat_completions.py", "gateway/anthropic.py", "gateway/responses.py")
"""Modules with the types of chat requests."""
FOR_THE_USER = {"start_time", "traceback"}
"""Fields that ART fills in and only the user reads."""
LABELS = {
    "include_obfuscation", "inference_geo", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
"""Fields of requests that label them, and have no effect with any provider or here."""
USER_SIDE = (
    "art/backend.py", "art/capture.py", "art/client", "art/config", "art/costs.py", "art/gather.py", "art/local_backend.py",
    "art/model", "art/rewards", "art/trajectory.py", "art_cloud/serverless_backend.py",
    "art_cloud/skypilot_backend.py", "art_cloud/ssh_backend.py", "art_recipes", "art_tasks", "openpipe_art",
)  # fmt: skip
"""Parts whose functions users call."""
SAME_FOR_ALL = {
    "answer(tools)": "the signature of a scripted player; a game without tools has none",
    "player(scenario)": "the signature of `Task`; a player that sees the whole board needs no more",
    "reply(rng)": "the signature of a scripted role; a generator draws nothing",
    "group_lost(group)": "a policy that counts groups, not their rollouts",
    "init_chat_model(model_provider)": "LangChain's signature; the model is the one of the rollout",
    "player(rollout_index)": "the signature of `Task`; a solution is the same for every rollout",
    "rollout(rollout_index)": "the signature of `Task`; the environment draws its own randomness",
}
"""Parameters that a signature must have and that one implementation has no use for, with the reason."""


def fields_of(path: Path, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """`(class, field)` of classes whose constructor takes the annotated names: pydantic models and dataclasses."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        if bases & {"Protocol", "TypedDict", "NamedTuple", "Enum"}:
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                if not name.startswith("_") and "ClassVar" not in ast.unparse(statement.annotation):
                    yield node.name, name


def read_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Every name that is read as an attribute, or by its text as a key."""
    names: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)
            elif isinstance(node, ast.MatchClass):
                names.update(node.kwd_attrs)
    return names


def unread_fields(trees: dict[Path, ast.Module], holders: list[Path]) -> list[str]:
    names = read_names(trees)
    return [
        f"{path.name}: {owner}.{name}"
        for path in holders
        for owner, name in fields_of(path, trees[path])
        if name not in names | FOR_THE_USER
    ]


def unread_parameters(tree: ast.Module) -> list[str]:
    """`line function(parameter)` of parameters that a function with a body of its own never reads."""
    unread = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_stub(node) or _is_private(node):
            continue
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        read = {name.id for statement in node.body for name in ast.walk(statement) if isinstance(name, ast.Name)}
        unread += [
            f"{node.lineno} {node.name}({argument.arg})"
            for argument in every
            if argument is not None and argument.arg not in read | {"self", "cls"} and argument.arg[0] != "_"
        ]
    return unread


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the body does nothing: a declaration of a protocol, or a method that others override."""
    body = [
        statement for statement in node.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]  # fmt: skip
    return all(
        isinstance(statement, (ast.Pass, ast.Raise))
        or (
            isinstance(statement, ast.Return) and (statement.value is None or isinstance(statement.value, ast.Constant))
        )
        for statement in body
    )


def _is_private(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.name.startswith("_") and node.name != "__init__"


def test_every_field_is_read() -> None:
    holders = [path for path in SOURCES if set(HOLDERS) & set(path.parts)]
    assert len(holders) > 20
    assert not unread_fields(TREES, holders)


def test_every_field_of_a_request_is_read_or_a_label() -> None:
    """What is read is honoured, refused, or reported as ignored: tests/contract/test_ignored_fields.py."""
    holders = [path for path in SOURCES if str(path).endswith(REQUESTS)]
    assert len(holders) == len(REQUESTS)
    unread = [name.split(": ")[1].split(".") for name in unread_fields(TREES, holders)]
    of_requests = {field for owner, field in unread if owner.endswith(("Request", "Options", "Thinking"))}
    assert of_requests <= LABELS


@pytest.mark.parametrize("part", USER_SIDE)
def test_every_parameter_is_read(part: str) -> None:
    unread = [
        f"{path.relative_to(ROOT)}:{what}"
        for path, tree in TREES.items()
        if path.is_relative_to(ROOT / "src" / part)
        for what in unread_parameters(tree)
        if what.split(" ", 1)[1] not in SAME_FOR_ALL
    ]
    assert not unread, "\n".join(unread)


def test_the_rules_see_what_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "settings.py"
    tree = ast.parse(
        "class Settings(Config):\n    used: int\n    dropped: int\ndef f(a, b):\n    return a\nSettings().used"
    )
    assert unread_fields({path: tree}, [path]) == ["settings.py: Settings.dropped"]
    assert unread_parameters(tree) == ["4 f(b)"]
