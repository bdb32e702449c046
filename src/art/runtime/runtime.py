"""One server's parts, wired together. The parts do not know each other.

chat request      --> Gateway --resolve--> PolicyResolver (which policy, which engine) --> engine process
register request  --> Registrar    --> Hosts (one per base model: engine process and trainer process)
training request  --> Submission (resolve and plan) --> JobQueue --> TrainingWork --> trainer process
                      --> publish --> engine process
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.config.base_models import resolve_base_model
from art.errors import ConfigError, StorageError
from art.gateway.chat import Gateway
from art.protocol.answers import Measurement
from art.protocol.live import LiveData
from art.protocol.training import JobKind
from art.record.conversations import forget_regularly
from art.record.recorder import Recorder
from art.record.rollout_store import RolloutStore
from art.runtime.alerts import Alerts
from art.runtime.hosting.cluster import make_cluster
from art.runtime.hosting.host import Hosts
from art.runtime.jobs.file_jobs import AdoptWork, FileWork
from art.runtime.jobs.job import JobStore, JobWork
from art.runtime.jobs.queue import JobQueue
from art.runtime.jobs.runner import TrainingWork
from art.runtime.live import Overview, find_obstacles, measure_cluster, measure_engines, measure_processes
from art.runtime.model_checkpoints import ModelCheckpoints, Promotions
from art.runtime.models import Models, PolicyResolver
from art.runtime.placement import find_devices, with_engine
from art.runtime.registration import Registrar, find_base_model
from art.runtime.registry import Registry
from art.runtime.submission import Submission
from art.storage.database import Database
from art.storage.layout import DataDir
from art.storage.lock import DirectoryLock

LOCK_WAIT_S = 10.0
"""How long to wait for an earlier server to release the data directory: it may still be shutting down."""


class Runtime:
    """Everything that one server keeps: models, processes, jobs and records. `start()` before use, `close()` after."""

    def __init__(self, data_dir: Path, config: ServerConfig) -> None:
        self.data_dir = DataDir(data_dir)
        self._config = config
        self._lock = DirectoryLock(self.data_dir.lock)
        self._database = Database(self.data_dir.database)
        self._registry = Registry(self._database)
        self._recorder = Recorder(self._database)
        self.usage = self._recorder.usage
        """What each project has used and may use."""
        self.usage.prices = config.prices
        self._cluster = make_cluster(config, self.data_dir)
        self._hosts = Hosts(self.data_dir, config, cluster=self._cluster)
        self.models = Models(self.data_dir, self._hosts, self._recorder, self._registry)
        self.resolver = PolicyResolver(self.models)
        self.gateway = Gateway(self.resolver, self._recorder, config.record_alternatives)
        self.live = self.gateway.live
        """What is being sampled and trained now, for people who watch."""
        store = JobStore(
            self._database,
            max_per_project=config.limits.max_jobs_per_project,
            on_dropped=RolloutStore.unmark_trained,
        )
        training, adopting = TrainingWork(self.models, self._recorder, store), AdoptWork(self.models, store)
        files = FileWork(self.data_dir)
        works: dict[JobKind, JobWork] = {
            "train": training, "train_sft": training, "fork": adopting, "pull": adopting, "export": files, "push": files
        }  # fmt: skip
        self._alerts = None if config.alerts is None else Alerts(config.alerts, self.data_dir.alerts)
        self.jobs = JobQueue(store, works, self.models.set_step, self._tell)
        self.overview = Overview(self.models, self._hosts, self.jobs, self.gateway, self._cluster)
        self.checkpoints = ModelCheckpoints(self.models, self.jobs)
        self.promotions = Promotions(self.models, self.checkpoints, required=config.require_gain)
        self.registration = Registrar(self._registry, self.models, self._hosts, self.jobs)
        self.training = Submission(self.models, self.gateway, self.resolver, self.jobs)
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Lock the data directory, load what earlier servers left there, and go on with their jobs. Raises
        `StorageError` if another server uses the data directory and `ConfigError` if a base model is unknown, or `gpu`
        is set and there is no GPU."""
        base_models = [resolve_base_model(name) for name in self._config.models]
        if self._config.gpu and (await asyncio.to_thread(find_devices)).gpus == ():
            raise ConfigError(
                "there is no CUDA device here (`nvidia-smi` lists none, or CUDA_VISIBLE_DEVICES hides them); start "
                "without --gpu to use the CPU"
            )
        await asyncio.to_thread(self._lock.acquire, LOCK_WAIT_S)
        if self._cluster is not None:
            await self._cluster.open()
        await asyncio.to_thread(shutil.rmtree, self.data_dir.samples, ignore_errors=True)
        await self._registry.start()
        await self.jobs.store.start()
        await self._recorder.start()
        for model in await self._registry.models():
            self.models.by_key[model.key] = model
        await self.jobs.recover()
        devices = await asyncio.to_thread(find_devices)
        settings = await asyncio.to_thread(with_engine, self._config.settings, devices)
        for name in base_models:
            self._hosts.pin(await find_base_model(name), settings)
        self._background.append(asyncio.create_task(self.overview.follow(), name="follow the system"))
        if self._alerts is not None:
            self._background.append(asyncio.create_task(self._alerts.run(), name="send alerts"))
        if (age_s := self._config.record_retention_s) is not None:
            needed = self.jobs.store.needed_exchanges
            forget = forget_regularly(self._recorder, age_s, needed)
            self._background.append(asyncio.create_task(forget, name="forget old exchanges"))

    def _tell(self, project: str, news: LiveData) -> None:
        """Pass on what jobs tell people who watch, and those who asked for alerts."""
        self.live.publish(project, news)
        if self._alerts is not None:
            self._alerts.take(project, news)

    async def warm_up(self) -> None:
        """Prepare for the first model, which comes soon. Nothing to do where it will be computed by a GPU."""
        if self._cluster is None and find_devices().default_kind == "cpu":
            await self._hosts.warm_up()

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.jobs.close()
        await self._hosts.close()
        if self._cluster is not None:
            await self._cluster.close()
        with contextlib.suppress(StorageError):
            await self.usage.flush()
        self._database.close()
        self._lock.release()

    async def health(self) -> dict[str, Any]:
        cluster = {} if self._cluster is None else {"cluster": self._cluster.status()}
        return {"status": "ok", "base_models": self._hosts.status(), **cluster}

    async def obstacles(self) -> dict[str, str]:
        """Describe what keeps this server from working, by the name of the check; empty if nothing does."""
        return await find_obstacles(self._hosts.pinned(), self._recorder, self.data_dir.root)

    async def measurements(self) -> list[Measurement]:
        """Measure jobs, processes, engines, tokens and the disk, for Prometheus. Raises `DirectoryGoneError` if the
        data directory is gone."""
        self._database.check_file()
        hosts, jobs = self._hosts.all(), self.jobs.counts()
        return [
            *(
                Measurement("art_tokens_total", float(count), {"model": model, "kind": kind})
                for (model, kind), count in self.gateway.tokens.items()
            ),
            *(Measurement("art_jobs", float(jobs[state]), {"state": state}) for state in ("queued", "running")),
            *measure_processes(hosts),
            *(() if self._cluster is None else measure_cluster(self._cluster)),
            *await measure_engines(hosts),
            Measurement("art_disk_free_bytes", float(shutil.disk_usage(self.data_dir.root).free)),
        ]
