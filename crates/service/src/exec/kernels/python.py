# The python kernel: runs cells in one namespace and reports their results.
#
# It is passed to the interpreter as its `-c`, so it needs nothing but the interpreter. Its protocol is in
# docs/protocol.md: orders arrive on descriptor 3, reports go to descriptor 4, and the output of cells is simply this
# process's output. Only modules that are part of every interpreter are imported at the start, since the first result
# waits for them; `json` and `ast` alone would double that time.

import _ast
import _json
import _signal
import _thread
import builtins
import faulthandler
import os
import select
import sys

MOST = 7 << 20  # bytes of one report; the agent cuts lines of 8 MiB
LONGEST_TEXT = 1 << 20  # characters of a text form
MOST_ITEMS = 1000  # items of a container in its text form
MOST_CELLS = 500  # cells whose text is kept for tracebacks
REPRS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}


class StdinNotImplementedError(NotImplementedError):
    """A cell asked for input, which is not available."""


class Reports:
    """Sends reports to the agent as whole lines, one after the other, from any thread."""

    def __init__(self, fd):
        self.fd = fd
        self.lock = _thread.allocate_lock()
        self.pid = os.getpid()

    def say(self, line):
        data = line.encode("utf-8", "replace") + b"\n"
        if os.getpid() != self.pid:
            return  # A forked child is not the kernel.
        with self.lock:
            try:
                while data:
                    data = data[os.write(self.fd, data) :]
            except OSError:
                os._exit(70)  # The cell has closed the descriptor; the agent sees that the kernel ended.


class Kernel:
    def __init__(self):
        # Moved to high numbers, away from descriptors that cells open and close, and not inherited by child processes.
        self.orders = os.dup2(3, 203, inheritable=False)
        self.reports = Reports(os.dup2(4, 204, inheritable=False))
        os.close(3)
        os.close(4)
        self.heard = b""
        self.key = None
        self.count = 0
        self.running = False  # A cell is running and may be interrupted anywhere.
        self.waiting = True  # No order has arrived yet.
        self.interrupted = False
        self.held = 0
        self.thread = _thread.get_ident()
        self.cells = {}
        self.flags = getattr(_ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
        self.loop = None
        self.names = self.fresh_main()
        _signal.signal(_signal.SIGINT, self.on_interrupt)
        faulthandler.enable()

    def fresh_main(self):
        self.own_main = sys.modules["__main__"]  # Keeps the module alive: the interpreter only borrows it.
        main = type(sys)("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        sys.argv = [""]
        builtins.display = self.display
        builtins.input = refuse_input
        os.environ.setdefault("MPLBACKEND", "Agg")
        sys.meta_path.insert(0, PyplotWatch(self))
        return main.__dict__

    # Interrupts.

    def on_interrupt(self, _signum, _frame):
        if self.held or not self.running:
            # Between two cells, the interrupt is meant for the cell that has been ordered already, if there is one.
            self.interrupted = bool(self.held or not self.waiting or self.heard or self.has_orders(0))
        else:
            raise KeyboardInterrupt

    def has_orders(self, timeout=None):
        return select.select([self.orders], [], [], timeout)[0]

    def check_interrupt(self):
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    # Orders and reports.

    def next_order(self):
        while b"\n" not in self.heard:
            self.has_orders()
            # For a moment the order is neither in the pipe nor in `heard`; it counts as arrived then.
            self.waiting = False
            piece = os.read(self.orders, 1 << 16)
            if not piece:
                return None
            self.heard += piece
        line, _, self.heard = self.heard.partition(b"\n")
        return line.decode("utf-8", "replace")

    def tell(self, kind, value):
        """Reports an event of the current cell, after everything it has printed."""
        if self.key is None:
            return
        line = "%s {%s:%s}" % (self.key, text_json(kind), value)
        if _thread.get_ident() != self.thread:
            flush()
            return self.reports.say("tell " + line)
        self.held += 1  # An interrupt must not cut the line.
        try:
            flush()
            # Output that is printed after a value is displayed must not overtake it.
            self.reports.say(("show " if kind == "display" else "tell ") + line)
            if kind == "display":
                self.await_heard()
        finally:
            self.held -= 1
        if self.running and not self.held:
            self.check_interrupt()

    def await_heard(self):
        """Waits for the answer to a displayed value, for a limited time."""
        answer = ("heard %s\n" % self.key).encode()
        while answer not in self.heard and self.has_orders(1):
            piece = os.read(self.orders, 1 << 16)
            if not piece:
                break
            self.heard += piece
        self.heard = self.heard.replace(answer, b"", 1)

    def display(self, *objects, raw=False, **_options):
        """Displays objects in all forms they have."""
        for each in objects:
            forms = {str(mime): encoded(mime, form) for mime, form in each.items()} if raw else bundle(each)
            self.tell("display", bundle_json(forms))

    def serve(self):
        self.reports.say("ready")
        while True:
            order = self.next_order()
            if order is None:
                os._exit(0)
            word, _, rest = order.partition(" ")
            key, _, body = rest.partition(" ")
            if word == "run":
                self.key = key
                self.run(code_of(body))
                self.key = None
                self.reports.say("done " + key)

    # Cells.

    def run(self, code):
        self.count += 1
        self.tell("count", str(self.count))
        fresh_streams()
        _signal.signal(_signal.SIGINT, self.on_interrupt)
        failure = self.attempt(self.execute, code)
        self.held += 1
        failure = self.attempt(self.show_figures) or failure
        if failure is not None:
            self.fail(failure)
        flush()
        self.held = 0
        self.waiting = True
        self.interrupted = False

    def attempt(self, action, *arguments):
        """Returns the error that an action fails with. A successful exit is no error."""
        try:
            try:
                self.running = True
                self.check_interrupt()
                action(*arguments)
            finally:
                self.running = False
                if os.getpid() != self.reports.pid:
                    leave_child()
        except SystemExit as error:
            return None if error.code in (None, 0) else error
        except BaseException as error:
            return error

    def execute(self, code):
        name = "<cell %d>" % self.count
        self.remember(name, code)
        tree = self.parse(code, name)
        value = None
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = _ast.Expression(tree.body.pop().value)
            self.evaluate(compile(tree, name, "exec", self.flags, True))
            value = self.evaluate(compile(last, name, "eval", self.flags, True))
        else:
            self.evaluate(compile(tree, name, "exec", self.flags, True))
        if value is not None and not code.rstrip().endswith(";"):
            self.result(value)

    def parse(self, code, name):
        if "__future__" in code:
            # A `__future__` import in a cell also applies to later cells.
            tree = compile(code, name, "exec", self.flags | _ast.PyCF_ONLY_AST, True)
            import __future__

            futures = (getattr(__future__, feature).compiler_flag for feature in __future__.all_feature_names)
            wanted = compile(code, name, "exec", self.flags, True).co_flags
            self.flags |= sum(flag for flag in set(futures) if wanted & flag == flag)
            return tree
        try:
            return compile(code, name, "exec", self.flags | _ast.PyCF_ONLY_AST, True)
        except SyntaxError:
            plain = without_shell_lines(code)
            if plain == code:
                raise
            return compile(plain, name, "exec", self.flags | _ast.PyCF_ONLY_AST, True)

    def evaluate(self, code):
        if code.co_flags & 0x80:  # CO_COROUTINE: the cell uses await.
            return self.wait_for(eval(code, self.names))
        return eval(code, self.names)

    def wait_for(self, coroutine):
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:
            if task.done():
                raise
            task.cancel()
            try:
                return self.loop.run_until_complete(task)
            except asyncio.CancelledError as cancelled:
                # The place where the task waited says more than the place where the loop was.
                raise KeyboardInterrupt().with_traceback(cancelled.__traceback__) from None

    def result(self, value):
        names = self.names
        names["___"], names["__"], names["_"] = names.get("__"), names.get("_"), value
        forms = bundle(value)
        figure = figure_of(value)
        if figure is not None:
            forms["image/png"] = png(figure)
            sys.modules["matplotlib.pyplot"].close(figure)
        self.tell("result", bundle_json(forms))

    def show_figures(self):
        """Displays and closes the open figures; `plt.show` calls this too."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or not hasattr(pyplot, "get_fignums"):
            return
        try:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                if figure.axes or figure.lines or figure.texts:
                    forms = {"image/png": png(figure), "text/plain": text_of(figure)}
                    self.tell("display", bundle_json(forms))
        finally:
            pyplot.close("all")

    # Failures.

    def remember(self, name, code):
        self.cells[name] = code
        if len(self.cells) > MOST_CELLS:
            del self.cells[next(iter(self.cells))]
        # A cell that is going to print a traceback needs the lines of cells in it.
        if "linecache" in sys.modules or "traceback" in code or "inspect" in code:
            self.teach_lines()

    def teach_lines(self):
        import linecache

        for name, code in self.cells.items():
            if name not in linecache.cache:
                linecache.cache[name] = len(code), None, code.splitlines(True), name

    def fail(self, error):
        try:
            name, value, lines = self.described(error)
        except BaseException as another:
            name, value = type(error).__name__, "formatting the error failed with " + type(another).__name__
            lines = [name]
        lines = ",".join(text_json(line) for line in lines)
        failure = '{"ename":%s,"evalue":%s,"traceback":[%s]}' % (text_json(name), text_json(value), lines)
        self.tell("error", failure)

    def described(self, error):
        self.teach_lines()
        import traceback

        trace = self.visible(error.__traceback__)
        value = cut(str(error), LONGEST_TEXT)
        lines = traceback.format_exception(type(error), error, trace)
        lines = [line for block in lines for line in block.splitlines()]
        if len(lines) > 400:
            lines = lines[:200] + ["[%d lines omitted]" % (len(lines) - 400)] + lines[-200:]
        return type(error).__name__, value, [cut(line, 10000) for line in lines]


    def visible(self, trace):
        """Returns the part of a trace that belongs to the cell, without the frames of this kernel."""
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename not in self.cells:
            first = first.tb_next
        node = first
        while node is not None:
            while node.tb_next is not None and node.tb_next.tb_frame.f_globals is globals():
                node.tb_next = node.tb_next.tb_next
            node = node.tb_next
        return first


class PyplotWatch:
    """Replaces `plt.show` when a cell imports pyplot, without importing it ourselves."""

    def __init__(self, kernel):
        self.kernel = kernel

    def find_spec(self, name, path=None, target=None):
        if name != "matplotlib.pyplot":
            return None
        sys.meta_path.remove(self)
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            load = spec.loader.exec_module

            def show(*_arguments, **_options):
                self.kernel.show_figures()

            def exec_module(module):
                load(module)
                module.show = show

            spec.loader.exec_module = exec_module
        return spec


def refuse_input(_prompt=""):
    raise StdinNotImplementedError("input() is not supported: this kernel has no standard input")


def without_shell_lines(code):
    """Converts notebook syntax to python: `!command`, `%pip …` and `%matplotlib …`."""
    lines = code.split("\n")
    for number, line in enumerate(lines):
        word = line.lstrip()
        indent = line[: len(line) - len(word)]
        if word.startswith("%matplotlib"):
            lines[number] = indent + "pass"
            continue
        command = word[1:] if word.startswith("!") else None
        if word.startswith("%pip "):
            command = "'%s' -m %s" % (sys.executable, word[1:])
        if command is not None:
            lines[number] = "%s_exit_code = __import__('subprocess').call(%r, shell=True)" % (indent, command)
    return "\n".join(lines)


def leave_child():
    """Ends a child that a cell has forked when it reaches the end of the cell."""
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    flush()
    os._exit(error is not None and getattr(error, "code", 1) not in (None, 0))


def flush():
    for stream in sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__:
        try:
            stream.flush()
        except Exception:
            pass  # A cell may replace these streams by anything, and close them.


def fresh_streams():
    """Makes streams line-buffered UTF-8, whatever the locale, and reopens those that a cell has closed."""
    for number, name in (1, "stdout"), (2, "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is None or stream.closed:
                stream = open(number, "w", 1, "utf-8", "backslashreplace", closefd=False)
                setattr(sys, name, stream)
                setattr(sys, "__" + name + "__", stream)
            elif getattr(stream, "errors", None) in ("strict", "surrogateescape"):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        except Exception:
            pass  # A cell has replaced the stream by another object.


def code_of(body):
    """Returns the code in `{"code":"…"}`, the form that the agent writes, without the slow import of `json`."""
    if body.startswith('{"code":"'):
        return _json.scanstring(body, 9, False)[0]
    import json

    return json.loads(body)["code"]


def text_json(text):
    return _json.encode_basestring(text)


def cut(text, most):
    return text if len(text) <= most else text[:most] + " … [%d characters]" % len(text)


def bundle_json(forms):
    """Returns the forms as JSON, without those that are too large for a report."""
    room = MOST
    kept = []
    left_out = []
    for mime in sorted(forms, key=lambda mime: len(forms[mime])):
        form = text_json(forms[mime])
        size = len(form.encode("utf-8", "replace")) + len(mime) + 16
        if size <= room:
            room -= size
            kept.append("%s:%s" % (text_json(mime), form))
        else:
            left_out.append("%s of %d characters" % (mime, len(forms[mime])))
    if left_out and "text/plain" not in forms:
        kept.append('"text/plain":%s' % text_json("[too large to display: %s]" % ", ".join(left_out)))
    return "{%s}" % ",".join(kept)


def bundle(value):
    """Returns the forms of a value, by mime type."""
    forms = {"text/plain": text_of(value)}
    if isinstance(value, type):
        return forms
    for mime, method in REPRS.items():
        form = asked(value, method)
        if form is not None:
            forms[mime] = encoded(mime, form)
    mimes = asked(value, "_repr_mimebundle_", include=None, exclude=None)
    if isinstance(mimes, dict):
        forms.update((str(mime), encoded(mime, form)) for mime, form in mimes.items() if form is not None)
    return {mime: form for mime, form in forms.items() if form is not None}


def asked(value, method, **arguments):
    """Returns a value's own representation, or None if it has none or pretends to have every method."""
    try:
        if hasattr(value, "_ipython_canary_method_should_not_exist_"):
            return None
        ask = getattr(value, method, None)
        answer = ask(**arguments) if callable(ask) else None
    except Exception:
        return None
    return answer[0] if isinstance(answer, tuple) and len(answer) == 2 else answer


def encoded(mime, form):
    """Returns a form as text: bytes in base64, structures as JSON."""
    if isinstance(form, str):
        return form
    if isinstance(form, (bytes, bytearray, memoryview)):
        import binascii

        return binascii.b2a_base64(form, newline=False).decode()
    import json

    try:
        return json.dumps(form, default=str)
    except Exception:
        return text_of(form)


def text_of(value):
    try:
        return cut(shown(value), LONGEST_TEXT)
    except Exception as error:
        return "<%s object, whose repr() raised %s: %s>" % (type(value).__name__, type(error).__name__, error)


def shown(value):
    """Like `repr`, but only the beginning of an enormous value."""
    kind = type(value)
    if kind in (str, bytes, bytearray) and len(value) > LONGEST_TEXT:
        return repr(value[:LONGEST_TEXT]) + " … [%d in all]" % len(value)
    if kind not in (list, tuple, set, frozenset, dict) or len(value) <= MOST_ITEMS:
        return repr(value)
    first = [item for _, item in zip(range(MOST_ITEMS), value.items() if kind is dict else value)]
    items = ("%s: %s" % (shown(item[0]), shown(item[1])) if kind is dict else shown(item) for item in first)
    text = ", ".join(items) + ", … [%d in all]" % len(value)
    begin, end = {list: "[]", tuple: "()", frozenset: ("frozenset({", "})")}.get(kind, "{}")
    return begin + text + end


def figure_of(value):
    figures = sys.modules.get("matplotlib.figure")
    pyplot = sys.modules.get("matplotlib.pyplot")
    return value if figures and pyplot and isinstance(value, figures.Figure) else None


def png(figure):
    import io

    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    return encoded("image/png", picture.getvalue())


Kernel().serve()
