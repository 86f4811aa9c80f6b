"""The one exception for what a user can mend, and how a script ends with it.

Both scripts wrap their work in `exit_code`. Whatever else is raised is a bug of ours
and keeps its traceback.
"""

import argparse
import sys


class UserError(Exception):
    """One full sentence that says what is wrong and what is expected."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a UserError like all others."""

    def error(self, message):
        raise UserError(f"On the command line, {message} (see --help).")


def _last_words(error):
    """The message of an MXNetError without MXNet's own native stack trace."""
    text = str(error).split("Stack trace:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].replace("MXNetError: ", "") if lines else "MXNet gave no reason"


def exit_code(work, *args):
    """Run `work(*args)`; return 0, 2 for a user's mistake or 130 for an interrupt."""
    try:
        work(*args)
        return 0
    except UserError as error:
        message = " ".join(str(error).split())
    except RuntimeError as error:
        if type(error).__name__ != "MXNetError":  # MXNet is slow to import: not here
            raise
        message = _last_words(error)
    except KeyboardInterrupt:
        print("interrupted: the checkpoints written so far are whole", file=sys.stderr)
        return 130
    print(f"error: {message}", file=sys.stderr)
    return 2
