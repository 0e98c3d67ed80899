"""Faults by two dice: the first arms a site for the whole story, the second decides at each hit."""

from __future__ import annotations

from random import Random
from typing import Final

SITES: Final[dict[str, float]] = {
    # database
    "db.slow": 0.05,
    "claim.refused": 0.15,
    "claim.lost": 0.05,  # carried out, the answer is lost
    "renew.refused": 0.3,
    "renew.lost": 0.2,
    "settle.refused": 0.2,
    "settle.lost": 0.2,
    "settle.item": 0.1,
    "settle.impossible": 0.03,
    "fetch.refused": 0.3,
    "reckon.refused": 0.3,
    "reckon.lost": 0.2,
    "fetch.slow": 0.6,
    "notify.lost": 0.5,
    # children
    "boot.failed": 0.15,
    "boot.died": 0.15,
    "boot.hung": 0.1,
    "boot.spawn": 0.15,
    "boot.slow": 0.3,
    "child.idle_death": 0.4,
    "child.dispatch_lost": 0.05,
    "child.died_early": 0.05,
    "child.died": 0.05,
    "child.died_with_result": 0.05,
    "child.died_after_result": 0.05,
    "child.protocol": 0.02,
    "child.idle_protocol": 0.4,
    "child.slow_death": 0.1,
    "child.unkillable": 0.05,
    "child.late": 0.15,
    "child.exit_ignored": 0.3,
    # transactions
    "tx.claim_failed": 0.1,
    "tx.terminated": 0.1,
    "tx.by_hand": 0.05,  # the handler commits its claim
    "tx.told": 0.5,  # what a handler asked for is told although its transaction is gone
    "tx.conflict": 0.1,
    "tx.constraint": 0.05,
    "tx.commit_lost": 0.1,
    "tx.commit_died": 0.1,
    "tx.commit_hung": 0.1,
    "tx.lingers": 0.2,  # the server notices the end of a client late
    "tx.permit_death": 0.05,
    # the process
    "loop.lag": 0.02,
}

_ARMED: Final = 0.3
_FAVOURITES: Final = 3  # sites that are hit much more often in this story


class Faults:
    def __init__(self, rng: Random) -> None:
        self._random = rng.random
        self._armed: dict[str, float] = {}
        if rng.random() < 0.1:
            return  # a calm story
        for site, probability in SITES.items():
            if rng.random() < _ARMED:
                self._armed[site] = probability
        for site in rng.sample(tuple(SITES), _FAVOURITES):
            self._armed[site] = min(0.9, 5 * SITES[site])

    def hit(self, site: str) -> bool:
        """Whether it happens here, this time."""
        probability = self._armed.get(site)
        return probability is not None and self._random() < probability

    def favour(self, **sites: float) -> None:
        """Give sites (with `_` for the dot) a probability of their own."""
        self._armed |= {site.replace("_", ".", 1): probability for site, probability in sites.items()}

    def end(self) -> None:
        """No more faults."""
        self._armed.clear()
