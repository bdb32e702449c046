"""Parse a command line of `vllm serve` with vLLM's own parser, or list its flags. It runs in vLLM's environment.

    python vllm_parser.py                 prints the names of all flags, one a line
    python vllm_parser.py --model=m ...   parses these arguments and prints their values as JSON

It imports nothing of ART.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    sys.path.pop(0)  # this folder, whose vllm.py is another module
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # 0.32
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # 0.26
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = make_arg_parser(FlexibleArgumentParser())
    if len(sys.argv) > 1:
        print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
        return
    names = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    print("\n".join(sorted(names)))


if __name__ == "__main__":
    main()
