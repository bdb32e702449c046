"""No file that ART reads can run code: weights are safetensors, all else is JSON, SQLite or text."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src"
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
"""Reading what they wrote can run code."""
CALLS = {"torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}


def dangers(text: str) -> list[str]:
    """Imports and calls in a source file that could run code from a file or a message."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.split(".")[0] in MODULES else []
        elif isinstance(node, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            called = ast.unparse(node.func)
            safe = keywords.get("weights_only")
            if called in CALLS and not _is_true(safe):
                found.append(called)
            safetensors = keywords.get("use_safetensors")
            if re.search(r"AutoModel\w*\.from_pretrained$", called) and not _is_true(safetensors):
                found.append(f"{called} without use_safetensors=True")
            for name in ("trust_remote_code", "shell", "allow_pickle"):
                value = keywords.get(name)
                if value is not None and not (isinstance(value, ast.Constant) and value.value in (False, None)):
                    found.append(f"{called}({name}=)")
    return found


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@pytest.mark.parametrize("part", sorted(path.name for path in (SRC / "art").iterdir() if path.name[0] != "_"))
def test_nothing_is_unpickled(part: str) -> None:
    root = SRC / "art" / part
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    assert {str(path.relative_to(SRC)): found for path in files if (found := dangers(path.read_text()))} == {}


def test_the_test_finds_what_it_looks_for() -> None:
    bad = """
import pickle
from joblib import load
def f():
    torch.load(path); torch.load(path, weights_only=False); torch.load(path, weights_only=True)
    model(trust_remote_code=True); model(trust_remote_code=False)
    AutoModelForCausalLM.from_pretrained(p); AutoModel.from_pretrained(p, use_safetensors=True)
    subprocess.run("x", shell=True); np.load(p, allow_pickle=flag)
"""
    assert sorted(dangers(bad)) == sorted(
        [
            "pickle", "joblib", "torch.load", "torch.load", "model(trust_remote_code=)", "subprocess.run(shell=)",
            "AutoModelForCausalLM.from_pretrained without use_safetensors=True", "np.load", "np.load(allow_pickle=)",
        ]
    )  # fmt: skip
