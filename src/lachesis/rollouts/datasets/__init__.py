"""Problems to train on: read from files, directories or the hub in several formats, then rendered and tokenized."""

from lachesis.rollouts.datasets.curriculum import PassRates, keep_matching, ranks
from lachesis.rollouts.datasets.problems import Dataset, load_problems
from lachesis.rollouts.datasets.stream import PromptStream, split_eval

__all__ = ["Dataset", "PassRates", "PromptStream", "keep_matching", "load_problems", "ranks", "split_eval"]
