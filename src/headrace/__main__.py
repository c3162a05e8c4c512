"""`python -m headrace` is the command `headrace`."""

from headrace.cli.main import run

if __name__ == "__main__":
    run()
