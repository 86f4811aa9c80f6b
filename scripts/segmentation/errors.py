"""The exception for a user's mistake, and the exit code of a script that raises it.

The scripts wrap their work in `exit_code`. Any other exception is a bug of ours and
keeps its traceback.
"""

import argparse
import sys


class UserError(Exception):
    """One full sentence that says what is wrong and what is expected."""


class Diverged(UserError):
    """Training has ended in a loss that is not a number."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a UserError like all others."""

    def error(self, message):
        raise UserError(f"On the command line, {message} (see --help).")


def exit_code(work):
    """Run `work()`; return 0, 2 for a user's mistake or 130 for an interrupt."""
    try:
        work()
    except (UserError, OSError) as error:  # or a file that is not the user's to write
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the epochs that were saved are whole", file=sys.stderr)
        return 130
    return 0
