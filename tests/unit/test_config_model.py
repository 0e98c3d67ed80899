"""What a configuration means: defaults, what the core gets, what is unwise; and that the documentation agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from supervisor.config import Overrides, examine, load
from supervisor.config.models import SECTIONS, QueueSection, RetrySection
from supervisor.core.settings import CoreSettings, QueueSettings, RetryPolicy, Timing

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, type[BaseModel]] = {**SECTIONS, "queues.NAME": QueueSection, "queues.NAME.retry": RetrySection}


def documented() -> dict[str, dict[str, str]]:
    """Read the tables of docs/configuration.md: section, key, default as written."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    tables: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = re.match(r"`\[?([\w.]+)\]?`", part)
        if title:
            tables[title[1]] = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", part, flags=re.MULTILINE))
    return tables


@pytest.mark.parametrize("section", MODELS)
def test_documentation_has_every_key_with_its_default(section: str) -> None:
    """docs/configuration.md lists exactly the keys of each section, with the defaults that the models have."""
    model, rows = MODELS[section], documented()[section]
    assert set(rows) == set(model.model_fields)
    required = {"handler": "tasks:handle"} if section == "queues.NAME" else {}
    defaults = model.model_validate(required)
    for key, written in rows.items():
        if not (found := re.fullmatch(r"`(.*)`", written)):
            assert written in {"required", "none", "see Names", "in the runtime directory", "as below"}, key
            continue
        given = model.model_validate({**required, **tomllib.loads(f"{key} = {found[1]}")})
        assert getattr(given, key) == getattr(defaults, key), key


def test_defaults_are_those_of_the_core(tmp_path: Path) -> None:
    """A queue with nothing but a handler is the core's default queue: defaults are written in one sense only."""
    core = load(Overrides(dsn="embedded", queues=("a=t:h",)), environ={}, cwd=tmp_path).to_core_settings(
        host="h", supervisor="s", version="1"
    )
    assert core.queues == (QueueSettings(name="a", handler="t:h", dead_letter_queue="a_dlq"),)
    assert (core.grace_s, core.kill_after_s, core.timing) == (30.0, 5.0, Timing())
    assert core == CoreSettings(queues=core.queues, host="h", supervisor="s", version="1")


def test_everything_reaches_the_core(tmp_path: Path) -> None:
    """Each key of a queue that concerns the core arrives there in its units."""
    (tmp_path / "supervisor.toml").write_text(
        """
        [database]
        statement_timeout = "2m"
        [shutdown]
        grace = 0
        kill_after = "250ms"
        [queues.a]
        handler = "t.u:h"
        mode = "transactional"
        concurrency = 2
        standby = 1
        visibility_timeout = "1m"
        soft_timeout = 90
        hard_timeout = "2m"
        memory_limit = "512MB"
        max_tasks_per_child = 10
        max_child_age = "1h"
        claim_batch_size = 5
        max_in_flight = 4
        polling_interval = "1.5s"
        notify = false
        on_success = "archive"
        max_attempts = 2
        max_deaths = 1
        retry = { base = "2s", factor = 3, max = "1m", jitter = false }
        dead_letter_queue = "graveyard"
        """
    )
    found = load(Overrides(dsn="embedded"), environ={}, cwd=tmp_path)
    core = found.to_core_settings(host="h", supervisor="s", version="1")
    assert core.statement_timeout_s == 120.0
    assert (core.grace_s, core.kill_after_s) == (0.0, 0.25)
    [queue] = core.queues
    expected = QueueSettings(
        name="a",
        handler="t.u:h",
        dead_letter_queue="graveyard",
        mode=type(queue.mode)("transactional"),
        concurrency=2,
        standby=1,
        visibility_timeout_s=60.0,
        soft_timeout_s=90.0,
        hard_timeout_s=120.0,
        memory_limit_bytes=512 << 20,
        max_tasks_per_child=10,
        max_child_age_s=3600.0,
        claim_batch_size=5,
        max_in_flight=4,
        polling_interval_s=1.5,
        notify=False,
        on_success=type(queue.on_success)("archive"),
        max_attempts=2,
        max_deaths=1,
        retry=RetryPolicy(base_s=2.0, factor=3.0, max_s=60.0, jitter=False),
    )
    assert queue == expected


def test_long_names_have_hashed_dead_letter_queues(tmp_path: Path) -> None:
    """Up to 43 bytes the suffix is plain; beyond that the name is cut and hashed to 47."""
    short, long = "q" * 43, "q" * 44
    found = load(Overrides(dsn="embedded", queues=(f"{short}=t:h", f"{long}=t:h")), environ={}, cwd=tmp_path)
    names = {name: queue.dead_letter_queue_of(name) for name, queue in found.queues.items()}
    assert names[short] == f"{short}_dlq"
    assert re.fullmatch(r"q{26}_dlq_[0-9a-f]{16}", names[long])


def test_sessions_of_children(tmp_path: Path) -> None:
    """Each transactional child needs a session, the successor of one too; regular children need none."""
    environ = {
        "SUPERVISOR_QUEUES__A__MODE": "transactional",
        "SUPERVISOR_QUEUES__A__CONCURRENCY": "5",
        "SUPERVISOR_QUEUES__A__STANDBY": "2",
    }
    overrides = Overrides(dsn="embedded", queues=("a=t:h", "b=t:h"))
    assert load(overrides, environ={}, cwd=tmp_path).sessions_of_children() == 0
    assert load(overrides, environ=environ, cwd=tmp_path).sessions_of_children() == 5 + 2 + 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('hard_timeout = "none"', "queues.a.hard_timeout"),
        ('visibility_timeout = "2s"', "queues.a.visibility_timeout"),
        ("max_deaths = 9", "queues.a.max_deaths"),
        ('notify = false\npolling_interval = "2m"', "queues.a.polling_interval"),
        ('mode = "transactional"\nmax_in_flight = 9', "queues.a.max_in_flight"),
        ('[http]\nhost = "0.0.0.0"', "http.host"),
        ('[queues.b]\nhandler = "t:h"\ndead_letter_queue = "a_dlq"', "queues.b.dead_letter_queue"),
        ('[queues.a_dlq]\nhandler = "t:h"', "queues.a.dead_letter_queue"),
    ],
)
def test_unwise_settings_are_warnings(tmp_path: Path, text: str, key: str) -> None:
    """What is allowed and probably not meant is a warning, not a problem."""
    (tmp_path / "supervisor.toml").write_text(f'[queues.a]\nhandler = "t:h"\n{text}\n')
    examined = examine(Overrides(dsn="embedded"), environ={}, cwd=tmp_path)
    assert not examined.problems
    assert [warning.key for warning in examined.warnings] == [key]


def test_example_is_valid(tmp_path: Path) -> None:
    """The example that the documentation starts from has no problem and no warning."""
    examined = examine(Overrides(config=str(ROOT / "docs" / "examples" / "supervisor.toml")), environ={}, cwd=tmp_path)
    assert (examined.problems, examined.warnings) == ((), ())
