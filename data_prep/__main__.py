"""`python -m data_prep`: prepare, preview, verify, overlap."""

import sys

from data_prep.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
