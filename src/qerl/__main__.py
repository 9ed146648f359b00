"""`python -m qerl`: the `qerl` command of this interpreter."""

from qerl.cli import main

if __name__ == "__main__":
    main()
