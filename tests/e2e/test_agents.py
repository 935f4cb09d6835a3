"""Programs that know nothing of training play the rollouts, and the model learns from what they say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from lachesis.metrics.sinks.tape import read_groups, tape_files
from tests.e2e.agent_host import host
from tests.e2e.runs import metrics, run_here
from tests.long import long_but
from tests.paths import ROOT
from tests.tiny import tiny_model, tiny_tokenizer

TEMPLATE = """
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- if message.role == 'assistant' %}<eos>{% else %};{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
REWARD = """
def letters(completions, **columns):
    texts = ["".join(m["content"] for m in messages if m["role"] == "assistant") for messages in completions]
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]
"""
# Two turns in one conversation, by nothing but the standard library; one answer in eight crashes the program.
PLAIN = """
import json, os, sys, urllib.request, zlib
messages = []
for question in (sys.argv[1], "and then?"):
    messages.append({"role": "user", "content": question})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["LACHESIS_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    if zlib.crc32(messages[-1]["content"].encode()) % 8 == 0:
        sys.exit(3)
"""
# Of the answer with which the agent ends, and which its program prints.
OF_THE_ANSWER = """
def letters(completions, output, **columns):
    return [sum(map(str.isalpha, text.strip())) / max(len(text.strip()), 1) for text in output]
"""
SMOLAGENTS = """
import os, sys
import openai  # as the agent does once it has a model
from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool

@tool
def double(x: int) -> int:
    '''Twice a number.

    Args:
        x: The number.
    '''
    return 2 * x

def make():
    agent = ToolCallingAgent(
        tools=[double], model=None, max_steps=1, instructions="Be brief.", verbosity_level=LogLevel.OFF
    )
    agent.prompt_templates["system_prompt"] = "Use tools."
    agent.prompt_templates["final_answer"] = {"pre_messages": "", "post_messages": "{{task}}?"}
    return agent

made = []

def prepare():
    openai.OpenAI(api_key="none").chat.completions
    openai.types.chat.ChatCompletion.model_rebuild()
    made.append(make())

def main():
    agent = made.pop() if made else make()
    agent.model = OpenAIServerModel(os.environ["LACHESIS_MODEL"], api_base=os.environ["OPENAI_BASE_URL"])
    print(agent.run(sys.argv[1]))

if __name__ == "__main__":
    main()
"""
# Two questions in one conversation. Over Responses the library raises for a turn that was cut at its limit.
OPENAI_AGENTS = """
import os, sys
import openai  # as the agent does once it has a model
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

@function_tool
def double(x: int) -> int:
    '''Twice a number.'''
    return 2 * x

def prepare():
    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    openai.AsyncOpenAI(api_key="none").chat.completions

def main():
    prepare()
    agent = Agent(name="A", instructions="Be brief.", tools=[double], model=os.environ["LACHESIS_MODEL"])
    first = Runner.run_sync(agent, sys.argv[1])
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "and then?"}])
    print(second.final_output)

if __name__ == "__main__":
    main()
"""
# The model knows no shell yet: it is told so, and asked once more.
MINI_SWE_AGENT = """
import os, sys
os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
               "MSWEA_GLOBAL_CONFIG_DIR": os.environ.get("TMPDIR", "/tmp")}
import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

def prepare():
    pass

def main():
    model = LitellmTextbasedModel(
        model_name="openai/" + os.environ["LACHESIS_MODEL"], cost_tracking="ignore_errors",
        format_error_template="No command.",
        model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
    )
    agent = DefaultAgent(
        model, LocalEnvironment(), system_template="Use a shell.", instance_template="{{task}}",
        max_consecutive_format_errors=2, step_limit=4,
    )
    agent.run(sys.argv[1])
    print(agent.messages[-2]["extra"]["model_response"])  # the last says why it ended

if __name__ == "__main__":
    main()
"""
AGENTS = ROOT / ".venv-agents"
FROM_PYPI = {
    "smolagents": (SMOLAGENTS, importlib.util.find_spec("smolagents") is not None),
    "openai-agents": (OPENAI_AGENTS, AGENTS.is_dir()),
    "mini-swe-agent": (MINI_SWE_AGENT, AGENTS.is_dir()),
}


@pytest.fixture(params=FROM_PYPI)
def from_pypi(request: pytest.FixtureRequest) -> str:
    """The program of an agent that is installed."""
    program, installed = FROM_PYPI[request.param]
    if not installed:
        pytest.skip(f"{request.param} is not installed; `make agents` does")
    return f"import sys\nsys.path.append({str(AGENTS)!r})\n{program}"  # behind .venv, whose packages win


def write_run(directory: Path, program: str, *, reward: str = REWARD, **sections: dict) -> Path:
    """A run in which the share of letters in what the model says is its reward."""
    tiny_model("olmo2", max_position_embeddings=4096, initializer_range=0.1).save_pretrained(directory / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(directory / "model")
    (directory / "tasks.csv").write_text("prompt\n" + "".join(f"task {i}\n" for i in range(8)))
    (directory / "rewards.py").write_text(reward)
    (directory / "program.py").write_text(program)
    config = {
        "run": {"name": "agents", "dir": str(directory / "runs"), "steps": 9},
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "tasks.csv")},
        "source": {"kind": "agent", "command": [sys.executable, "program.py", "{prompt}"], "timeout_s": 60},
        "rewards": {"functions": ["rewards.letters"]},
        "sampling": {"num_generations": 8, "max_completion_length": 8},
        "batch": {"prompts_per_step": 2},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"save_final": False},
    }
    for name, keys in sections.items():
        config[name] = config[name] | keys
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_program_trains_the_model_and_its_crashes_are_no_rewards(tmp_path: Path):
    # 144 of them, each of which a wall and packages that it does not use would take longer than what it does.
    source = {"command": [sys.executable, "-IS", "program.py", "{prompt}"], "wall": "none"}
    summary = run_here(write_run(tmp_path, PLAIN, source=source))
    lines = metrics(summary.run_dir).steps
    rewards = [line.values["reward"] for line in lines]
    assert fmean(rewards[-3:]) - fmean(rewards[:3]) > 0.15, rewards
    assert sum(line.values["rollout_failures/crash"] for line in lines if "rollout_failures/crash" in line.values) > 0
    for line in lines:
        assert line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3), "trained on what was sampled, token by token"
    for path in tape_files(summary.run_dir / "rollouts").values():
        for group in read_groups(path):
            for sample in group.samples:
                assert sample.mask is not None
                assert "[user]and then?;[assistant]" in sample.text


@pytest.mark.long(
    "test_the_answers_of_an_agent_from_pypi_are_learned[smolagents]: each rollout imports its library behind walls"
)
def test_an_agent_from_pypi_trains_it_too_behind_the_wall(tmp_path: Path, from_pypi: str):
    source = {"nonzero_exit": "score", "readable": [str(AGENTS.resolve())], "timeout_s": 240}
    sections = {"run": {"steps": 1}, "sampling": {"num_generations": 2}, "source": source}
    summary = run_here(write_run(tmp_path, from_pypi, **sections))
    (line,) = metrics(summary.run_dir).steps
    assert line.values["groups"] == 2
    assert line.values["turns"] == 8, "two turns of each rollout"
    assert line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert line.values["tokens_trained"] == line.values["tokens_generated"] > 0


@pytest.mark.parametrize(  # litellm takes seconds a call
    "from_pypi",
    long_but(
        ["smolagents", "openai-agents"],
        short=["smolagents"],
        why="test_the_answers_of_an_agent_from_pypi_are_learned[smolagents]: another agent",
    ),
    indirect=True,
)
def test_the_answers_of_an_agent_from_pypi_are_learned(tmp_path: Path, from_pypi: str):
    """Its first turn is to call a tool, which the model cannot yet; in its second the agent asks for an answer."""
    (tmp_path / "agent.py").write_text(from_pypi)
    with host(tmp_path / "agent.py", tmp_path) as command:
        source = {"command": [*command, "{prompt}"], "max_concurrent": 8, "wall": "none"}  # the host is outside
        summary = run_here(write_run(tmp_path, "", reward=OF_THE_ANSWER, source=source, run={"steps": 12}))
    lines = metrics(summary.run_dir).steps
    rewards = [line.values["reward"] for line in lines]
    assert fmean(rewards[-3:]) - fmean(rewards[:3]) > 0.15, rewards
    for line in lines:
        assert line.values["turns"] == 2 * 16 and line.values["rollout_failures"] == 0
        assert line.values["mean_ratio"] == pytest.approx(1.0, abs=1e-3)
