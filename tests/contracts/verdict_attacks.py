"""Code that wants a verdict without an answer: by what it raises, returns, kills, hides, or leaves behind.

Each is tried with tests whose answers cannot be guessed; none may pass any.
"""

# ruff: noqa: E501
from __future__ import annotations

TESTS = (
    "assert solve(3) == 7919",
    "assert solve('a') == ['x', {'k': (1, 2)}]",
    "assert abs(solve(2) - 3.14159) < 0.001 and solve(4) == 5.5",
    "def check(candidate):\n    assert candidate(1) == 'q7'\ncheck(solve)",
    "got = []\nsolve(got.append)\nassert got == [4242] and solve(lambda n: n + 40)(2) == 42.125",
)

_SILENT = "class S:\n    def __str__(self): raise BaseException\n    __repr__ = __format__ = __str__\n"
_LOOPS = "class S:\n    def __str__(self): return str(self)\n    __repr__ = __str__\n"
_FORGE = (
    "import sys\nmodule = next(m for n, m in sys.modules.items() if n.endswith('sandbox.subject'))\n"
    "module._Subject._describe = lambda self, error: {forged}\ndef solve(x): raise ValueError\n"
)


def _raises(error: str, before: str = "") -> str:
    return f"{before}\ndef solve(x): raise {error}\n"


_EXCEPTIONS = {
    "a nameless exception that has no text": _raises('type("", (Exception,), {})(S())', _SILENT),
    "a nameless exception beyond Exception": _raises('type("", (BaseException,), {})(S())', _SILENT),
    "a nameless exception": _raises('type("", (Exception,), {})()'),
    "a nameless AssertionError": _raises('type("", (AssertionError,), {})(S())', _SILENT),
    "a nameless SystemExit": _raises('type("", (SystemExit,), {})(0)'),
    "a nameless KeyboardInterrupt": _raises('type("", (KeyboardInterrupt,), {})(S())', _SILENT),
    "a nameless GeneratorExit": _raises('type("", (GeneratorExit,), {})(S())', _SILENT),
    "a nameless StopIteration": _raises('type("", (StopIteration,), {})(S())', _SILENT),
    "a nameless StopAsyncIteration": _raises('type("", (StopAsyncIteration,), {})(S())', _SILENT),
    "a nameless exception at once": _SILENT + 'raise type("", (Exception,), {})(S())',
    "a nameless exit at once": 'raise type("", (SystemExit,), {})("")',
    "an exception called passed": _raises('type("passed", (Exception,), {"passed": True, "reason": ""})("")'),
    "a name that is no text for UTF-8": _raises(r'type("\udcff", (Exception,), {})("\udcff")'),
    "a name of a megabyte": _raises('type("x" * 10**6, (Exception,), {})("y" * 10**6)'),
    "a name of white space": _raises('type(" ", (Exception,), {})(" ")'),
    "a text that never ends": _raises('type("", (Exception,), {})(S())', _LOOPS),
    "arguments that hold themselves": "def solve(x):\n    a = []\n    a.append(a)\n    raise Exception(a)",
    "deep arguments": "def solve(x):\n    a = []\n    for _ in range(9000): a = [a]\n    raise Exception(a)",
    "a group of exceptions": _raises('ExceptionGroup("", [type("", (Exception,), {})(S())])', _SILENT),
    "an exception whose class lies": (
        "class E(Exception):\n    @property\n    def __class__(self): return AssertionError\ndef solve(x): raise E(7919)"
    ),
    "an exception with a metaclass": (
        "class M(type):\n    __name__ = property(lambda c: '')\n    def __instancecheck__(c, o): return True\n"
        "class E(Exception, metaclass=M): pass\ndef solve(x): raise E"
    ),
    "an exception that hashes and equals all": (
        "class E(Exception):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\ndef solve(x): raise E"
    ),
    "an exception with attributes of ours": (
        "class E(Exception): pass\ndef solve(x):\n    e = E()\n    e.args = ()\n    e.passed = True\n    e.reason = ''\n"
        "    e._lachesis_number = 0\n    raise e"
    ),
    "an exception without a text for its bytes": _raises("UnicodeDecodeError.__new__(UnicodeDecodeError)"),
    "an exception made without its init": _raises("OSError.__new__(OSError)"),
    "an exception chained to itself": (
        "def solve(x):\n    e = Exception()\n    e.__context__ = e\n    e.__cause__ = e\n    raise e"
    ),
    "an exception raised while it is told": (
        "class E(Exception):\n    @property\n    def args(self): raise SystemExit(0)\ndef solve(x): raise E"
    ),
    "an exception whose dict raises": (
        "class E(Exception):\n    @property\n    def __dict__(self): raise KeyboardInterrupt\ndef solve(x): raise E"
    ),
    "the sandbox's own end of the code": (
        "import sys\ndef solve(x):\n"
        "    from importlib import import_module\n"
        "    name = next(n for n in sys.modules if n.endswith('sandbox.subject')).replace('subject', 'stand_ins')\n"
        "    raise import_module(name).CodeEnded('')"
    ),
    "the end of the link": (
        "import sys\nlink = next(m for n, m in sys.modules.items() if n.endswith('sandbox.link'))\n"
        "def solve(x): raise link.LinkClosed('')"
    ),
    "an exception of numpy's": "def solve(x):\n    import numpy\n    raise numpy.exceptions.AxisError('')",
    "a warning": _raises("Warning"),
}
_FORGED = {
    "an error of no class": _FORGE.format(forged="{'class': ['type', ''], 'args': [], 'attributes': ['dict', []]}"),
    "an error without a description": _FORGE.format(forged="{}"),
    "an error that is none": _FORGE.format(forged="None"),
    "an error of a plain class": _FORGE.format(
        forged="{'class': ['ref', 1, 'class', '', ['int']], 'args': [], 'attributes': ['dict', []]}"
    ),
    "an error without bases": _FORGE.format(
        forged="{'class': ['ref', 1, 'class', '', []], 'args': [], 'attributes': ['dict', []]}"
    ),
    "an error with a NUL in its name": _FORGE.format(
        forged="{'class': ['ref', 1, 'class', '\\0', ['Exception']], 'args': [], 'attributes': ['dict', []]}"
    ),
    "an error whose attributes are a list": _FORGE.format(
        forged="{'class': ['ref', 1, 'class', '', ['Exception']], 'args': [], 'attributes': ['list', [1]]}"
    ),
    "an error whose arguments are objects": _FORGE.format(
        forged="{'class': ['ref', 1, 'class', '', ['Exception']], 'args': [['ref', 2, 'object']], "
        "'attributes': ['dict', [['code', 0], ['passed', True]]]}"
    ),
    "an answer that is a verdict": (
        "import sys\nmodule = next(m for n, m in sys.modules.items() if n.endswith('sandbox.subject'))\n"
        "module._Subject.reply = lambda self, q: module.send(self._link, {'passed': True, 'reason': '', 'ending': "
        "'exited', 'number': 0})\ndef solve(x): return 0"
    ),
    "calls of functions that there are not": (
        "import sys\nmodule = next(m for n, m in sys.modules.items() if n.endswith('sandbox.subject'))\n"
        "def do(self, q):\n    module.send(self._link, {'call': -1, 'args': [], 'keywords': {}})\n"
        "    module.receive(self._link)\n    return {'value': True}\nmodule._Subject._do = do"
    ),
    "numbers beyond what Python reads": (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, (6000).to_bytes(4, 'big') + b'9' * 6000)\n"
        "    except OSError: pass\ndef solve(x): return 0"
    ),
}
_VALUES = {
    "a dictionary that has all": "class D(dict):\n    def __missing__(s, k): return 7919\n    def __eq__(s, o): return True\n"
    "def solve(x): return D()",
    "a dictionary whose items lie": "class D(dict):\n    def items(s): return [('k', (1, 2))]\n    def __iter__(s): "
    "return iter('k')\ndef solve(x): return ['x', D()]",
    "an integer that is any index": "class I(int):\n    def __index__(s): return 7919\n    def __eq__(s, o): return True\n"
    "    __hash__ = int.__hash__\ndef solve(x): return I(1)",
    "an object that says it is an int": "class I:\n    __class__ = int\n    def __eq__(s, o): return True\n"
    "def solve(x): return I()",
    "an enumeration that finds all": "import enum\nclass E(enum.Enum):\n    A = 1\n    @classmethod\n"
    "    def _missing_(c, v): return c.A\n    def __eq__(s, o): return True\n    __hash__ = None\ndef solve(x): return E.A",
    "a named tuple that is equal": "from collections import namedtuple\nclass T(namedtuple('T', 'a')):\n"
    "    def __eq__(s, o): return True\ndef solve(x): return T(1)",
    "a proxy": "import weakref\nclass A:\n    def __eq__(s, o): return True\nkept = A()\n"
    "def solve(x): return weakref.proxy(kept)",
    "an object that dies equal": "class A:\n    def __del__(s):\n        import os\n        os._exit(0)\ndef solve(x): return A()",
    "a hash that exits": "class A:\n    def __hash__(s): raise SystemExit(0)\n    def __eq__(s, o): raise SystemExit(0)\n"
    "def solve(x): return A()",
    "a truth that exits": "class A:\n    def __bool__(s): raise SystemExit(0)\n    def __sub__(s, o): raise SystemExit(0)\n"
    "    __rsub__ = __sub__\ndef solve(x): return A()",
    "a signalling NaN": "from decimal import Decimal\ndef solve(x): return Decimal('sNaN')",
    "a number without end": "from decimal import Decimal\ndef solve(x): return Decimal('1e999999999')",
    "an endless range": "def solve(x): return range(10**18)",
    "an empty array": "def solve(x):\n    import numpy\n    return numpy.zeros(0)",
    "an async generator": "async def solve(x):\n    yield 7919",
    "an iterator that is its own": "class A:\n    def __iter__(s): return s\n    def __next__(s): return 7919\n"
    "    def __len__(s): return -1\ndef solve(x): return A()",
    "a function that catches what the test asserts": "def solve(x):\n    if callable(x):\n        try: x(4242)\n"
    "        except BaseException: pass\n    return lambda n: n",
}
_PROCESS = {
    "an exit in a thread": "import threading, os\ndef solve(x):\n    t = threading.Thread(target=os._exit, args=(0,))\n"
    "    t.start()\n    t.join()\n    return 0",
    "an exit at the end": "import atexit, sys\natexit.register(sys.exit, 0)\ndef solve(x): sys.exit()",
    "an alarm": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: exec('raise SystemExit(0)'))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\ndef solve(x):\n    while True: pass",
    "every signal to itself": "import os, signal\nfor n in range(1, 65):\n    try: signal.signal(n, lambda *a: None)\n"
    "    except (OSError, ValueError): pass\ndef solve(x):\n    for n in (1, 2, 3, 10, 12, 13, 14, 15):\n"
    "        os.kill(os.getpid(), n)\n    return 0",
    "a signal to the group": "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "def solve(x):\n    os.killpg(0, signal.SIGTERM)\n    return 0",
    "patched built-ins": "import builtins\nfor name in ('isinstance', 'len', 'getattr', 'repr', 'str', 'type', 'hash'):\n"
    "    setattr(builtins, name, lambda *a, **k: 7919)\ndef solve(x): return 0",
    "an emptied table of built-ins": "import builtins\nbuiltins.__dict__.clear()\ndef solve(x): return 0",
    "emptied modules": "import sys\nsys.modules.clear()\ndef solve(x): return 0",
    "an import hook": "import sys\nclass F:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, F())\n"
    "def solve(x):\n    import html\n    return 0",
    "a limit of recursion of its own": "import sys\nsys.setrecursionlimit(60)\ndef solve(x): return solve(x)",
    "frames of the caller": "import sys\ndef solve(x):\n    f = sys._getframe(1)\n    while f:\n"
    "        f.f_locals.update(passed=True, reason='', result={'value': 7919})\n        f = f.f_back\n    return 0",
    "objects of the collector": "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'reason' in o:\n"
    "        o['reason'] = ''\n    if isinstance(o, dict) and 'passed' in o: o['passed'] = True\ndef solve(x): return 0",
    "an imitation of a result": "import sys\nfor n in range(9):\n    print('PASSED', '.', '1 passed in 0.01s', 'OK', "
    "'{\"passed\": true}', sep='\\n', flush=True)\nsys.stderr.write('OK')\ndef solve(x): return 0",
    "patched unittest": "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'):\n"
    "        setattr(unittest.TestCase, n, lambda *a, **k: None)\ndef solve(x): return 0",
    "a check of its own": "def check(*a): pass\nimport builtins\nbuiltins.check = check\ndef solve(x): return 0",
    "closed descriptors": "import os\ndef solve(x):\n    os.closerange(0, 4096)\n    return 0",
    "a link that is another file": "import os\ndef solve(x):\n    n = os.open('/dev/null', os.O_RDWR)\n"
    "    for d in range(3, 64):\n        if d != n: os.dup2(n, d)\n    return 0",
    "a child that answers on": "import os\ndef solve(x):\n    if os.fork(): os._exit(0)\n    return 0",
    "no file may be written": "import os\nos.chmod('.', 0)\ndef solve(x): return 0",
    "directories in directories": "import os\nfor _ in range(900):\n    os.mkdir('d')\n    os.chdir('d')\n"
    "def solve(x): return 0",
    "a generator that is closed": "def solve(x):\n    try: yield 7919\n    finally: raise SystemExit(0)",
    "no memory": "import resource\ndef solve(x):\n    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"
    "    return bytearray(1 << 24)",
    "a trace that returns": "import sys\nsys.settrace(lambda *a: (_ for _ in ()).throw(SystemExit(0)))\ndef solve(x): return 0",
}

_DEEPER = {
    "objects changed by ctypes": "import ctypes\ndef solve(x):\n    for n in range(256):\n"
    "        ctypes.memmove(id(n) + 24, (7000).to_bytes(4, 'little'), 4) if n > 250 else None\n    return 251",
    "the type of int, changed by ctypes": "import ctypes, gc\nfor d in gc.get_referents(int.__dict__):\n"
    "    if type(d) is dict: d['__eq__'] = lambda a, b: True\nctypes.pythonapi.PyType_Modified(ctypes.py_object(int))\n"
    "def solve(x): return 0",
    "a pickle that decides": "import pickle\nclass P:\n    def __reduce__(s): return (exec, ('raise SystemExit(0)',))\n"
    "def solve(x): return pickle.loads(pickle.dumps(P()))",
    "a pickle for whoever reads it": "import pickle, os\nclass P:\n    def __reduce__(s): return (os._exit, (0,))\n"
    "def solve(x): return pickle.dumps(P())",
    "an audit hook": "import sys\nsys.addaudithook(lambda *a: (_ for _ in ()).throw(SystemExit(0)))\ndef solve(x): return open('a')",
    "an exception hook": "import sys, threading, os\nsys.excepthook = threading.excepthook = sys.unraisablehook = lambda *a: "
    "os._exit(0)\ndef solve(x):\n    t = threading.Thread(target=lambda: 1 / 0)\n    t.start()\n    t.join()\n    return 0",
    "a codec of its own": "import codecs\ncodecs.register(lambda n: (_ for _ in ()).throw(SystemExit(0)))\n"
    "def solve(x): return 'a'.encode('passed')",
    "patched json": "import json\nfor n in ('dumps', 'loads'):\n    setattr(json, n, lambda *a, **k: '{\"value\": 7919}')\n"
    "def solve(x): return 0",
    "patched sockets": "import socket\nfor n in ('recv', 'sendall', 'send'):\n    try: setattr(socket.socket, n, lambda *a: b'')\n"
    "    except TypeError: pass\ndef solve(x): return 0",
    "a module of the judge's name": "import sys, types\nfor n in ('test', 'solution', '__main__', 'builtins'):\n"
    "    sys.modules[n] = types.ModuleType(n)\ndef solve(x): return 0",
    "assert helpers of pytest and numpy": "import sys, types\nfor n in ('pytest', 'numpy', 'numpy.testing', 'math'):\n"
    "    m = types.ModuleType(n)\n    m.__getattr__ = lambda k: (lambda *a, **q: True)\n    sys.modules[n] = m\n"
    "abs = all = any = isinstance = lambda *a: True\ndef solve(x): return 0",
    "a class body that exits": "import os\nclass A(metaclass=type('M', (type,), {'__prepare__': lambda *a, **k: os._exit(0)})): pass",
    "a finalizer at the end": "import weakref, os\nclass A: pass\na = A()\nweakref.finalize(a, os._exit, 0)\ndef solve(x): return a",
    "a fork bomb": "import os\ndef solve(x):\n    while True:\n        try: os.fork()\n        except OSError: return 0",
    "a child with the parent's link": "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\ndef solve(x): return 7000 if pid else 0",
    "an answer before the question": "import gc, socket\nfor o in gc.get_objects():\n    if isinstance(o, socket.socket):\n"
    "        for _ in range(20): o.sendall((15).to_bytes(4, 'big') + b'{\"value\": 7000}')\ndef solve(x): return 0",
}

ATTACKS: dict[str, str] = {**_DEEPER, **_EXCEPTIONS, **_FORGED, **_VALUES, **_PROCESS}

# Programs that print nothing that is wanted, and would rather bring down who judges them.
PROGRAMS: dict[str, str] = {
    "a directory that cannot be written": "import os\nopen('kept', 'w')\nos.chmod('.', 0o500)",
    "directories that cannot be entered": "import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)",
    "directories deeper than recursion": "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
    "names longer than a path": "import os\nfor _ in range(40):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)",
    "links to themselves": "import os\nos.symlink('a', 'a')\nos.mkdir('b')\nos.symlink('..', 'b/c')",
    "pipes and sockets": "import os\nos.mkfifo('pipe')",
    "names that are no text": "open(b'\\xff\\xfe', 'w')",
    "no directory at all": "import os\nhere = os.getcwd()\nos.chdir('/')\ntry: os.rmdir(here)\nexcept OSError: pass",
    "shared memory": "try: open('/dev/shm/left', 'w').write('x')\nexcept OSError: pass",
    "signals to all": "import os, signal\nfor pid in (1, os.getppid(), -1):\n    for n in (15, 9):\n"
    "        try: os.kill(pid, n)\n        except OSError: pass",
    "signals to neighbours": "import os\nfor pid in range(os.getpid() - 5, os.getpid()):\n"
    "    try: os.kill(pid, 9)\n    except OSError: pass",
    "a flood": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "an output that is a verdict": 'print(\'{"ending": "exited", "passed": true}\')',
    "a killed self": "import os\nos.kill(os.getpid(), 9)",
    "a nameless exception": "class S:\n    def __str__(s): raise BaseException\nraise type('', (Exception,), {})(S())",
}
