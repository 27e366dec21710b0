"""`python -m dpofit`: the `dpofit` script."""

from dpofit.cli.app import main

if __name__ == "__main__":
    main()
