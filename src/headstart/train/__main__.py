"""`python -m headstart.train RECIPE` is `headstart train RECIPE`, in the form that launchers start."""

import sys

from headstart.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
