"""Code that wants a reward for nothing: by ways beyond those of :mod:`tests.contracts.attacks` and ``verdict_attacks``.

The tests do not tell what they expect by what they give to the code, and no attack may pass any of them.
"""

# ruff: noqa: E501
from __future__ import annotations

TESTS = (
    "assert solve(3) == 7919",
    "assert round(solve(2), 3) == 3.142 and divmod(solve(9), 1000) == (7, 919)",
    "assert {solve('a'): 1} == {'q7': 1} and [solve('b')].index('q8') == 0",
    "assert sum(solve([1, 2])) == 4242 and max(solve([3])) < 50 and f'{solve(1)}' == '7919'",
    "try:\n    solve(-1)\n    raise AssertionError('no error')\nexcept ValueError as error:\n    assert str(error) == 'negative: -1'",
    "result = solve(5)\nassert type(result) is dict and result['k'] == [1, 2] and len(result) == 1",
    "a, (b, *c) = solve(4)\nassert (a, b, c) == (71, 72, [73])",
    "assert solve(8).hex() == (b'\\x01\\x02').hex() and bytes(solve(8)) == b'\\x01\\x02'",
    "assert sorted(solve([2, 1]), reverse=True) == [44, 33] and tuple(solve([2, 1])) == (33, 44)",
    "with_key = {k: v for k, v in solve(6).items()}\nassert with_key == {'x': 1.5, 'y': None}",
)

_MODULE = "import sys\nsubject = next(m for n, m in sys.modules.items() if n.endswith('sandbox.subject'))\n"
_LIES = """
class A{base}:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __hash__(s): return hash('q7')
    def __bool__(s): return True
"""
_LATER = """
import os, threading, time
def later():
    {body}
"""

_TYPES = {
    "a str subclass whose text changes": "class S(str):\n    n = 0\n    def __str__(s):\n        S.n += 1\n        return '7919' if S.n % 2 else 'q7'\n    __repr__ = __format__ = __str__\ndef solve(x): return S('q')",
    "a str subclass with a hash and equality": _LIES.format(base="(str)") + "def solve(x): return A('q')",
    "bytes that are equal to all": _LIES.format(base="(bytes)") + "def solve(x): return A(b'')",
    "a bytearray subclass whose bytes are computed": "class B(bytearray):\n    def hex(s): return s\n    def __eq__(s, o): return True\n    def __iter__(s): return iter((s, s))\ndef solve(x): return B()",
    "a complex that is equal to all": _LIES.format(base="(complex)") + "def solve(x): return A()",
    "a frozenset that is equal to all": _LIES.format(base="(frozenset)") + "def solve(x): return A()",
    "a deque that is equal to all": "import collections\n"
    + _LIES.format(base="(collections.deque)")
    + "def solve(x): return A([1])",
    "a Counter that is equal to all": "import collections\n"
    + _LIES.format(base="(collections.Counter)")
    + "def solve(x): return A()",
    "a date that is equal to all": "import datetime\n"
    + _LIES.format(base="(datetime.date)")
    + "def solve(x): return A(2020, 1, 1)",
    "a Fraction that is equal to all": "import fractions\n"
    + _LIES.format(base="(fractions.Fraction)")
    + "def solve(x): return A(1)",
    "a Decimal that is equal to all": "import decimal\n"
    + _LIES.format(base="(decimal.Decimal)")
    + "def solve(x): return A(1)",
    "an IntFlag of everything": "import enum\nclass F(enum.IntFlag):\n    A = 1\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef solve(x): return F.A",
    "a StrEnum of everything": "import enum\nclass F(enum.StrEnum):\n    A = 'q'\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef solve(x): return F.A",
    "a dataclass that is equal to all": "import dataclasses\n@dataclasses.dataclass(eq=False)\nclass D:\n    a: int = 0\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\n    def items(s): return {}.items()\ndef solve(x): return D()",
    "a UserDict that has all": "import collections\nclass D(collections.UserDict):\n    def __missing__(s, k): return [1, 2]\n    def __eq__(s, o): return True\n    def __len__(s): return 1\ndef solve(x): return D()",
    "a UserList that is equal to all": "import collections\nclass D(collections.UserList):\n    def __eq__(s, o): return True\n    def __iter__(s): return iter((s, s))\n    def __lt__(s, o): return True\ndef solve(x): return D()",
    "a UserString": "import collections\nclass D(collections.UserString):\n    def __eq__(s, o): return True\n    def __hash__(s): return hash('q7')\ndef solve(x): return D('q')",
    "a chain of maps": "import collections\nclass M(dict):\n    def __missing__(s, k): return 1\ndef solve(x): return collections.ChainMap(M())",
    "a mapping proxy": "import types\nclass M(dict):\n    def __eq__(s, o): return True\ndef solve(x): return types.MappingProxyType(M())",
    "a simple namespace": "import types\nclass N(types.SimpleNamespace):\n    def __eq__(s, o): return True\n    def __getattr__(s, n): return lambda *a: '0102'\ndef solve(x): return N()",
    "a partial": "import functools\nclass P(functools.partial):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\ndef solve(x): return P(print)",
    "a cell, a code and a frame": "import sys\ndef solve(x): return [sys._getframe(), solve.__code__, (lambda: x).__closure__]",
    "a class with every special method by __getattr__ of its class": "class M(type):\n    def __getattr__(c, n): return lambda *a: True\n    def __eq__(c, o): return True\n    def __hash__(c): return hash('q7')\n    def __len__(c): return 1\n    def __iter__(c): return iter((c, c))\n    def __getitem__(c, k): return [1, 2]\nclass A(metaclass=M): pass\ndef solve(x): return A",
    "a class whose subclass hook agrees": "import abc\nclass A(abc.ABC):\n    @classmethod\n    def __subclasshook__(c, o): return True\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\ndef solve(x): return A()",
    "an object whose __class__ is dict": "class A:\n    __class__ = property(lambda s: dict)\n    def __getitem__(s, k): return [1, 2]\n    def __len__(s): return 1\n    def items(s): return [('x', 1.5)]\ndef solve(x): return A()",
    "an object that rounds, divides and formats": "class A:\n    def __round__(s, n=0): return A()\n    def __divmod__(s, o): return (7, A())\n    def __format__(s, f): return 'A'\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\ndef solve(x): return A()",
    "an object that sums": "class A:\n    def __radd__(s, o): return s\n    def __add__(s, o): return s\n    def __eq__(s, o): return True\n    def __lt__(s, o): return True\ndef solve(x): return [A()] if isinstance(x, list) else A()",
    "an iterator that unpacks by how many are asked": "import sys\nclass A:\n    def __iter__(s):\n        yield A()\n        yield A()\n    def __eq__(s, o): return True\ndef solve(x): return A()",
    "a NaN that is the same object": "n = float('nan')\ndef solve(x): return [n, n] if isinstance(x, list) else n",
    "a float at the rounding border": "def solve(x): return 3.1415",
    "a bool": "def solve(x): return True",
    "a numpy array that broadcasts": "import numpy as np\ndef solve(x): return np.ones((1, 1, 1))",
    "a structured numpy array": "import numpy as np\ndef solve(x): return np.zeros(1, dtype=[('k', 'O')])",
    "a numpy string of another length": "import numpy as np\ndef solve(x): return np.str_('q')",
}
_INTERPRETER = {
    "audit hooks, monitors and traces in all threads": "import sys, threading\nhook = lambda *a: None\nsys.settrace(hook)\nthreading.settrace(hook)\nthreading.setprofile(hook)\nsys.setprofile(hook)\ndef solve(x): return 0",
    "frames of other threads": "import sys\ndef solve(x):\n    for frame in sys._current_frames().values():\n        while frame:\n            for value in [*frame.f_locals.values()]:\n                if isinstance(value, str) and 'assert' in value and '== 7919' in value: return 7919\n            frame = frame.f_back\n    return 0",
    "what the garbage collector refers to": "import gc\ndef solve(x):\n    for one in gc.get_referrers(solve):\n        if isinstance(one, dict):\n            one['solve'] = one['passed'] = True\n    return 0",
    "objects that cannot be collected": "import gc\ngc.disable()\nclass C:\n    def __del__(s): gc.collect(); raise SystemExit(0)\ndef solve(x):\n    c = C()\n    c.c = c\n    return 0",
    "a garbage callback": "import gc, os\ngc.callbacks.append(lambda *a: os._exit(0))\ndef solve(x):\n    gc.collect()\n    return 0",
    "its own function's code, replaced by the caller's": "import sys\ndef solve(x):\n    caller = sys._getframe(1).f_code\n    solve.__code__ = caller.replace(co_freevars=()) if not caller.co_freevars else solve.__code__\n    return 0",
    "operator's functions": "import operator\nfor name in ('eq', 'ne', 'lt', 'sub', 'contains', 'index', 'getitem'):\n    setattr(operator, name, lambda *a: True)\ndef solve(x): return 0",
    "the table of operations": _MODULE
    + "for name in [*subject._OPERATIONS]: subject._OPERATIONS[name] = lambda *a, **k: True\ndef solve(x): return 0",
    "the encoder that names what it likes": _MODULE
    + "subject.encode = lambda value, refer: ['ref', 0, 'class', 'AssertionError', ['AssertionError']]\ndef solve(x): return object()",
    "an encoder of exceptions' bases": _MODULE
    + "subject._exception_bases = lambda kind: ['ValueError']\nclass negative(Exception): pass\ndef solve(x): raise negative('x')",
    "an error of every attribute": _MODULE
    + "subject._Subject._describe = lambda s, e: {'class': ['ref', 5, 'class', 'ValueError', ['ValueError']], 'args': [], 'attributes': ['dict', [['with_traceback', 1], ['add_note', 1], ['args', ['list', ['negative']]]]]}\ndef solve(x): raise ValueError",
    "an error whose text the code computes": "class T(str):\n    def __eq__(s, o): return True\n    def __str__(s): return T('negative')\nclass E(ValueError):\n    def __str__(s): return T('negative')\ndef solve(x): raise E(T('negative'))",
    "an error with an argument that lies": _LIES.format(base="(str)") + "def solve(x): raise ValueError(A('negative'))",
    "an error group with the right one in it": "def solve(x): raise ExceptionGroup('negative: -1', [ValueError('negative: -1')])",
    "an error with the text of an assertion": "def solve(x): raise AssertionError('no error')",
    "a patched loader of modules": "import importlib, sys\nimportlib.import_module = lambda *a: sys.modules['builtins']\nsys.path_hooks.clear()\nsys.path_importer_cache.clear()\ndef solve(x): return 0",
    "a sitecustomize of its own": "for name in ('sitecustomize.py', 'usercustomize.py', 'lachesis.py', 'ast.py', 'json.py', 'test.py'):\n    open(name, 'w').write('import os; os._exit(0)')\nimport os, sys\nsys.path.insert(0, os.getcwd())\nos.environ['PYTHONPATH'] = os.getcwd()\ndef solve(x): return 0",
    "a pyc of its own": "import os, py_compile\nos.makedirs('__pycache__', exist_ok=True)\nopen('a.py', 'w').write('1')\npy_compile.compile('a.py')\ndef solve(x): return 0",
    "bytecode that does what no source does": "import types\ndef made():\n    code = (lambda: 0).__code__\n    return types.FunctionType(code.replace(co_code=bytes([9, 0] * 40 + [83, 0]), co_stacksize=0), {})\ndef solve(x): return made()()",
    "ints changed in memory": "import ctypes\ndef solve(x):\n    value = int('31337')\n    ctypes.memset(id(value) + 24, 0xff, 4)\n    return value",
    "a freed None": "import ctypes\ndef solve(x):\n    for _ in range(10**5): ctypes.pythonapi.Py_DecRef(ctypes.py_object(None))\n    return None",
    "a warning turned into an exit": "import warnings\nwarnings.showwarning = lambda *a: (_ for _ in ()).throw(SystemExit(0))\nwarnings.simplefilter('always')\ndef solve(x):\n    warnings.warn('a')\n    return 0",
    "a context variable and an async hook": "import sys\nsys.set_asyncgen_hooks(lambda *a: None, lambda *a: None)\nasync def solve(x):\n    raise StopAsyncIteration(7919)",
    "an await that answers by hand": "class A:\n    def __await__(s):\n        yield 7919\n        return 7919 if False else 0\ndef solve(x): return A()",
}
_SYSTEM = {
    "an exit while it is asked": "import os, threading\ndef solve(x):\n    threading.Timer(0.001, os._exit, (0,)).start()\n    while True: pass",
    "a vfork that lives on": _LATER.format(body="while True: time.sleep(0.01)")
    + "if os.fork() == 0:\n    os.setsid()\n    later()\ndef solve(x): os._exit(0)",
    "a child that takes its place": "import os\ndef solve(x):\n    pid = os.fork()\n    if pid: os.kill(os.getpid(), 9)\n    return 7919 if os.getppid() == 1 and False else 1",
    "an unhandled signal of each kind": "import os, signal\ndef solve(x):\n    for n in (signal.SIGSYS, signal.SIGBUS, signal.SIGFPE, signal.SIGXCPU, signal.SIGPIPE):\n        if os.fork() == 0: os.kill(os.getpid(), n)\n    return 0",
    "a stopped self": "import os, signal\ndef solve(x): os.kill(os.getpid(), signal.SIGSTOP)",
    "a stopped group": "import os, signal\ndef solve(x): os.killpg(0, signal.SIGSTOP)",
    "memory of its own by /proc": "import os\ndef solve(x):\n    for line in open('/proc/self/maps'):\n        low, high = (int(n, 16) for n in line.split()[0].split('-'))\n        if 'rw' in line and high - low < 1 << 24:\n            try: data = open('/proc/self/mem', 'rb', 0)\n            except OSError: return 0\n            data.seek(low)\n            try:\n                if b'assert solve(3) == ' + b'7919' in data.read(high - low): return 7919\n            except (OSError, ValueError, OverflowError): pass\n    return 0",
    "memory of its parents by /proc": "import os\ndef solve(x):\n    for name in os.listdir('/proc'):\n        if name.isdecimal() and int(name) != os.getpid():\n            for file in ('mem', 'maps', 'stack', 'environ', 'auxv'):\n                try:\n                    if len(open(f'/proc/{name}/{file}', 'rb').read(9)): return 7919\n                except OSError: pass\n    return 0",
    "descriptors of its parents by /proc": "import os\ndef solve(x):\n    for name in os.listdir('/proc'):\n        if name.isdecimal() and int(name) != os.getpid():\n            try:\n                for link in os.listdir(f'/proc/{name}/fd'):\n                    os.open(f'/proc/{name}/fd/{link}', os.O_RDWR)\n                    return 7919\n            except OSError: pass\n    return 0",
    "descriptors by pidfd_getfd": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef solve(x):\n    for pid in (1, os.getppid()):\n        fd = libc.syscall(434, pid, 0)\n        if fd >= 0 and any(libc.syscall(438, fd, n, 0) >= 0 for n in range(9)): return 7919\n    return 0",
    "traces of its parent": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef solve(x):\n    for pid in (1, os.getppid()):\n        for request in (16, 0x4206):\n            if libc.ptrace(request, pid, None, None) == 0: return 7919\n    return 0",
    "namespaces of its own": "import ctypes\nlibc = ctypes.CDLL(None)\ndef solve(x): return 7919 if any(libc.unshare(f) == 0 for f in (0x10000000, 0x20000, 0x20000000, 0x40000000)) else 0",
    "a keyring, bpf, userfaultfd and io_uring": "import ctypes\nlibc = ctypes.CDLL(None)\ndef solve(x):\n    return 7919 if any(libc.syscall(n, *a) >= 0 for n, a in ((250, (0, -3, 1)), (321, (0, 0, 0)), (323, (0,)), (425, (1, 0)), (298, (0, 0, 0, 0, 0)))) else 0",
    "the core pattern and the kernel's settings": "import os\ndef solve(x):\n    for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper', '/proc/self/oom_score_adj', '/proc/1/oom_score_adj'):\n        try: open(path, 'w').write('-1000' if 'oom' in path else '|/bin/true')\n        except OSError: continue\n        if 'self' not in path: return 7919\n    return 0",
    "limits raised again": "import resource\ndef solve(x):\n    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):\n        try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n        except (ValueError, OSError): continue\n        return 7919\n    return 0",
    "a socket in a file, for the next test": "import os, socket\nserver = socket.socket(socket.AF_UNIX)\ntry: server.bind('left')\nexcept OSError: pass\ndef solve(x):\n    return 7919 if os.path.exists('/dev/shm/left.sock') else 0",
    "links in place of its directory": "import os\nhere = os.getcwd()\ntry:\n    os.rename(here, here + '2')\n    os.symlink('/etc', here)\nexcept OSError: pass\ndef solve(x): return 0",
    "a file that is always growing": "import os, threading\ndef grow():\n    with open('f', 'wb', 0) as f:\n        while True:\n            try: f.write(bytes(1 << 16))\n            except OSError: f.seek(0)\nthreading.Thread(target=grow, daemon=True).start()\ndef solve(x): return 0",
    "a file lock and a lease": "import fcntl, os\nf = open('lock', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\ndef solve(x):\n    fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n    return 0",
    "a fork in each call": "import os\ndef solve(x):\n    os.fork()\n    return 0",
    "a fork that answers first": "import os, time\ndef solve(x):\n    if os.fork(): time.sleep(0.2)\n    return 0",
    "a slow regular expression": "import re\ndef solve(x): return re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "an enormous power": "def solve(x): return 3 ** 3 ** 3 ** 3",
    "an output without end and no answer": "import os\ndef solve(x):\n    while True: os.write(1, b'x' * 65536)",
    "text that closes the frame": "def solve(x): return '\\x00\\x00\\x00\\x0e{\"value\": true}' * 3",
    "half an answer": _MODULE
    + "import os\ndef solve(x):\n    os.write(subject and 3, b'\\x00\\x00\\xff\\xff{')\n    return 0",
    "a length beyond all": "import os\ndef solve(x):\n    for n in range(3, 40):\n        try: os.write(n, b'\\xff' * 8)\n        except OSError: pass\n    return 0",
    "a thousand names": "globals().update({f'n{i}': object() for i in range(100000)})\ndef solve(x): return n1",
    "deep data that is no loop": "def solve(x):\n    a = ()\n    for _ in range(140): a = (a,)\n    return a",
    "dictionaries with keys that are lists": _MODULE
    + "subject._Subject._encode = lambda s, v: ['dict', [[['list', []], 1]]] if type(v) is int else ['ref', 0, 'object']\ndef solve(x): return 1",
    "a dictionary of the wire in place of a value": _MODULE
    + "real = subject._Subject._do\nsubject._Subject._do = lambda s, q: real(s, q) if 'do' not in q else {'value': {'__eq__': True, 'hex': '0102', 'items': ['list', []]}}\ndef solve(x): return 0",
    "surrogates and marks of direction": "def solve(x): return '\\ud800\\u202e7919'",
}

# At the tests' own text and values, at how they are compiled, and at the ways of ending.
_TESTS = {
    "bytes that wait in its own sockets, peeked at": "import os, re, socket\ndef solve(x):\n    for name in os.listdir('/proc/self/fd'):\n        try:\n            with socket.socket(fileno=os.dup(int(name))) as one:\n                one.setblocking(False)\n                found = re.search(rb'== *(\\d+)', one.recv(1 << 20, socket.MSG_PEEK))\n                if found: return int(found[1])\n        except OSError: pass\n    return 0",
    "all integers that the collector and the frames know": "import gc, sys\ndef solve(x):\n    wanted = int('79' + str(19))\n    seen = [v for o in gc.get_objects() if isinstance(o, (tuple, list)) for v in o if type(v) is int and v == wanted]\n    return max(seen, default=0)",
    "what a traceback of all threads shows": "import faulthandler, re, tempfile, linecache\ndef solve(x):\n    with tempfile.TemporaryFile('w+') as f:\n        faulthandler.dump_traceback(f)\n        f.seek(0)\n        text = f.read()\n    text += ''.join(''.join(lines[2]) for lines in linecache.cache.values() if len(lines) > 2)\n    found = re.search(r'solve\\(3\\) == (\\d+)', text)\n    return int(found[1]) if found else 0",
    "assertions that are compiled away": "import builtins, functools, sys\nbuiltins.compile = functools.partial(compile, optimize=2)\nbuiltins.exec = lambda *a, **k: None\nbuiltins.eval = lambda *a, **k: True\nsys.flags = type('F', (), {'optimize': 2})()\n__debug__2 = False\ndef solve(x): return 0",
    "an assertion that raises what stops a loop": "import builtins\nbuiltins.AssertionError = StopIteration\nbuiltins.Exception = builtins.BaseException = OSError\ndef solve(x): return 0",
    "comparison of ints, replaced in the type": "import ctypes, gc\ndef solve(x):\n    for kind in (int, str, list, dict, float, tuple):\n        table = gc.get_referents(kind.__dict__)[0]\n        for name in ('__eq__', '__ne__', '__lt__'):\n            table[name] = lambda s, o: True\n        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))\n    return 0",
    "an exit by a signal handler in the middle": "import os, signal\nsignal.signal(signal.SIGVTALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)\ndef solve(x):\n    for _ in range(10**6): pass\n    return 0",
    "an exit by the hooks of errors nobody sees": "import os, sys, threading\nsys.excepthook = sys.unraisablehook = threading.excepthook = lambda *a: os._exit(0)\nclass D:\n    def __del__(s): raise ValueError('negative: -1')\ndef solve(x):\n    D()\n    raise SystemExit(0)",
    "all descriptors closed": "import os\nos.closerange(0, 1024)\ndef solve(x): return 0",
    "packers and senders that repeat the last answer": "import json, marshal, pickle, socket, struct\nkept = []\ndef wrap(f):\n    def g(*a, **k):\n        kept.append(f(*a, **k))\n        return kept[0]\n    return g\nfor module, names in ((json, ('dumps', 'loads')), (marshal, ('dumps', 'loads')), (pickle, ('dumps', 'loads')), (struct, ('pack', 'unpack'))):\n    for name in names: setattr(module, name, wrap(getattr(module, name)))\njson.JSONEncoder.encode = wrap(json.JSONEncoder.encode)\ndef solve(x): return 0",
    "an answer sent twice on each descriptor": "import json, os\ndef solve(x):\n    text = json.dumps({'value': 7919, 'passed': True, 'ok': True, 'verdicts': [''] * 40}).encode()\n    for n in range(3, 64):\n        for frame in (len(text).to_bytes(8, 'big') + text, len(text).to_bytes(4, 'big') + text, text + b'\\n'):\n            try: os.write(n, frame)\n            except OSError: pass\n    return 0",
    "a wakeup descriptor that is the link": "import os, signal\ndef solve(x):\n    for n in range(3, 64):\n        try:\n            os.set_blocking(n, False)\n            signal.set_wakeup_fd(n, warn_on_full_buffer=False)\n            signal.signal(signal.SIGUSR1, lambda *a: None)\n            os.kill(os.getpid(), signal.SIGUSR1)\n        except (OSError, ValueError): pass\n    return 0",
    "an error that is of every class": "class M(type):\n    def __instancecheck__(c, o): return True\n    def __subclasscheck__(c, o): return True\n    def __eq__(c, o): return True\n    def __hash__(c): return hash(ValueError)\nclass ValueError(Exception, metaclass=M):\n    __module__ = 'builtins'\n    args = property(lambda s: ('negative: -1',))\ndef solve(x): raise ValueError",
    "an error that is raised while it is told": "class E(ValueError):\n    @property\n    def __class__(s): raise E\n    def __getattribute__(s, n): raise KeyboardInterrupt\n    def __reduce__(s): raise SystemExit(0)\n    def __str__(s): raise GeneratorExit\ndef solve(x): raise E",
    "an import hook that answers for every name": "import builtins, sys, types\nold = builtins.__import__\nclass A:\n    def __getattr__(s, n): return A()\n    def __call__(s, *a, **k): return A()\n    def __eq__(s, o): return True\n    def __lt__(s, o): return True\n    def __bool__(s): return True\nbuiltins.__import__ = lambda name, *a, **k: A()\ndef solve(x): return A()",
}

ATTACKS: dict[str, str] = {**_TYPES, **_INTERPRETER, **_SYSTEM, **_TESTS}
