"""`python -m elle` is the `elle` command."""

from elle.cli import main

if __name__ == "__main__":
    main()
