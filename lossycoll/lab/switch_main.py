"""The switch's process: switch_main.py EXTENSION MEMORY LIFELINE READY (native/lab/lab.h).

A script of its own, run by path, so that it imports the extension and nothing else of the package.
"""

import importlib.util
import sys


def main(extension: str, *descriptors: str) -> int:
    spec = importlib.util.spec_from_file_location("_lab", extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    status: int = module.lib.lab_switch(*map(int, descriptors))
    return -status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
