"""Use the trainer without server and engine: train a LoRA on the lines of a text file.

    python train.py MODEL lines.txt checkpoints
    torchrun --standalone --nproc-per-node 2 train.py MODEL lines.txt checkpoints

With several processes, each runs this whole program, and the trainer divides the work among them. When started again,
the program continues after the last checkpoint.
"""

import argparse
import os
from pathlib import Path

from transformers import AutoTokenizer

from art.config import LoraConfig, TrainerConfig, TrainSFTConfig
from art.protocol.calls import TrainSft
from art.protocol.samples import TrainingSample
from art.trainer.distributed import Team
from art.trainer.trainer import Trainer


def to_sample(number: int, token_ids: list[int]) -> TrainingSample:
    """Train on every token but the first. Log-probs and advantages are only used with the component "rl"."""
    return TrainingSample(
        sample_id=f"line-{number}",
        rollout_id=f"line-{number}",
        token_ids=token_ids,
        loss_mask=[place > 0 for place in range(len(token_ids))],
        sampling_logprobs=[0.0] * len(token_ids),
        advantages=[0.0] * len(token_ids),
        component="sft",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id of a causal language model")
    parser.add_argument("text", type=Path, help="file whose lines to train on")
    parser.add_argument("checkpoints", type=Path, help="directory for the checkpoints, in PEFT's format")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()

    config = TrainerConfig(device=options.device, num_processes=int(os.environ.get("WORLD_SIZE", "1")))
    team = Team.from_environment(config)
    trainer = Trainer(options.model, config, team)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = [tokenizer.encode(line) for line in options.text.read_text().splitlines()]
    samples = [to_sample(number, line) for number, line in enumerate(lines) if len(line) > 1]

    trainer.init_checkpoint(options.checkpoints / "0000", LoraConfig())
    for step in range(1, options.steps + 1):
        call = TrainSft(
            samples=samples,
            config=TrainSFTConfig(learning_rate=1e-3, batch_size=8),
            from_checkpoint=options.checkpoints / f"{step - 1:04d}",
            to_checkpoint=options.checkpoints / f"{step:04d}",
            job_id=f"step-{step}",  # an existing step with the same id is not trained again
        )
        result = trainer.train(call)
        if team.rank == 0:
            print(f"step {result.step}: loss {result.metrics['loss/train']:.4f}")


if __name__ == "__main__":
    main()
