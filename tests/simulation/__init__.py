"""The core under a seeded random world with virtual time.

    choices ──▶ settings, messages, what handlers do        faults ──▶ two dice a site
         │                                                     │
         ▼                                                     ▼
    world ── timeline (virtual time) ── shell (carries out the core's commands) ── children (processes that may die)
                                            │                                          │
                                            └──────────── database (PGMQ's rows) ◀─────┘
    ledger: what really happened, and the invariants after every step

First chaos and safety, then the faults end and everything must come to its end. One seed is one story.
"""
