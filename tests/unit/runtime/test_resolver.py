"""Which policy a name in a request means: a project's own model, or the untrained base model of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art.config import ModelSettings, SamplingConfig
from art.errors import NotFoundError
from art.runtime.models import Models, PolicyResolver
from art.runtime.registry import RegisteredModel
from art.storage.layout import DataDir

HUB_ID = "Qwen/Qwen2.5-0.5B-Instruct"
PINNED = SamplingConfig(temperature=0.9)


class Host:
    one_policy = False
    engine = "the engine"

    @property
    def adapters(self) -> Host:
        return self

    async def renderer(self) -> str:
        return "the renderer"

    async def engine_info(self) -> Any:
        return SimpleNamespace(max_context=512, longest_context=512)

    def is_loaded(self, adapter: str) -> bool:
        return False

    async def load(self, adapter: str, checkpoint: Path) -> None:
        pass


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def resolver(tmp_path: Path, host: Host) -> PolicyResolver:
    data_dir = DataDir(tmp_path)
    models = {}
    for project, name, base_model in [
        ("games", "001", HUB_ID),
        ("mail", "001", str(tmp_path / "tiny")),
        ("mail", "clerk", HUB_ID),
    ]:
        settings = ModelSettings(sampling=PINNED if name == "clerk" else None)
        model = RegisteredModel(project=project, name=name, base_model=base_model, settings=settings, step=0)
        models[model.key] = model
        data_dir.model(project, name).checkpoint(0).mkdir(parents=True)
    hosts = SimpleNamespace(of=lambda model: host)
    registry = SimpleNamespace(identity=lambda model, step: None)
    registered = Models(data_dir, hosts, None, registry)  # type: ignore[arg-type]
    registered.by_key |= models
    return PolicyResolver(registered)


@pytest.mark.parametrize(
    ("project", "asked", "meant"),
    [
        ("games", "001", "games/001"),
        ("mail", "001", "mail/001"),
        ("mail", "001@0", "mail/001@0"),
        ("mail", "mail/001", "mail/001"),
        ("games", "clerk", None),
        ("games", "mail/001", None),
        ("mail", HUB_ID, f"mail/{HUB_ID}"),
        ("mail", "qwen-2.5-0.5b", "mail/qwen-2.5-0.5b"),
        ("other", HUB_ID, None),
    ],
)
def test_what_a_project_means_by_a_name(resolver: PolicyResolver, project: str, asked: str, meant: str | None) -> None:
    assert resolver.name_in(project, asked) == meant


async def test_a_name_of_two_projects_without_a_project_names_both(resolver: PolicyResolver) -> None:
    with pytest.raises(NotFoundError, match="games/001, mail/001"):
        await resolver.resolve("001")
    assert (await resolver.resolve("mail/001")).adapter == "mail/001@0"


async def test_a_model_is_sampled_as_its_settings_say(resolver: PolicyResolver) -> None:
    assert (await resolver.resolve("clerk")).sampling == PINNED
    assert (await resolver.resolve("mail/001")).sampling is None
    assert (await resolver.resolve(HUB_ID)).sampling is None, "settings are those of the trained model"
    assert ModelSettings.model_validate(ModelSettings(sampling=PINNED).model_dump()).sampling == PINNED
    assert "sampling" not in ModelSettings().model_dump(), "older servers do not know it"


async def test_the_base_model_answers_untrained_under_its_own_name(
    resolver: PolicyResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "tiny")
    for asked, project, base_model in [
        (HUB_ID, "games", HUB_ID),
        ("qwen-2.5-0.5b", "games", HUB_ID),
        (f"mail/{HUB_ID}", "mail", HUB_ID),
        ("mail/qwen-2.5-0.5b", "mail", HUB_ID),
        (folder, "mail", folder),
        ("./tiny", "mail", folder),
        (f"mail/{folder}", "mail", folder),
    ]:
        policy = await resolver.resolve(asked)
        assert (policy.adapter, policy.policy_version) == (None, 0)
        assert (policy.project, policy.name) == (project, base_model), "never that of a model which could learn it"
        assert resolver.is_ready(policy)
        assert resolver.resolve_ready(asked) is policy
    with pytest.raises(NotFoundError, match="there is no model"):
        await resolver.resolve("Qwen/Qwen2.5-7B-Instruct")


async def test_an_engine_that_holds_one_policy_has_no_base_model_beside_it(
    resolver: PolicyResolver, host: Host
) -> None:
    host.one_policy = True
    with pytest.raises(NotFoundError, match="untrained base model"):
        await resolver.resolve(HUB_ID)
