"""Small chores for coding agents: bugs in one file, missing functions, failing tests, and work at the shell.

    python -m art_tasks.chores chores --count 20                   # writes 20 plain task folders
    art train harbor:chores --agent codex --base-model ...

There are 20 kinds. Folders beyond the first 20 are of the same kinds with other names, numbers and texts. A check
compares what commands print with what the reference solution prints, in programs of their own: it never imports what
the agent wrote, which could end the check.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.client.rollout_context import derive_seed
from art.errors import ConfigError
from art_tasks.harbor_folders import PLAIN_WORKDIR

_CHECK = f"""#!/bin/bash
# Exits with 1 unless all lines at the end hold. Programs run apart, without what an agent may have put into Python's
# start or cache, and cannot read this file.
cd {PLAIN_WORKDIR}
rm -f "$0"
prints() {{ [ "$(timeout 10 bash -c "$1" 2>/dev/null </dev/null)" = "$2" ] || exit 1; }}
gives() {{
    code="import sys; sys.path.insert(0, '{PLAIN_WORKDIR}'); from $1 import *; print(repr($2))"
    [ "$(timeout 10 python3 -I -S -B -X pycache_prefix=/none -c "$code" 2>/dev/null </dev/null)" = "$3" ] || exit 1
}}"""
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "joist", "kayak", "larch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """What a task folder is written from."""

    kind: str
    instruction: str
    files: Mapping[str, str]
    """Texts by path in the working directory."""
    solution: str
    """A script for bash that does it."""
    checks: Sequence[str]
    """Lines of the check, by `_prints` and `_gives`."""

    def write(self, folder: Path) -> None:
        """Write the folder: task.toml, files/, check.sh and solve.sh."""
        texts = {
            "task.toml": f"instruction = {json.dumps(self.instruction)}\n\n[agent]\ntimeout_sec = 300.0\n",
            "check.sh": "\n".join([_CHECK, *self.checks, ""]), "solve.sh": f"{self.solution}\n",
            **{f"files/{path}": text for path, text in self.files.items()},
        }  # fmt: skip
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")


def _prints(command: str, expected: str) -> str:
    """A command must print a text. Space at its end does not count."""
    return f"prints {shlex.quote(command)} {shlex.quote(expected)}"


def _gives(module: str, expression: str, expected: str) -> str:
    """An expression with the names of a module must have a value."""
    return f"gives {module} {shlex.quote(expression)} {shlex.quote(expected)}"


def make_chores(count: int = 20, *, seed: int = 0) -> list[tuple[str, Chore]]:
    """Make chores with their names, such as `03-median`: all kinds in turn."""
    made = []
    for index in range(count):
        rng = random.Random(derive_seed("chores", seed, index))
        chore = KINDS[index % len(KINDS)](rng)
        made.append((f"{index:02}-{chore.kind}", chore))
    return made


def write_chores(folder: Path, count: int = 20, *, seed: int = 0) -> list[Path]:
    """Write chores as folders of a new folder.

    Raises:
        ConfigError: the folder is there and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; expected a new folder for the chores")
    written = []
    for name, chore in make_chores(count, seed=seed):
        chore.write(folder / name)
        written.append(folder / name)
    return written


def _code(kind: str, module: str, wrong: str, right: str, instruction: str, expressions: Sequence[str]) -> Chore:
    """A chore with one module of Python. `wrong` and `right` are the sources before and after."""
    wrong, right = (textwrap.dedent(source).lstrip() for source in (wrong, right))
    names: dict[str, Any] = {}
    exec(compile(right, module, "exec"), names)  # one of the sources below
    return Chore(
        kind=kind, instruction=f"{instruction} Change {module}.py in the working directory, and nothing else.",
        files={f"{module}.py": wrong}, solution=f"cat > {module}.py <<'END'\n{right}END",
        checks=[_gives(module, expression, repr(eval(expression, names))) for expression in expressions],
    )  # fmt: skip


def _with_test(chore: Chore, module: str, lines: Sequence[str]) -> Chore:
    """Add a test to a chore. It fails at first, and the agent can run it."""
    body = "\n".join(f"        {line}" for line in lines)
    test = (
        f"import unittest\n\nfrom {module} import *\n\n\nclass Test(unittest.TestCase):\n    def test(self):\n{body}\n"
        '\n\nif __name__ == "__main__":\n    unittest.main()\n'
    )
    return Chore(
        kind=chore.kind, files={**chore.files, f"test_{module}.py": test}, solution=chore.solution, checks=chore.checks,
        instruction=f"`python3 test_{module}.py` fails. {chore.instruction} The test is right.",
    )  # fmt: skip


def _numbers(rng: random.Random, count: int, low: int = 1, high: int = 99) -> list[int]:
    return [rng.randint(low, high) for _ in range(count)]


# --- bugs in one file ---


def wrong_sign(rng: random.Random) -> Chore:
    name, (a, b) = rng.choice(("add", "total", "plus")), _numbers(rng, 2)
    right = f"def {name}(a, b):\n    return a + b\n"
    return _code(
        "wrong-sign", "sums", right.replace("+", "-"), right, f"`{name}(2, 3)` in sums.py must be 5.",
        [f"{name}({a}, {b})", f"{name}(-{b}, {a})", f"{name}(0.5, 0.25)"],
    )  # fmt: skip


def off_by_one(rng: random.Random) -> Chore:
    name, count = rng.choice(("first", "take", "head")), rng.randint(2, 6)
    right = f"def {name}(items, count):\n    return items[:count]\n"
    return _code(
        "off-by-one", "lists", right.replace(":count]", ":count - 1]"), right,
        f"`{name}(items, count)` in lists.py must give the first `count` items, and gives one too few.",
        [f"{name}(list(range(9)), {count})", f"{name}([], 3)", f"{name}('{rng.choice(_WORDS)}', 1)"],
    )  # fmt: skip


def wrong_case(rng: random.Random) -> Chore:
    word = rng.choice(_WORDS)
    right = "def same(a, b):\n    return a.strip().lower() == b.strip().lower()\n"
    return _code(
        "wrong-case", "texts", "def same(a, b):\n    return a == b\n", right,
        "`same(a, b)` in texts.py must ignore case, and space at both ends.",
        [f"same(' {word}', '{word.title()} ')", f"same('{word}', '{word}s')", "same('', '  ')", "same('a b', 'ab')"],
    )  # fmt: skip


def shared_default(rng: random.Random) -> Chore:
    a, b = rng.sample(_WORDS, 2)
    right = """
        def collect(item, into=None):
            into = [] if into is None else into
            into.append(item)
            return into
    """
    wrong = "def collect(item, into=[]):\n    into.append(item)\n    return into\n"
    return _code(
        "shared-default", "bags", wrong, right,
        "`collect(item)` in bags.py must begin with an empty list each time, unless it is given one.",
        [f"(collect('{a}'), collect('{b}'))", f"collect('{a}', ['{b}'])"],
    )  # fmt: skip


def empty_mean(rng: random.Random) -> Chore:
    right = "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0.0\n"
    return _code(
        "empty-mean", "means", right.replace(" if numbers else 0.0", ""), right,
        "`mean([])` in means.py must be 0.0 and raises an error.", ["mean([])", f"mean({_numbers(rng, 4)})"],
    )  # fmt: skip


# --- missing functions ---


def median(rng: random.Random) -> Chore:
    right = """
        def median(numbers):
            ordered, middle = sorted(numbers), len(numbers) // 2
            if len(ordered) % 2:
                return ordered[middle]
            return (ordered[middle - 1] + ordered[middle]) / 2
    """
    return _code(
        "median", "middle", '"""Middles of lists of numbers."""\n', right,
        "Write `median(numbers)`: the middle number, or the mean of the two in the middle.",
        [f"median({_numbers(rng, 5)})", f"median({_numbers(rng, 4)})", "median([7])"],
    )  # fmt: skip


def word_counts(rng: random.Random) -> Chore:
    text = " ".join(rng.choices(_WORDS[:4], k=9)).capitalize()
    right = """
        def count(text):
            words = text.lower().split()
            return {word: words.count(word) for word in sorted(set(words))}
    """
    return _code(
        "word-counts", "words", '"""Words of texts."""\n', right,
        "Write `count(text)`: a dict with the number of each word in lower case, with its keys sorted.",
        [f"list(count('{text}').items())", "count('')"],
    )  # fmt: skip


def roman(rng: random.Random) -> Chore:
    right = """
        def roman(number):
            text = ""
            for value, letters in ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"),
                                   (4, "IV"), (1, "I")):
                text += letters * (number // value)
                number %= value
            return text
    """
    return _code(
        "roman", "numerals", '"""Numerals."""\n', right,
        'Write `roman(number)` for 1 to 399: the Roman numeral, such as "XIV".',
        [f"roman({number})" for number in (4, 49, 388, *_numbers(rng, 3, 1, 399))],
    )  # fmt: skip


def flatten(rng: random.Random) -> Chore:
    a, b, c, d = _numbers(rng, 4)
    right = """
        def flatten(items):
            if not isinstance(items, list):
                return [items]
            return [inner for item in items for inner in flatten(item)]
    """
    return _code(
        "flatten", "nested", '"""Lists in lists."""\n', right,
        "Write `flatten(items)`: the items of a list of lists of any depth, in one list.",
        [f"flatten([{a}, [{b}, [{c}]], [[], {d}]])", "flatten([])"],
    )  # fmt: skip


def slug(rng: random.Random) -> Chore:
    a, b, c = rng.sample(_WORDS, 3)
    right = """
        import re


        def slug(title):
            return "-".join(re.findall("[a-z0-9]+", title.lower()))
    """
    return _code(
        "slug", "titles", '"""Titles of pages."""\n', right,
        'Write `slug(title)`: lower case, with "-" between runs of a-z and 0-9, such as "to-be-2" for "To be: 2!".',
        [f"slug(' {a.title()}, {b}!')", f"slug('{c} -- 4')", "slug('')"],
    )  # fmt: skip


# --- failing tests ---


def leap_year(rng: random.Random) -> Chore:
    right = "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n"
    chore = _code(
        "leap-year", "years", "def is_leap(year):\n    return year % 4 == 0\n", right,
        "Centuries are leap years only if 400 divides them.",
        [f"is_leap({year})" for year in (1900, 2000, 2024, *_numbers(rng, 3, 1700, 2400))],
    )  # fmt: skip
    return _with_test(chore, "years", ["self.assertFalse(is_leap(1900))", "self.assertTrue(is_leap(2000))"])


def stack(rng: random.Random) -> Chore:
    a, b = _numbers(rng, 2)
    right = """
        class Stack:
            def __init__(self):
                self.items = []

            def push(self, item):
                self.items.append(item)

            def pop(self):
                return self.items.pop()
    """
    chore = _code(
        "stack", "stacks", textwrap.dedent(right).replace(".pop()", ".pop(0)"), right,
        "A stack gives back first what came last.",
        [f"(s := Stack(), s.push({a}), s.push({b}), s.pop(), s.pop())[1:]"],
    )  # fmt: skip
    lines = ["stack = Stack()", "stack.push(1)", "stack.push(2)", "self.assertEqual(stack.pop(), 2)"]
    return _with_test(chore, "stacks", lines)


def intervals(rng: random.Random) -> Chore:
    low, high = sorted(rng.sample(range(1, 60), 2))
    right = "def overlap(a, b):\n    return a[0] < b[1] and b[0] < a[1]\n"
    chore = _code(
        "intervals", "spans", "def overlap(a, b):\n    return a[0] <= b[0] < a[1]\n", right,
        "Two spans overlap in whichever order they are given, and not if they only touch.",
        [f"overlap(({low}, {high}), ({low - 1}, {low + 1}))", f"overlap((0, {low}), ({low}, {high}))",
         f"overlap((0, {high + 9}), ({low}, {high}))", f"overlap(({low}, {high}), (0, {high + 9}))"],
    )  # fmt: skip
    return _with_test(chore, "spans", ["self.assertTrue(overlap((3, 8), (1, 4)))"])


def change(rng: random.Random) -> Chore:
    right = """
        def change(cents):
            coins = []
            for coin in (50, 20, 10, 5, 2, 1):
                while cents >= coin:
                    coins.append(coin)
                    cents -= coin
            return coins
    """
    chore = _code(
        "change", "coins", textwrap.dedent(right).replace(">=", ">"), right, "Change ends when nothing is left.",
        [f"change({cents})" for cents in (0, 50, *_numbers(rng, 3))],
    )  # fmt: skip
    return _with_test(chore, "coins", ["self.assertEqual(change(50), [50])", "self.assertEqual(change(3), [2, 1])"])


def celsius(rng: random.Random) -> Chore:
    right = "def to_celsius(fahrenheit):\n    return round((fahrenheit - 32) * 5 / 9, 1)\n"
    chore = _code(
        "celsius", "degrees", right.replace("(fahrenheit - 32) * 5", "fahrenheit - 32 * 5"), right,
        "Degrees are rounded to one digit.", [f"to_celsius({degrees})" for degrees in (32, 212, *_numbers(rng, 3))],
    )  # fmt: skip
    return _with_test(chore, "degrees", ["self.assertEqual(to_celsius(212), 100.0)"])


# --- work at the shell ---


def _shell(
    kind: str, instruction: str, files: Mapping[str, str], solution: str, checks: Sequence[tuple[str, str]]
) -> Chore:
    """A chore of files. `checks` are commands and what each must print."""
    lines = [_prints(command, expected) for command, expected in checks]
    return Chore(kind=kind, instruction=instruction, files=files, solution=solution, checks=lines)


def count_lines(rng: random.Random) -> Chore:
    word, lines = rng.choice(_WORDS), rng.choices(("ok", "error: disk", "error: net", "late"), k=rng.randint(9, 30))
    found = sum(line.startswith("error") for line in lines)
    return _shell(
        "count-lines", f"Write the number of lines of {word}.log that begin with `error` into count.txt.",
        {f"{word}.log": "\n".join([*lines, ""])}, f"grep -c ^error {word}.log > count.txt || true",
        [("tr -d ' ' < count.txt", str(found)), (f"wc -l < {word}.log | tr -d ' '", str(len(lines)))],
    )  # fmt: skip


def rename(rng: random.Random) -> Chore:
    names = sorted(rng.sample(_WORDS, 4))
    return _shell(
        "rename", "Rename every .txt file in the folder notes to .md, with its text as it is.",
        {f"notes/{name}.txt": f"{name} {rng.random()}\n" for name in names} | {"notes/keep.csv": "1,2\n"},
        'for f in notes/*.txt; do mv "$f" "${f%.txt}.md"; done',
        [("ls notes", "\n".join(sorted([*(f"{name}.md" for name in names), "keep.csv"]))),
         *((f"cut -d' ' -f1 notes/{name}.md", name) for name in names)],
    )  # fmt: skip


def largest(rng: random.Random) -> Chore:
    sizes = dict(zip(rng.sample(_WORDS, 4), rng.sample(range(10, 400), 4), strict=True))
    return _shell(
        "largest", "Write the name of the largest file in the folder data, such as a.txt, into answer.txt.",
        {f"data/{name}.txt": "x" * size + "\n" for name, size in sizes.items()}, "ls -S data | head -1 > answer.txt",
        [("tr -d ' ' < answer.txt", f"{max(sizes, key=sizes.__getitem__)}.txt")],
    )  # fmt: skip


def total_column(rng: random.Random) -> Chore:
    rows = [(word, number) for word, number in zip(rng.sample(_WORDS, 6), _numbers(rng, 6), strict=True)]
    return _shell(
        "total-column", "stock.csv has lines of name,number. Write the sum of all numbers into total.txt.",
        {"stock.csv": "".join(f"{name},{number}\n" for name, number in rows)},
        "awk -F, '{sum += $2} END {print sum}' stock.csv > total.txt",
        [("tr -d ' ' < total.txt", str(sum(number for _, number in rows)))],
    )  # fmt: skip


def executable(rng: random.Random) -> Chore:
    word = rng.choice(_WORDS)
    return _shell(
        "executable", f"`./greet.sh` must be executable and print `hello {word}`; it prints nothing now.",
        {"greet.sh": f"#!/bin/bash\nname={word}\necho hello $nme > /dev/null\n"},
        f"printf '#!/bin/bash\\nname={word}\\necho hello $name\\n' > greet.sh && chmod +x greet.sh",
        [("./greet.sh", f"hello {word}")],
    )  # fmt: skip


KINDS: tuple[Callable[[random.Random], Chore], ...] = (
    wrong_sign, count_lines, median, leap_year, off_by_one, rename, word_counts, stack, wrong_case, largest,
    roman, intervals, shared_default, total_column, flatten, change, empty_mean, executable, slug, celsius,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m art_tasks.chores", description="Write chores for coding agents.")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--count", type=int, default=20, help="number of task folders (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="other names, numbers and texts (default: 0)")
    args = parser.parse_args()
    try:
        written = write_chores(args.folder, args.count, seed=args.seed)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    sys.stdout.write(f"{len(written)} task folders in {args.folder}; next: art tasks harbor:{args.folder}\n")


if __name__ == "__main__":
    main()
