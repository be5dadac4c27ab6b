"""python -m halfback"""

import sys

from .cli import main

sys.exit(main())
