"""``python -m tools.netlab ...`` is ``lossycoll lab ...`` (lossycoll/lab, docs/lab.md)."""

import sys

from lossycoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["lab", *sys.argv[1:]]))
