"""`lachesis` as torchrun starts it with `-m`, whose servers are forked as it is itself.

Its log says who reads whose weights.
"""

import logging

from lachesis.cli import main
from tests import warm

if __name__ == "__main__":  # what it starts imports it, too
    warm.fork_servers()
    logging.getLogger("lachesis.bridges.broadcast").setLevel(logging.INFO)
    main()
