"""The interpreter of a page: runs its Python blocks one after another in one namespace.

A request is a line `PAGE:LINE:FILE`; the reply is `ok` or `failed`. Lines are counted as in the page, so a
traceback names the page and the line in it."""

import linecache
import os
import sys
import traceback

directory = sys.argv[1]


def take_environment():
    """Takes over the present exports of the shell."""
    with open(f"{directory}/environment", "rb") as file:
        pairs = [pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair]
    os.environb.clear()
    os.environb.update({name: value for name, value in pairs})


def report(page, error):
    """Records the innermost line of the page that was running."""
    if isinstance(error, SyntaxError) and error.filename == page:
        line = error.lineno
    else:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == page]
        line = lines[-1] if lines else 0
    text = linecache.getline(page, line).strip()
    with open(f"{directory}/failure", "w") as file:
        file.write(f"{line}\n{text}\n")


namespace = {"__name__": "__main__"}
with open(f"{directory}/orders") as orders, open(f"{directory}/replies", "w", buffering=1) as replies:
    for order in orders:
        page, line, path = order.rstrip("\n").split(":", 2)
        take_environment()
        with open(path) as file:
            source = "\n" * int(line) + file.read()
        linecache.cache[page] = (len(source), None, source.splitlines(keepends=True), page)
        try:
            exec(compile(source, page, "exec"), namespace)
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                report(page, error)
                traceback.print_exc()
                replies.write("failed\n")
                continue
        finally:
            sys.stdout.flush()
        replies.write("ok\n")
