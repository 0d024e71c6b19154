"""`python -m consistency`."""

import sys

from consistency.cli import main

sys.exit(main())
