"""`python -m consistency`."""

import sys

from consistency.cli.main import main

sys.exit(main())
