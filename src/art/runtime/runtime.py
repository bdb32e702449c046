"""One server's parts, wired together. The parts do not know each other.

chat request      --> Gateway --resolve--> PolicyResolver (which policy, which engine) --> engine process
register request  --> Registration --> Hosts (one per base model: engine process and trainer process)
training request  --> Submission (resolve and plan) --> JobRunner --> TrainingWork --> trainer process
                      --> publish --> engine process
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any

from art.config import ServerConfig
from art.config.base_models import resolve_base_model
from art.engine import Sender
from art.errors import ConfigError, StorageError
from art.gateway.chat import Gateway
from art.gateway.record.recorder import Recorder
from art.gateway.record.retention import forget_regularly
from art.gateway.record.rollout_store import RolloutStore
from art.gateway.record.usage_book import Amounts
from art.protocol.answers import Measurement
from art.protocol.job_states import JobKind
from art.runtime.base_models import prepare_base_model
from art.runtime.checks.preflight import Preflight
from art.runtime.host import Hosts
from art.runtime.jobs.file_jobs import AdoptWork, FileWork
from art.runtime.jobs.job import Work
from art.runtime.jobs.runner import JobRunner
from art.runtime.jobs.store import JobStore
from art.runtime.jobs.training_work import TrainingWork
from art.runtime.live import LIVE_LOGGER, LiveLog, Overview
from art.runtime.measurements import (
    find_obstacles,
    measure_disk,
    measure_engines,
    measure_jobs,
    measure_processes,
    measure_tokens,
)
from art.runtime.model_checkpoints import ModelCheckpoints
from art.runtime.models import Models
from art.runtime.placement.placement import find_devices, with_engine
from art.runtime.promotions import Promotions, PromotionStore
from art.runtime.registration import Registration
from art.runtime.registry import Registry
from art.runtime.resolver import PolicyResolver
from art.runtime.script_logs import MetricStore, RunLogs
from art.runtime.submission import Submission
from art.runtime.supervision.report import Watchdog, write_report
from art.storage.database import Database
from art.storage.layout import DataDir
from art.storage.lock import DirectoryLock

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0
"""How long to wait for an earlier server to release the data directory: it may still be shutting down."""
DIRECTORY_CHECK_S = 1.0
"""Time between two checks that the data directory is still there."""


class Runtime:
    """Everything that one server keeps: models, processes, jobs and records. `start()` before use, `close()` after."""

    def __init__(self, data_dir: Path, config: ServerConfig) -> None:
        self.data_dir = DataDir(data_dir)
        self._config = config
        self._lock = DirectoryLock(self.data_dir.lock)
        self._database = Database(self.data_dir.database, before_write=self._lock.check_directory)
        self._registry = Registry(self._database)
        self._recorder = Recorder(self._database)
        self.usage = self._recorder.usage
        """What each project has used and may use."""
        self.usage.prices = config.prices
        self._hosts = Hosts(self.data_dir, config, self._charge)
        self._metrics = MetricStore(self._database)
        self.models = Models(self.data_dir, self._hosts, self._recorder, self._registry)
        self.resolver = PolicyResolver(self.models, self._check_directory)
        self.gateway = Gateway(self.resolver, self._recorder)
        self.live = self.gateway.live
        """What is being sampled and trained now, for people who watch."""
        self.jobs = self._make_jobs()
        self.run_logs = RunLogs(self.models)
        self.overview = Overview(self.models, self._hosts, self.jobs, self.gateway)
        self.checkpoints = ModelCheckpoints(self.models, self.jobs, self._metrics, config.llama_cpp)
        self._promotion_store = PromotionStore(self._database)
        self.promotions = Promotions(
            self.models, self._promotion_store, self.checkpoints.changing, required=config.promotion.require
        )
        self.registration = Registration(self._registry, self.models, self._hosts, self.jobs, self._check_directory)
        preflight = Preflight() if config.preflight else None
        self.training = Submission(
            self.models, self.gateway, self.resolver, self.jobs, preflight, self._check_directory
        )
        self._watchdog = Watchdog(self._hosts.processes, self.report)
        self._background: list[asyncio.Task[None]] = []
        self._live_log: LiveLog | None = None

    def _make_jobs(self) -> JobRunner:
        models = self.models
        store = JobStore(
            self._database,
            max_per_project=self._config.limits.max_jobs_per_project,
            on_dropped=RolloutStore.unmark_trained,
        )
        training, adopting = TrainingWork(models, self._recorder, store), AdoptWork(models, store)
        files = FileWork(self.data_dir)
        works: dict[JobKind, Work] = {
            "train": training, "train_sft": training, "fork": adopting, "pull": adopting, "export": files, "push": files
        }  # fmt: skip
        return JobRunner(store, works, models.set_step, self.live.publish)

    def _charge(self, sender: Sender, model: str, device_s: float) -> None:
        self.usage.add(sender[0], model, Amounts(sampling_s=device_s), key_id=sender[1])

    def _check_directory(self) -> None:
        """
        Raises:
            StorageError: the data directory, or its lock or database, was removed or replaced.
        """
        self._lock.check_directory()
        self._database.check_file()

    async def start(self) -> None:
        """Lock the data directory, load what earlier servers left there, and go on with their jobs.

        Raises:
            StorageError: another server uses the data directory.
            ConfigError: a base model is unknown, or `gpu` is set and there is no GPU.
        """
        base_models = [resolve_base_model(name) for name in self._config.models]
        if self._config.gpu and (await asyncio.to_thread(find_devices)).gpus == ():
            raise ConfigError(
                "there is no CUDA device here (`nvidia-smi` lists none, or CUDA_VISIBLE_DEVICES hides them); start "
                "without --gpu to use the CPU"
            )
        await asyncio.to_thread(self._lock.acquire, LOCK_WAIT_S)
        await asyncio.to_thread(shutil.rmtree, self.data_dir.samples, ignore_errors=True)
        await self._registry.start()
        await self.jobs.store.start()
        await self._metrics.start()
        await self._promotion_store.start()
        await self._recorder.start()
        self._live_log = LiveLog(self.live, asyncio.get_running_loop())
        logging.getLogger(LIVE_LOGGER).addHandler(self._live_log)
        for model in await self._registry.models():
            self.models.by_key[model.key] = model
        await self.jobs.recover()
        devices = await asyncio.to_thread(find_devices)
        settings = await asyncio.to_thread(with_engine, self._config.settings, devices, self._config.vllm_python)
        for name in base_models:
            self._hosts.pin(await prepare_base_model(name, self.data_dir), settings)
        self._background.append(asyncio.create_task(self._watchdog.run(), name="watchdog"))
        self._background.append(asyncio.create_task(self._watch_directory(), name="watch the data directory"))
        if (age_s := self._config.record_retention_s) is not None:
            needed = self.jobs.store.needed_exchanges
            forget = forget_regularly(self._recorder, self.gateway.conversations, age_s, needed)
            self._background.append(asyncio.create_task(forget, name="forget old exchanges"))
            forget_jobs = self.jobs.forget_regularly(age_s)
            self._background.append(asyncio.create_task(forget_jobs, name="forget the progress of old jobs"))

    async def _watch_directory(self) -> None:
        """Stop the jobs that run while the data directory is gone: a training step would write its checkpoint into a
        directory that is no longer this server's. Requests notice it by themselves, with each transaction."""
        while True:
            await asyncio.sleep(DIRECTORY_CHECK_S)
            try:
                await asyncio.to_thread(self._check_directory)
            except StorageError as error:
                self.jobs.stop_running(error)

    async def close(self) -> None:
        if self._live_log is not None:
            logging.getLogger(LIVE_LOGGER).removeHandler(self._live_log)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.jobs.close()
        await self._hosts.close()
        with contextlib.suppress(StorageError):
            await self.usage.flush()
        self._database.close()
        self._lock.release()

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "base_models": self._hosts.status()}

    async def obstacles(self) -> dict[str, str]:
        """Describe what keeps this server from working, by the name of the check; empty if nothing does."""
        return await find_obstacles(self._hosts.pinned(), self._recorder, self.data_dir.root)

    async def measurements(self) -> list[Measurement]:
        """Measure jobs, processes, engines, tokens and the disk, for Prometheus.

        Raises:
            DirectoryGoneError: the data directory is gone.
        """
        self._check_directory()
        hosts = self._hosts.all()
        return [
            *measure_tokens(self.gateway.tokens),
            *measure_jobs(self.jobs.counts()),
            *measure_processes(hosts),
            *await measure_engines(hosts),
            measure_disk(self.data_dir.root),
        ]

    async def report(self) -> str:
        """Write a report for people: which processes run, and which tasks wait for what, with stacks."""
        return await write_report(self._hosts.processes(), self.jobs.describe(), self.gateway.ignored)
