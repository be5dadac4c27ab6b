"""python -m halfback.bench TASK.json: one row, in a process of its own. `halfback bench` starts it."""

import sys
from pathlib import Path

from .work import failing, work

if __name__ == "__main__":
    path = Path(sys.argv[1])
    with failing(path):
        work(path)
