"""`art-server`: its options, the file of settings, and names of base models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import art
from art.cli.server import build_parser, main, read_options
from art.config import EngineConfig, LimitsConfig, ModelSettings, ServerConfig, TrainerConfig, VllmConfig
from art.config.base_models import SHORT_NAMES, is_local, resolve_base_model
from art.errors import ConfigError, PermissionDeniedError
from art.protocol.training import RegisterRequest
from art.runtime.placement import Devices
from art.runtime.runtime import Runtime
from art.server.auth import SERVER, Caller
from art.server.routes.models import HARMLESS, check_registration
from art.server.state import FAMILIES


def read(*arguments: str) -> tuple[ServerConfig, Path]:
    return read_options(build_parser().parse_args(list(arguments)))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"art-server {art.__version__}\n"


def test_defaults() -> None:
    assert read() == (ServerConfig(), Path(".art").resolve())


def test_a_file_and_what_comes_after_it(tmp_path: Path) -> None:
    toml = 'port = 6000\nmodels = ["qwen3-0.6b"]\ndata_dir = "/srv/art"\n[limits]\nmax_requests = 9\n'
    config, data_dir = read("--config", write(tmp_path / "a.toml", toml))
    assert (config.port, config.models, config.limits.max_requests) == (6000, ("qwen3-0.6b",), 9)
    assert data_dir == Path("/srv/art")
    config, data_dir = read(
        "--config", str(tmp_path / "a.toml"), "--config-json", '{"host": "::1", "port": 6001}', "--port", "6002",
        "--model", "a/b", "--model", "c/d", "--data-dir", str(tmp_path), "--gpu",
    )  # fmt: skip
    assert (config.host, config.port, config.models, config.gpu) == ("::1", 6002, ("a/b", "c/d"), True)
    assert (config.limits.max_requests, data_dir) == (9, tmp_path)
    assert read("--config", write(tmp_path / "empty.toml", ""))[0] == ServerConfig()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "prot = 1", "`prot` is no setting of ServerConfig; did you mean `port`"),
        (
            "a.toml",
            "[limits]\nmax_request = 1",
            "`limits.max_request` is no setting of ServerConfig; did you mean `max_requests`",
        ),
        ("a.toml", "[settings.engine]\nmax_contxt = 9", "did you mean `max_context`"),
        ("a.toml", "api_key = 'x'", "`api_key` is no setting"),
        ("a.toml", "drain_s = 10", "`drain_s` is no setting any more; let what stops the server wait"),
        ("a.toml", "port = 70000", "`port` must be less than"),
        ("a.toml", "port = ", "is not valid"),
        ("a.toml", "data_dir = 5", "must be a path"),
        ("a.yaml", "port: 1", "expected a file in TOML or JSON"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        read("--config", write(tmp_path / name, text))
    with pytest.raises(ConfigError, match="cannot read"):
        read("--config", str(tmp_path / "none.toml"))


# -- listening --


@pytest.mark.parametrize(("key", "told"), [(None, "without a key"), ("short", "5 characters")])
def test_other_machines_need_a_key(
    key: str | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("ART_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("ART_API_KEY", key)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        if key is not None:
            monkeypatch.setenv("ART_API_KEY", key)
        assert main(["--host", host, "--port", "0", "--data-dir", str(tmp_path)]) == 1
        assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_base_model_is_told_before_the_start() -> None:
    with pytest.raises(ConfigError, match=re.escape("did you mean qwen-2.5-7b")):
        read("--model", "qwen-2.5-7")


async def test_a_gpu_can_be_demanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("art.runtime.runtime.find_devices", lambda: Devices(gpus=(), has_mps=False, memory_bytes=1))
    runtime = Runtime(tmp_path, ServerConfig(gpu=True))
    with pytest.raises(ConfigError, match="no CUDA device"):
        await runtime.start()
    await runtime.close()


# -- base models --


def test_short_names() -> None:
    assert resolve_base_model("qwen-2.5-7b") == resolve_base_model("Qwen-2.5-7B") == "Qwen/Qwen2.5-7B-Instruct"
    assert resolve_base_model("qwen3-0.6b") == "Qwen/Qwen3-0.6B"
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id) for hub_id in SHORT_NAMES.values())
    assert all(resolve_base_model(hub_id) == hub_id for hub_id in SHORT_NAMES.values())
    assert not any(is_local(hub_id) for hub_id in SHORT_NAMES.values())


def test_folders_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "qwen3-0.6b").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "./mine", "qwen3-0.6b", str(tmp_path / "mine")):
        assert resolve_base_model(name) == name
        assert is_local(name)


@pytest.mark.parametrize(
    ("name", "near"), [("qwen2.5-7b", "qwen-2.5-7b"), ("llama3.1-8b", "llama-3.1-8b"), ("xxxx", "short names are")]
)
def test_unknown_names_get_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(near)):
        resolve_base_model(name)


# -- what touches the machine --

TRAINER = Caller("ci", None, frozenset({"infer", "train"}))
OFFER = ServerConfig(models=("qwen3-0.6b", "/models/own"))


def register(base_model: str = "Qwen/Qwen3-0.6B", **settings: object) -> RegisterRequest:
    return RegisterRequest(project="p", name="m", base_model=base_model, settings=ModelSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "request_",
    [
        register("/etc"),
        register("./models"),
        register("../x"),
        register("a/../../x"),
        register(engine=VllmConfig(urls=("http://169.254.169.254",))),
        register(engine=VllmConfig(flags={"chat_template": "/etc/passwd"})),
        register(engine=EngineConfig(device_indices=(1,))),
        register(engine=EngineConfig(kv_cache_tokens=10**9)),
        register(trainer=TrainerConfig(num_processes=8)),
    ],
    ids=lambda request: request.model_dump_json(exclude_defaults=True)[:90],
)
def test_a_key_without_admin_cannot_touch_the_machine(request_: RegisterRequest) -> None:
    with pytest.raises(PermissionDeniedError, match="admin"):
        check_registration(request_, TRAINER, OFFER)
    check_registration(request_, SERVER, OFFER)


def test_what_any_key_may_register() -> None:
    for base_model in ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "org/other", "/models/own"):
        check_registration(register(base_model), TRAINER, OFFER)
    check_registration(register(lora=None), TRAINER, OFFER)
    check_registration(register(engine=VllmConfig(dtype="bfloat16")), TRAINER, OFFER)
    check_registration(register(engine=EngineConfig(max_context=512)), TRAINER, OFFER)
    mine = ServerConfig(settings=ModelSettings(engine=EngineConfig(num_threads=2)))
    check_registration(register(engine=EngineConfig(num_threads=2)), TRAINER, mine)  # as the server has it


def test_a_server_may_offer_its_own_models_only() -> None:
    only = OFFER.model_copy(update={"only_models": True})
    check_registration(register("qwen3-0.6b"), TRAINER, only)
    with pytest.raises(PermissionDeniedError, match=re.escape("Qwen/Qwen3-0.6B")):
        check_registration(register("org/other"), TRAINER, only)
    check_registration(register("org/other"), SERVER, only)


def test_harmless_settings_exist() -> None:
    assert set(HARMLESS) == set(ModelSettings.model_fields)
    for group, names in HARMLESS.items():
        known = json.loads(ModelSettings(engine=EngineConfig()).model_dump_json()).get(group, {})
        assert names is None or names <= set(known)


# -- the page of the server --

PAGE = (Path(__file__).parents[3] / "docs/server.md").read_text()


def test_the_page_names_every_setting_limit_and_metric() -> None:
    for name in [*ServerConfig.model_fields, *LimitsConfig.model_fields, *FAMILIES]:
        assert f"`{name}`" in PAGE, name


def test_the_page_has_the_defaults_of_limits() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGE, re.MULTILINE))
    for name, field in LimitsConfig.model_fields.items():
        shown = rows[name].removesuffix(" s").replace(",", "")
        assert shown == ("none" if field.default is None else f"{field.default:.15g}"), name


def test_the_example_file_of_the_page_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config, _ = read("--config", write(tmp_path / "server.toml", example))
    assert config.limits.max_jobs_per_project == 8
