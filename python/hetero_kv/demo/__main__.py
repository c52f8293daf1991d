"""``python -m hetero_kv.demo``."""

import sys

from hetero_kv.demo.run import main

sys.exit(main())
