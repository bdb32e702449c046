"""Yes, no, maybe with `backend.train`, as code of 2026 writes it."""

import asyncio

import art
from art.local import LocalBackend

BASE_MODEL = "Qwen/Qwen3-30B-A3B-Instruct-2507"
STEPS = 20
ROLLOUTS = 32
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
PROMPTS = ["respond with yes, no, maybe", "just no, yes"]


async def rollout(model: art.TrainableModel, prompt: str) -> art.Trajectory:
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": prompt}], metadata={"scenario_id": prompt}
    )
    async with trajectory.track_duration("llm"):
        completion = await model.openai_client().chat.completions.create(
            messages=trajectory.messages(), model=model.get_inference_name(), max_tokens=100, logprobs=True
        )
    trajectory.messages_and_choices.append(completion.choices[0])
    trajectory.reward = REWARDS.get(completion.choices[0].message.content or "", 0.0)
    return trajectory.finish()


async def main():
    model = art.TrainableModel(name="001", project="yes-no-maybe-2026", base_model=BASE_MODEL, report_metrics=[])
    async with LocalBackend() as backend:
        await model.register(backend)
        builder = model.metrics_builder("train")
        for step in range(await model.get_step(), STEPS):
            with builder.activate_context(), builder.measure("time/step_actor_s"):
                groups = await art.gather_trajectory_groups(
                    (art.TrajectoryGroup(rollout(model, prompt) for _ in range(ROLLOUTS)) for prompt in PROMPTS),
                    pbar_desc=f"step {step}",
                    max_metrics=2,
                )
            result = await backend.train(
                model, groups, learning_rate=5e-5, loss_fn="cispo", normalize_advantages=True,
                kl_penalty_coef=0.0, save_checkpoint=True, allow_training_without_logprobs=True,
            )  # fmt: skip
            await model.log(groups, split="train", metrics=result.metrics, step=result.step)
        await model.delete_checkpoints(best_checkpoint_metric="train/reward")


if __name__ == "__main__":
    asyncio.run(main())
