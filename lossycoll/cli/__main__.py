"""``python -m lossycoll.cli``, for an interpreter that isn't on the path."""

import sys

from .main import main

sys.exit(main())
