"""Keeps what `python -m tinygpt.whole` measured as results/whole.json, for the page of the whole process.

python -m tinygpt.whole
python benchmarks/whole.py runs/whole
"""

import argparse
import json
from pathlib import Path

from data_machine import save


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", type=Path, help="of the four runs")
    folder = parser.parse_args().folder
    stages = json.loads((folder / "results.json").read_text())
    save("whole", dict(command="python -m tinygpt.whole", stages=stages))


if __name__ == "__main__":
    main()
