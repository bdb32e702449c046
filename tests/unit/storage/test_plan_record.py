from __future__ import annotations

from pathlib import Path

from art.storage.step_files import GroupPlan, PlanRecord, RolloutPlan, plan_file, read_plans, write_plan


def record(job_id: str, created_at: float, **fields: object) -> PlanRecord:
    values = {"kind": "train", "from_step": 3, "step": 4, "trained": True, "ledger": {"ledger/trained_tokens": 2.0}}
    return PlanRecord.model_validate(values | {"job_id": job_id, "created_at": created_at} | fields)


ROLLOUT = RolloutPlan(index=1, label="groups[0].trajectories[1]", exchange_ids=[["ex_1"]], trained_tokens=5)


def test_records_of_a_step_come_back_in_the_order_in_which_the_jobs_ended(tmp_path: Path) -> None:
    group = GroupPlan(index=0, left_out="equal_rewards", rollouts=[ROLLOUT])
    first, second = record("job-zzzz", 1.0), record("job-aaaa", 2.0, groups=[group])
    for one in (second, first):
        write_plan(tmp_path / "0004", one)
    assert read_plans(tmp_path / "0004") == [first, second]
    assert read_plans(tmp_path / "0005") == []


def test_a_job_that_runs_again_replaces_its_record(tmp_path: Path) -> None:
    write_plan(tmp_path, record("job-aaaa", 1.0, trained=False))
    write_plan(tmp_path, record("job-aaaa", 2.0))
    assert [(one.created_at, one.trained) for one in read_plans(tmp_path)] == [(2.0, True)]
    assert [path.name for path in tmp_path.iterdir()] == ["plan-job-aaaa.json"]


def test_a_damaged_record_is_skipped(tmp_path: Path) -> None:
    write_plan(tmp_path, record("job-aaaa", 1.0))
    plan_file(tmp_path, "job-bbbb").write_text('{"job_id": ')
    assert [one.job_id for one in read_plans(tmp_path)] == ["job-aaaa"]


def test_a_rollout_is_dropped_for_the_reason_that_took_most_of_it() -> None:
    assert ROLLOUT.dropped_because is None
    assert ROLLOUT.drop("sampler_mismatch", 2).dropped_because is None
    dropped = ROLLOUT.drop("constraint_mismatch", 1).drop("sampler_mismatch", 4)
    assert (dropped.trained_tokens, dropped.dropped_because) == (0, "sampler_mismatch")
    assert RolloutPlan(index=0, label="").dropped_because == "nothing_sampled"
    assert RolloutPlan(index=0, label="", context_tokens=3).dropped_because is None
