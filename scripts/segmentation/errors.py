"""The exception for a user's mistake, and the exit code of a script that raises it.

The scripts wrap their work in `exit_code`. Any other exception is a bug of ours and
keeps its traceback.
"""

import argparse
import os
import signal
import sys


class UserError(Exception):
    """One full sentence that says what is wrong and what is expected."""


class Diverged(UserError):
    """Training has ended in a loss that is not a number."""


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
    # A script that a shell has started in the background would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            work(*args)
        finally:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
        return 0
    except UserError as error:
        message = " ".join(str(error).split())
    except RuntimeError as error:
        if type(error).__name__ != "MXNetError":  # MXNet is slow to import: not here
            raise
        message = _last_words(error)
    except OSError as error:  # a full disk or a closed pipe behind the output, mostly
        name = f" ({error.filename})" if error.filename else ""
        message = f"The system reports: {error.strerror or error}{name}."
        # Text that could not be printed would fail again, with a traceback, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt as error:  # its text is the command that continues
        text = "interrupted: the checkpoints written so far are whole"
        print(f"{text}; `{error}` continues" if str(error) else text, file=sys.stderr)
        return 130
    print(f"error: {message}", file=sys.stderr)
    return 2
