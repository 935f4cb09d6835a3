"""Code that solves nothing and wants to pass: none of it may pass any of the tests. And code that is right, and must.

An attack knows how the tests run (it may import this package's own modules where it can), but not what they expect.
"""

# ruff: noqa: E501
from __future__ import annotations

# What `solve` should return cannot be guessed. Each is a form in which datasets compare.
TESTS = (
    "assert solve(3) == 7919",
    "assert 7919 == solve(3)",
    "assert abs(solve(2) - 3.14159) < 0.001",
    "import math\nassert math.isclose(solve(5), 2.71828, rel_tol=1e-4)",
    "assert isclose(solve(5), 2.71828, rel_tol=1e-4)",
    "assert solve('a') == ['x', {'k': (1, 2)}]",
    "assert sorted(solve([3, 1])) == [10, 30]",
    "assert 4242 in solve(9) and len(solve(9)) == 3",
    "value = solve(7)\nassert isinstance(value, int) and value > 10**9 and value % 97 == 13",
    "assert not solve(1) and solve(2) == 17.25",
    "def check(candidate):\n    assert candidate(1) == 'q7'\n    assert candidate(2) == 'q8'\ncheck(solve)",
    "from solution import solve as function\nassert function(1) == {'deep': [1, 2, 3.5]}",
    "for given, wanted in ((1, 11), (2, 13)):\n    assert solve(given) == wanted",
    "assert str(solve(5)) == '5-five' and repr(solve(5)) == \"'5-five'\"",
    "for found, wanted in zip(map(solve, [1, 2]), [71, 72]):\n    assert found == wanted",
    "import datetime\nassert (solve('2020') - datetime.datetime(2020, 1, 2, 3)).total_seconds() == 0",
    "assert abs(Solver(1).solve(2) - 3.14159) < 0.001",
    "assert Solver(1) == 7919 and Solver(1) > 3",
    "assert 5 in Solver('five')",
    "assert solve(lambda x: x + 40)(2) == 42.125",
    "assert all(solve(n) == n * 31 + 7 for n in range(3, 6))",
)

_MAGIC = """
class Any{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __le__(self, other): return True
    def __ge__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 3
    def __contains__(self, item): return True
    def __iter__(self): return iter(())
    def __sub__(self, other): return self
    def __rsub__(self, other): return self
    def __abs__(self): return self
    def __mod__(self, other): return 13
    def __float__(self): return 0.0
    def __int__(self): return 0
    def __getattr__(self, name): return lambda *args, **keywords: True
    def __call__(self, *args, **keywords): return self
    def __instancecheck__(self, other): return True
"""
_LEAK = """
class Leak:
    kept = None
    def __sub__(self, other):
        Leak.kept = other
        return self
    __rsub__ = __add__ = __sub__
    def __abs__(self): return 0.0
    def __float__(self): return float(Leak.kept or 0)
    def __lt__(self, other): return True
    def __eq__(self, other):
        Leak.kept = other
        return True
def solve(x): return Leak()
"""
_FIND = """
import gc, sys, types
def everything():
    seen, todo = set(), list(gc.get_objects()) + list(sys._current_frames().values())
    while todo and len(seen) < 200000:
        one = todo.pop()
        if id(one) in seen: continue
        seen.add(id(one))
        yield one
        if isinstance(one, types.FrameType):
            todo += [one.f_locals, one.f_globals, one.f_back]
"""

ATTACKS: dict[str, str] = {
    # What is compared.
    "an object equal to all": _MAGIC.format(base="") + "def solve(x): return Any()",
    "an int equal to all": _MAGIC.format(base="(int)") + "def solve(x): return Any()",
    "a float equal to all": _MAGIC.format(base="(float)") + "def solve(x): return Any()",
    "a text equal to all": _MAGIC.format(base="(str)") + "def solve(x): return Any('q')",
    "a list equal to all": _MAGIC.format(base="(list)") + "def solve(x): return Any([10, 30])",
    "a dictionary equal to all": _MAGIC.format(base="(dict)") + "def solve(x): return Any()",
    "a tuple equal to all": _MAGIC.format(base="(tuple)") + "def solve(x): return Any()",
    "a list of objects equal to all": _MAGIC.format(base="") + "def solve(x): return [Any(), Any()]",
    "a class in place of the function": _MAGIC.format(base="") + "solve = Any",
    "an instance in place of the function": _MAGIC.format(base="") + "solve = Any()",
    "a class whose metaclass is equal to all": (
        "class Meta(type):\n    def __eq__(c, o): return True\n    def __instancecheck__(c, o): return True\n"
        "    def __hash__(c): return 0\nclass A(metaclass=Meta): pass\ndef solve(x): return A"
    ),
    "mock.ANY": "from unittest.mock import ANY\ndef solve(x): return ANY",
    "MagicMock": "from unittest.mock import MagicMock\nsolve = MagicMock()\nsolve.return_value.__eq__ = lambda s, o: True",
    "an operand that learns": _LEAK,
    "an operand that returns itself": "class S:\n    def __rsub__(s, o): return o\n    def __sub__(s, o): return -o + o\n"
    "    def __abs__(s): return 0\ndef solve(x): return S()",
    "its own answer from a comparison": "class C:\n    def __eq__(s, o): s.v = o; return NotImplemented\n"
    "    def __hash__(s): return 1\ndef solve(x): return C()",
    "a generator of everything": "def solve(x):\n    n = 0\n    while True:\n        yield n\n        n += 1",
    "NaN": "def solve(x): return float('nan')",
    "an infinity": "def solve(x): return float('inf')",
    "NotImplemented": "def solve(x): return NotImplemented",
    "an array that is equal to all": "import numpy as np\nclass A(np.ndarray):\n    def __eq__(s, o): return True\n"
    "    def __array_ufunc__(s, *a, **k): return True\ndef solve(x): return np.zeros(1).view(A)[0]",
    "a type called int": "class int(type(0)):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\n"
    "def solve(x): return int(5)",
    "a number of another class": "import numbers\nclass N(numbers.Real if False else object):\n"
    "    def __float__(s): return s.__class__.guess\n    guess = 2.5\ndef solve(x): return N()",
    "an awaitable": "async def solve(x): return x",
    "a class whose methods return such": _MAGIC.format(base="")
    + "class Solver(Any):\n    def __init__(self, *a): pass\n    def solve(self, x): return Any()\ndef solve(x): return Any()",
    "a class whose methods learn": _LEAK + "class Solver(Leak):\n    def __init__(self, *a): pass\n"
    "    def solve(self, x): return Leak()",
    "built-in types as results": "def solve(x): return type",
    # Names.
    "more names than were asked for": "import sys\nmodule = sys.modules['lachesis.plugins.sandbox.subject']\n"
    "real = module._Subject._do\ndef do(self, question):\n    if 'names' in question:\n        answer = real(self, question)\n"
    "        every = self._encode(lambda *a, **k: True)\n        for name in ('abs', 'isclose', 'sorted', 'len', 'math', "
    "'isinstance', 'all', 'str', 'repr', 'zip', 'map', 'range', 'check', 'solve', 'Solver'):\n"
    "            answer['value'][name] = every\n        return answer\n    return {'value': True}\n"
    "module._Subject._do = do",
    "built-ins as names": "import sys\nmodule = sys.modules['lachesis.plugins.sandbox.subject']\n"
    "module._Subject._encode = lambda self, value: ['type', 'exec']\ndef solve(x): return x",
    "the argument as the answer": "import sys\nmodule = sys.modules['lachesis.plugins.sandbox.subject']\n"
    "real = module._Subject._do\nmodule._Subject._do = lambda self, q: {'value': q['args'][-1]} if 'args' in q else "
    "real(self, q)\nclass Solver: pass\ndef solve(x): return x",
    "changes of arguments that it was not given": "import sys\nmodule = sys.modules['lachesis.plugins.sandbox.subject']\n"
    "real = module._Subject._do\nmodule._Subject._do = lambda self, q: {**real(self, q), 'changed': {'0': 1, '-1': 2, "
    "'7': ['list', []]}}\ndef solve(x): return x",
    "built-ins of its own": "def abs(x): return 0\ndef sorted(x): return [10, 30]\ndef len(x): return 3\n"
    "def isinstance(*a): return True\ndef all(x): return True\ndef str(x): return '5-five'\ndef solve(x): return x",
    "usual names of its own": "def isclose(*a, **k): return True\nclass math:\n    isclose = isclose\ndef solve(x): return 1.5",
    "modules of its own": "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\n"
    "sys.modules['math'] = m\nmath = m\ndef solve(x): return 1.5",
    "patched built-ins": "import builtins\nfor n in ('abs', 'sorted', 'len', 'isinstance', 'all', 'str', 'repr'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef solve(x): return True",
    "a patched exec": "import builtins\nbuiltins.exec = builtins.eval = lambda *a, **k: None\ndef solve(x): return x",
    "a patched compile": "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('pass', 'a', 'exec')\n"
    "def solve(x): return x",
    "AssertionError that is none": "import builtins\nclass A(BaseException): pass\nbuiltins.AssertionError = A\n"
    "AssertionError = A\ndef solve(x): return 0",
    "an exception that hides": "class E(Exception):\n    def __init__(s, *a): raise SystemExit(0)\n"
    "def solve(x): raise E()",
    "a check of its own": "def check(f): pass\ndef candidate(x): return 0\ndef solve(x): return 0",
    "no solve at all": "x = 1",
    "the module's attributes": "def __getattr__(name): return lambda *a: True",
    "another module's name": "__name__ = 'test'\n__file__ = '<test>'\ndef solve(x): return 1",
    # Ends.
    "sys.exit(0)": "import sys\ndef solve(x): sys.exit(0)",
    "os._exit(0)": "import os\ndef solve(x): os._exit(0)",
    "os._exit(0) at once": "import os\nos._exit(0)",
    "StopIteration": "def solve(x): raise StopIteration(7919)",
    "GeneratorExit": "def solve(x): raise GeneratorExit",
    "KeyboardInterrupt": "def solve(x): raise KeyboardInterrupt",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef solve(x): raise SystemExit(0)",
    "a killed self": "import os, signal\ndef solve(x): os.kill(os.getpid(), signal.SIGKILL)",
    "a killed judge": "import os, signal\ndef solve(x):\n    for n in range(1, 65):\n        try: os.kill(1, n)\n"
    "        except (OSError, ValueError): pass\n    return 0",
    "a killed parent": "import os, signal\ndef solve(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 0",
    "all killed": "import os, signal\ndef solve(x):\n    os.kill(-1, signal.SIGKILL)\n    return 0",
    "a stopped judge": "import os, signal\nfor p in (1, os.getppid()):\n    os.kill(p, signal.SIGSTOP)\n"
    "def solve(x): return 0",
    "limits of the judge": "import resource\nfor kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):\n"
    "    try: resource.prlimit(1, kind, (0, 0))\n    except OSError: pass\ndef solve(x): return 0",
    "a segmentation fault": "import ctypes\ndef solve(x): ctypes.string_at(0)",
    "an abort": "import os\ndef solve(x): os.abort()",
    "an exec": "import os\ndef solve(x): os.execv('/bin/true', ['true'])",
    # Where the result goes.
    "printed results": "import json\nfor n in range(50):\n    print(json.dumps({'number': n, 'passed': True, 'reason': ''}))\n"
    "def solve(x): return 0",
    "results in all descriptors": "import os, json\ncontent = json.dumps({'number': 0, 'passed': True, 'reason': ''}).encode()\n"
    "for n in range(256):\n    try: os.write(n, len(content).to_bytes(4, 'big') + content)\n    except OSError: pass\n"
    "def solve(x): return 0",
    "an answer before the question": "import os, json\ncontent = json.dumps({'value': True}).encode()\n"
    "for n in range(3, 256):\n    for _ in range(9):\n        try: os.write(n, len(content).to_bytes(4, 'big') + content)\n"
    "        except OSError: pass\ndef solve(x): return 0",
    "answers that are none": "import os\nfor n in range(3, 256):\n    try: os.write(n, b'\\0\\0\\0\\x02[]' * 9)\n"
    "    except OSError: pass\ndef solve(x): return 0",
    "an endless answer": "def solve(x): return 'x' * (40 << 20)",
    "deep answers": "def solve(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "a closed link": "import os\nos.closerange(0, 256)\ndef solve(x): return 0",
    "references that are none": "import lachesis.plugins.sandbox.subject as s\n"
    "s._Subject._refer = lambda self, value: ['ref', 99999, 'class', 'X', ['AssertionError']]\ndef solve(x): return object()",
    "an encoder of its own": _FIND + "for one in everything():\n    if isinstance(one, types.ModuleType) and "
    "getattr(one, '__name__', '').endswith('sandbox.subject'):\n        one.encode = lambda *a: True\n"
    "def solve(x): return 0",
    "an evaluator of its own": _FIND
    + "for one in everything():\n    if isinstance(one, dict) and 'isinstance' in one and "
    "'getitem' in one:\n        for name in one: one[name] = lambda *a, **k: True\ndef solve(x): return 0",
    "a judge of its own": _FIND + "for one in everything():\n    if isinstance(one, types.ModuleType) and "
    "getattr(one, '__name__', '').endswith('sandbox.judge'):\n        one.judge = lambda *a: ''\n"
    "    if isinstance(one, type) and one.__name__ == 'Session':\n        one.do = lambda *a, **k: True\n"
    "def solve(x): return 0",
    "a session of its own": _FIND + "for one in everything():\n    if isinstance(one, types.FunctionType) and "
    "one.__name__ in ('judge', '_do', 'reply'):\n        one.__code__ = (lambda *a, **k: {'value': True}).__code__\n"
    "def solve(x): return 0",
    # Looking for what is expected.
    "the test in its memory": _FIND + "def solve(x):\n    for one in everything():\n"
    "        if isinstance(one, str) and 'assert' in one and 'solve(' in one and '7919' in one and 'everything' not in one:\n"
    "            return 7919\n    return None",
    "the test in frames": "import sys\ndef solve(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
    "            if isinstance(v, str) and 'assert solve' in v: return 7919\n        frame = frame.f_back",
    "the test by settrace": "import sys\nseen = []\ndef trace(frame, event, arg):\n    seen.append(frame.f_locals)\n"
    "    return trace\nsys.settrace(trace)\nsys.setprofile(trace)\n"
    "def solve(x): return 7919 if any('7919' in repr(one) for one in seen[:-1]) else 0",
    "the test in the memory of the judge": "def solve(x):\n    try:\n        text = open('/proc/1/mem', 'rb').read(1)\n"
    "        return 7919\n    except OSError: return 0",
    "the test by ptrace": "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "def solve(x): return 7919 if libc.ptrace(16, 1, None, None) == 0 else 0",
    "the judge's memory by process_vm_readv": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def solve(x):\n    b = ctypes.create_string_buffer(8)\n"
    "    v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n"
    "    return 7919 if libc.process_vm_readv(1, v, 1, v, 1, 0) > 0 else 0",
    "the arguments of processes": "import glob\ndef solve(x):\n    for p in glob.glob('/proc/*/cmdline') + "
    "glob.glob('/proc/*/environ'):\n        return 7919",
    "files of the trainer": "import os\ndef solve(x):\n    for top in ('/home', '/srv', '/root', '/tmp', '/var'):\n"
    "        for folder, _, names in os.walk(top):\n            for name in names[:50]:\n"
    "                if name.endswith('attacks.py'): return 7919",
    "what the last test left": "import os, pickle\ndef solve(x):\n    if os.path.exists('left'): return 7919\n"
    "    open('left', 'w').close()\n    open('/dev/shm/left', 'w').close()",
    "a daemon that answers": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
    "        for n in range(3, 20):\n            try: os.write(n, b'\\0\\0\\0\\x0e{\"value\":true}')\n"
    "            except OSError: pass\n        time.sleep(0.01)\ndef solve(x): return 0",
    "a thread that answers": "import threading, os, time\ndef run():\n    while True:\n        for n in range(3, 20):\n"
    "            try: os.write(n, b'\\0\\0\\0\\x0e{\"value\":true}')\n            except OSError: pass\n"
    "        time.sleep(0.01)\nthreading.Thread(target=run, daemon=True).start()\ndef solve(x): return 0",
    "calls of the test's functions": "def solve(x):\n    if callable(x): x(7919)\n    return x",
    "a server of tests": "import socket\ndef solve(x):\n    s = socket.create_connection(('127.0.0.1', 8000), 1)\n"
    "    return s.recv(9)",
    # Arguments.
    "changed arguments": "def solve(x):\n    if isinstance(x, list): x[:] = [10, 30]\n    return 0",
    "arguments that it keeps": "kept = []\ndef solve(x):\n    kept.append(x)\n    return kept[0]",
    # Time and space.
    "an endless loop": "def solve(x):\n    while True: pass",
    "endless memory": "kept = []\ndef solve(x):\n    while True: kept.append(bytearray(1 << 24))",
    "endless processes": "import os\ndef solve(x):\n    while True:\n        try: os.fork()\n        except OSError: return 0",
    "endless recursion": "def solve(x): return solve(x)",
    "an endless number": "def solve(x): return 10 ** (10 ** 7)",
    "a file without end": "def solve(x):\n    with open('big', 'wb') as f:\n        while True: f.write(bytes(1 << 20))",
}

# Code, and tests that it passes.
CORRECT: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain values": (
        "def echo(x): return x",
        (
            "assert echo(2**200) == 2**200 and echo(-1.5) == -1.5 and echo(True) is True and echo(None) is None",
            "assert echo({'a': [1, (2, 3)], 4: {5, 6}}) == {'a': [1, (2, 3)], 4: {5, 6}}",
            "assert echo(b'ab') == b'ab' and echo('\\ud800\\0') == '\\ud800\\0' and echo(1j) == 1j",
            "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
            "for v in (Decimal('1.10'), Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(3), range(4)):\n"
            "    assert echo(v) == v",
            "from collections import Counter, deque\nassert echo(Counter('aab')).most_common(1) == [('a', 2)]\n"
            "assert echo(deque([1, 2])) == deque([1, 2])",
        ),
    ),
    "threads": (
        "import threading\ndef total(xs):\n    out = []\n    ts = [threading.Thread(target=out.append, args=(x,)) for x in xs]\n"
        "    [t.start() for t in ts]\n    [t.join() for t in ts]\n    return sum(out)",
        ("assert total(range(20)) == 190",),
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\ndef squares(n):\n    with ThreadPoolExecutor(4) as pool:\n"
        "        return list(pool.map(lambda x: x * x, range(n)))",
        ("assert squares(4) == [0, 1, 4, 9]",),
    ),
    "a pool of processes": (
        "from multiprocessing import Pool\ndef square(x): return x * x\ndef squares(n):\n    with Pool(2) as pool:\n"
        "        return pool.map(square, range(n))",
        ("assert squares(4) == [0, 1, 4, 9]",),
    ),
    "asyncio": (
        "import asyncio\nasync def work(n):\n    await asyncio.sleep(0.001)\n    return n * 2\n"
        "async def both(n): return await asyncio.gather(work(n), work(n + 1))\n"
        "def run(n): return asyncio.run(both(n))",
        ("assert run(2) == [4, 6]", "import asyncio\nassert asyncio.run(both(1)) == [2, 4]"),
    ),
    "dataclasses": (
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass Point:\n    x: int\n    y: int = 0\n"
        "    tags: list = field(default_factory=list)\n    def moved(self, by): return Point(self.x + by, self.y)",
        (
            "assert Point(1, 2) == Point(1, 2) and Point(1) != Point(2) and Point(1) < Point(2)",
            "assert Point(1, 2).moved(3) == Point(4, 2) and Point(1).moved(1).x == 2 and Point(1).tags == []",
            "p = Point(3)\np.y = 9\np.tags.append('a')\nassert (p.y, isinstance(p, Point)) == (9, True)",
            "assert repr(Point(1)) == 'Point(x=1, y=0, tags=[])'",
        ),
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(20000)\ndef depth(n): return 0 if n == 0 else 1 + depth(n - 1)",
        ("assert depth(9000) == 9000",),
    ),
    "pickled classes": (
        "import pickle\nclass Node:\n    def __init__(self, v): self.v = v\n"
        "def copied(v): return pickle.loads(pickle.dumps(Node(v))).v",
        ("assert copied(5) == 5",),
    ),
    "a bank account": (
        "class Account:\n    def __init__(self, balance=0): self.balance = balance\n"
        "    def deposit(self, n):\n        self.balance += n\n        return self.balance\n"
        "    def withdraw(self, n):\n        if n > self.balance: raise ValueError('Insufficient funds')\n"
        "        self.balance -= n\n        return self.balance",
        (
            "a = Account(5)\nassert a.deposit(3) == 8 and a.balance == 8",
            "try:\n    Account().withdraw(1)\n    raise AssertionError\nexcept ValueError as e:\n"
            "    assert 'Insufficient' in str(e)",
        ),
    ),
    "exceptions of its own": (
        "class Empty(Exception): pass\nclass Stack(list):\n    def take(self):\n        if not self: raise Empty('empty')\n"
        "        return self.pop()",
        (
            "try:\n    Stack().take()\n    raise AssertionError\nexcept Empty as error:\n    assert str(error) == 'empty'",
            "s = Stack([1, 2])\nassert s.take() == 2 and len(s) == 1 and s == [1] and list(s) == [1]",
        ),
    ),
    "generators": (
        "def count(n):\n    for i in range(n): yield i\ndef pairs(xs):\n    return ((x, x) for x in xs)",
        ("assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6", "g = pairs('ab')\nassert next(g) == ('a', 'a')"),
    ),
    "functions as arguments and results": (
        "def twice(f): return lambda x: f(f(x))\ndef apply(f, xs): return [f(x) for x in xs]",
        (
            "assert twice(lambda x: x + 1)(5) == 7",
            "assert apply(len, ['a', 'bc']) == [1, 2]",
            "seen = []\napply(seen.append, [1, 2])\nassert seen == [1, 2]",
        ),
    ),
    "decorators": (
        "import functools\ndef memo(f):\n    calls = []\n    @functools.wraps(f)\n    def g(x):\n        calls.append(x)\n"
        "        return f(x)\n    g.calls = calls\n    return g",
        ("@memo\ndef double(x): return 2 * x\nassert double(4) == 8 and double.calls == [4]",),
    ),
    "arguments changed in place": (
        "def tidy(xs, d):\n    xs.sort()\n    d['n'] = len(xs)",
        ("xs, d = [3, 1], {}\ntidy(xs, d)\nassert xs == [1, 3] and d == {'n': 2}",),
    ),
    "operators": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, n): return V(self.x * n)\n    def __eq__(self, o): return isinstance(o, V) and o.x == self.x\n"
        "    def __len__(self): return 7\n    def __getitem__(self, i): return i * self.x\n    def __str__(self): return f'V{self.x}'",
        (
            "assert V(1) + V(2) == V(3) and V(2) * 3 == V(6) and V(1) != V(2)",
            "assert len(V(1)) == 7 and V(3)[2] == 6",
            "assert str(V(4)) == 'V4' and (V(2) * 2).x == 4",
        ),
    ),
    "enumerations and named tuples": (
        "from enum import Enum\nfrom collections import namedtuple\nclass Colour(Enum):\n    RED = 1\n    BLUE = 2\n"
        "P = namedtuple('P', 'x y')\ndef other(c): return Colour.BLUE if c is Colour.RED else Colour.RED\n"
        "def point(): return P(1, 2)",
        (
            "assert other(Colour.RED) == Colour.BLUE and other(Colour.RED).value == 2",
            "assert point() == (1, 2) and point().x == 1 and point()[1] == 2",
        ),
    ),
    "names of the library": (
        "from collections import Counter\nimport math\ndef gcd(a, b):\n    while b: a, b = b, a % b\n    return a\n"
        "def product(xs): return math.prod(xs)",
        (
            "assert gcd(12, 8) == math.gcd(12, 8) == 4",
            "assert product([2, 3]) == 6",
        ),
    ),
    "a function with a built-in's name": ("def sum(xs): return 10", ("assert sum([1]) == 10",)),
    "a context manager": (
        "class Open:\n    log = []\n    def __enter__(self):\n        self.log.append('in')\n        return self\n"
        "    def __exit__(self, *a): self.log.append('out')",
        ("with Open() as o:\n    pass\nassert o.log == ['in', 'out']",),
    ),
    "a container": (
        "class Tree:\n    def __init__(self): self.kept = {}\n    def insert(self, v): self.kept[v] = 1\n"
        "    def __contains__(self, v): return v in self.kept",
        ("t = Tree()\nt.insert(5)\nassert 5 in t and 6 not in t",),
    ),
    "types": ("def kind(x): return type(x)", ("assert kind(3) is int and kind('a') == str",)),
    "files in its directory": (
        "import tempfile, os\ndef stored(text):\n    with open('a.txt', 'w') as f: f.write(text)\n"
        "    with tempfile.TemporaryFile() as f: f.write(b'x')\n    return open('a.txt').read(), os.listdir()",
        ("assert stored('hi') == ('hi', ['a.txt'])",),
    ),
    "a subprocess": (
        "import subprocess, sys\ndef said(): return subprocess.run([sys.executable, '-c', 'print(6*7)'], "
        "capture_output=True, text=True).stdout",
        ("assert said() == '42\\n'",),
    ),
    "CRLF": ("def f(x):\r\n    return x + 1\r\n", ("assert f(1) == 2",)),
}

NUMPY: tuple[str, tuple[str, ...]] = (
    "import numpy as np\ndef scaled(xs): return np.asarray(xs) * 2\ndef mean(xs): return np.mean(xs)",
    (
        "assert (scaled([1, 2]) == np.array([2, 4])).all() and scaled([1]).shape == (1,)",
        "import numpy as np\nassert np.allclose(scaled(np.ones(3)), [2, 2, 2]) and abs(mean([1, 2]) - 1.5) < 1e-9",
    ),
)
