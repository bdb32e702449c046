"""Write the notebooks of examples/notebooks from the `.py` files beside them, or run them.

python -m tools.notebooks
python -m tools.notebooks --run tic_tac_toe --keep       keeps its learning curve for the site, and its times
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tools.notebooks.run import run_notebook
from tools.notebooks.times import PICTURES, keep_times, write_table
from tools.notebooks.write import sources, write_notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [source.stem for source in sources()]
    parser.add_argument("--run", nargs="+", choices=names, metavar="NAME", help=f"run instead: {', '.join(names)}")
    parser.add_argument(
        "--keep", action="store_true", help="keep the first picture for the site, and times for the README"
    )
    parser.add_argument(
        "--show", type=Path, metavar="FOLDER", help="write what it shows to FOLDER: NAME.txt, NAME-1.png, ..."
    )
    args = parser.parse_args()
    for source in sources():
        if source.stem in (args.run or ()):
            _run(source, keep=args.keep, show=args.show)
    if not args.run:
        for source in sources():
            print(f"{source.with_suffix('.ipynb').name}: {'written' if write_notebook(source) else 'is current'}")
    if not args.run or args.keep:
        print(f"README.md: {'written' if write_table() else 'is current'}")


def _run(source: Path, *, keep: bool, show: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = run_notebook(source, Path(folder))
    print(f"{source.stem}: {run.wall_s:.0f} s, {run.cpu_s:.0f} s of CPU", flush=True)
    if show is not None:
        show.mkdir(parents=True, exist_ok=True)
        (show / f"{source.stem}.txt").write_text(run.text(), encoding="utf-8")
        for number, picture in enumerate(run.pictures(), start=1):
            (show / f"{source.stem}-{number}.png").write_bytes(picture)
    if keep:
        PICTURES.mkdir(parents=True, exist_ok=True)
        (PICTURES / f"{source.stem}.png").write_bytes(run.pictures()[0])
        keep_times(source.stem, run.wall_s, run.cpu_s)


if __name__ == "__main__":
    main()
