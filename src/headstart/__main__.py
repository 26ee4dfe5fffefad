"""`python -m headstart` is the command `headstart`."""

from headstart.cli.app import main

if __name__ == "__main__":
    main()
