"""`python -m headstart` is the command `headstart`."""

from headstart.cli import main

if __name__ == "__main__":
    main()
