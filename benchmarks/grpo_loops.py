"""Whole GRPO steps, by ART's engine and trainer and by TRL's `GRPOTrainer`, each in a process of its own.

Both start from the same model directory and do a step when they are told to, so that they can take turns. The prompts
of a step and the reward are the same; completions are sampled, and all have the same length: TRL must not draw the
end-of-sequence token, and our request names no token to stop at.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from art.config import EngineConfig, PpoConfig, TrainConfig, TrainerConfig
from art.engine import GenerateRequest
from art.engines.torch.embedded import TorchEngine
from art.protocol.calls import Train
from art.protocol.samples import TrainingSample
from art.runtime.publish import publish
from art.storage import checkpoints
from art.trainer.trainer import Trainer
from benchmarks.in_process import InProcessEngine, drain
from benchmarks.models import LORA
from benchmarks.timing import Stopwatch, Timing

COMPLETIONS = 8
NEW_TOKENS = 64
LEARNING_RATE = 1e-5

TOTAL, GENERATE, TRAIN, PUBLISH, SCORE = "total", "generate", "train", "publish", "score"
"""Parts of a step. Publish is ours only: checkpoint to engine, with the handshake. Score is TRL's own time between
generation and training; ours is a part of train."""

StepTimes = dict[str, Timing]


@dataclass(frozen=True, slots=True)
class Work:
    """What each step does."""

    model: Path
    """Base model and tokenizer."""
    device: str
    dtype: str
    num_threads: int
    num_prompts: int
    prompt_tokens: int
    vocab_size: int
    num_rounds: int

    def prompts(self, number: int) -> list[list[int]]:
        """Token ids of round `number`; the last id of the vocabulary is the end of a sequence, and in none."""
        rng = random.Random(number)
        return [
            [rng.randrange(self.vocab_size - 1) for _ in range(self.prompt_tokens)] for _ in range(self.num_prompts)
        ]


def reward(token_ids: Sequence[int]) -> float:
    """The share of even tokens: it differs within every group."""
    return statistics.mean(1 - token % 2 for token in token_ids)


class Worker:
    """A process that does one step whenever it is asked to."""

    def __init__(self, loop: Callable[[Work, Connection], None], work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(loop, work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def step(self, number: int) -> StepTimes:
        """Raises EOFError if the process has died; its traceback is on standard error."""
        self._connection.send(number)
        times: StepTimes = self._connection.recv()
        return times

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def serve(loop: Callable[[Work, Connection], None], work: Work, connection: Connection) -> None:
    """Run `loop` until the other end of the connection closes."""
    try:
        loop(work, connection)
    except EOFError:
        return


# -- ours --


def run_ours(work: Work, connection: Connection) -> None:
    """Engine and trainer in one process, each with all threads in its own part of the step."""
    hf_logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = {"device": work.device, "dtype": work.dtype, "num_threads": work.num_threads}
    engine = TorchEngine.load(str(work.model), EngineConfig.model_validate(settings))
    trainer = Trainer(str(work.model), TrainerConfig.model_validate(settings))
    # The clipped surrogate with a mean over tokens, rewards over the group's deviation: what TRL does by default.
    config = TrainConfig(loss=PpoConfig(clip_high=0.2), learning_rate=LEARNING_RATE)
    with tempfile.TemporaryDirectory() as directory:
        last = Path(directory, "0")
        trainer.init_checkpoint(last, LORA)
        _publish(engine, last)
        while True:
            number = connection.recv()
            times, watch = {}, Stopwatch(work.device)
            samples = _sample_groups(engine, last.name, work, number)
            times[GENERATE] = watch.lap()
            new = Path(directory, str(number + 1))
            trainer.train(
                Train(samples=samples, config=config, from_checkpoint=last, to_checkpoint=new, job_id=str(number))
            )
            times[TRAIN] = watch.lap()
            _publish(engine, new)
            engine.unload_adapter(last.name)
            times[PUBLISH] = watch.lap()
            connection.send({TOTAL: watch.total(), **times})
            checkpoints.delete(last)
            last = new


def _publish(engine: TorchEngine, checkpoint: Path) -> None:
    asyncio.run(publish(InProcessEngine(engine), checkpoint.name, checkpoint))


def _sample_groups(engine: TorchEngine, adapter: str, work: Work, number: int) -> list[TrainingSample]:
    prompts = work.prompts(number)
    for group, prompt in enumerate(prompts):
        for index in range(COMPLETIONS):
            request = GenerateRequest(
                request_id=f"{group}-{index}",
                adapter=adapter,
                prompt_token_ids=prompt,
                max_tokens=NEW_TOKENS,
                stop_token_ids=(),
                seed=number * 10_000 + group * COMPLETIONS + index,
            )
            engine.submit(request, stream=False)
    chunks = {output.request_id: output.chunk for output in drain(engine) if output.chunk is not None}
    samples = []
    for group, prompt in enumerate(prompts):
        members = [(name, chunks[name]) for name in (f"{group}-{index}" for index in range(COMPLETIONS))]
        rewards = [reward(chunk.token_ids) for _, chunk in members]
        for (name, chunk), value in zip(members, rewards, strict=True):
            advantage = (value - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
            assert len(chunk.token_ids) == NEW_TOKENS
            samples.append(
                TrainingSample(
                    sample_id=name,
                    rollout_id=name,
                    token_ids=prompt + chunk.token_ids,
                    loss_mask=[False] * len(prompt) + [True] * NEW_TOKENS,
                    sampling_logprobs=[0.0] * len(prompt) + chunk.logprobs,
                    advantages=[0.0] * len(prompt) + [advantage] * NEW_TOKENS,
                )
            )
    return samples


# -- TRL's --


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """One word, `w7`, for each token, so that a prompt has the tokens that it is made of. TRL takes text only."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = f"w{vocab_size - 1}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=last, pad_token=last).save_pretrained(path)


def run_trl(work: Work, connection: Connection, *, gradient_checkpointing: bool = True) -> None:
    """`GRPOTrainer` with `transformers` for generation. Gradient checkpointing is on by default there: it saves memory
    that these small models do not need, for time."""
    import peft
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    times: StepTimes = {}
    watch = Stopwatch(work.device)

    class Timed(GRPOTrainer):
        """Says how long its parts take."""

        def _generate(self, prompts: list[Any]) -> Any:
            with _timed(times, GENERATE, work.device):
                return super()._generate(prompts)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with _timed(times, SCORE, work.device):
                outputs = super()._generate_and_score_completions(inputs)
            assert bool(outputs["completion_mask"].all())
            assert outputs["completion_mask"].shape == (work.num_prompts * COMPLETIONS, NEW_TOKENS)
            assert outputs["prompt_mask"].sum() == outputs["prompt_mask"].shape[0] * work.prompt_tokens
            return outputs

    class Paced(TrainerCallback):  # type: ignore[misc]
        """A step only when asked for."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            connection.recv()
            times.clear()
            watch.restart()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            total = watch.total()
            scored = times[SCORE]
            connection.send(
                {TOTAL: total, GENERATE: times[GENERATE], SCORE: scored - times[GENERATE], TRAIN: total - scored}
            )

    def reward_completions(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(token_ids) for token_ids in completion_ids]

    with tempfile.TemporaryDirectory() as directory:
        prompts = [" ".join(f"w{t}" for t in ids) for n in range(work.num_rounds) for ids in work.prompts(n)]
        trainer = Timed(
            model=str(work.model),
            reward_funcs=reward_completions,
            args=GRPOConfig(
                output_dir=directory,
                model_init_kwargs={"dtype": work.dtype},
                use_cpu=work.device == "cpu",
                bf16=work.dtype == "bfloat16",
                gradient_checkpointing=gradient_checkpointing,
                per_device_train_batch_size=COMPLETIONS,  # TRL's default; all rows at once take longer on a CPU
                gradient_accumulation_steps=work.num_prompts,
                num_generations=COMPLETIONS,
                max_completion_length=NEW_TOKENS,
                generation_kwargs={"min_new_tokens": NEW_TOKENS},
                learning_rate=LEARNING_RATE,
                max_steps=work.num_rounds,
                shuffle_dataset=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            peft_config=peft.LoraConfig(
                task_type="CAUSAL_LM", r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"
            ),
            callbacks=[Paced()],
        )
        trainer.remove_callback(PrinterCallback)
        torch.set_num_threads(work.num_threads)
        trainer.train()


@contextmanager
def _timed(times: StepTimes, name: str, device: str) -> Iterator[None]:
    watch = Stopwatch(device)
    yield
    times[name] = watch.total()
