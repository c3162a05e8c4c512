"""`python -m headrace.compat` runs another program with Headrace in the place of Run:ai's package; see `headrace.compat.launch`."""

import sys

from headrace.compat.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
