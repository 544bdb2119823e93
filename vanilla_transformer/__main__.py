"""`python -m vanilla_transformer SUBCOMMAND`: the console program."""

from .program import main

if __name__ == "__main__":
    main()
