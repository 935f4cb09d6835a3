from __future__ import annotations

import torch

from lachesis.train.model.compilation import compiler_arguments


def test_torch_knows_what_it_is_told():
    arguments = compiler_arguments()
    assert arguments["dynamic"] is True
    assert arguments["options"].keys() <= set(torch._inductor.list_options())
    assert arguments["options"] == {"triton.mix_order_reduction_non_strict_mode": True}, "as the pinned torch has it"


def test_what_this_torch_has_not_is_left_out(monkeypatch):
    compiler_arguments.cache_clear()
    monkeypatch.setattr("lachesis.train.model.compilation._WITHOUT_LINES", ("no_such_option",))
    try:
        assert compiler_arguments() == {"dynamic": True, "options": {}}
    finally:
        compiler_arguments.cache_clear()
