"""A browser walks every view of the page over a real training run: what it shows, what a click does, what is harmless."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

import art
from art.errors import PromotionError
from art.protocol.promotions import Gate, MeasuredScores
from art.storage.layout import DataDir
from art_page.export import export_page
from art_page.viewer import Viewer
from art_recipes.comparing.model_comparison import write_comparison
from tests.page.browser import Walker
from tests.support import shop_run
from tests.support.comparisons import make_comparison
from tests.support.shop_run import HOSTILE, NAME, PROJECT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(300)]
RUN = f"#/run/{PROJECT}/{NAME}"
STEP = 2
COMPARISON = "shop-test-seed0"
ROLLOUT = f"{RUN}/rollout/train/{STEP}/1/1"


@pytest.fixture(autouse=True)
async def trained(model: art.TrainableModel, data_dir: Path) -> None:
    """Every test looks at the trained model, and at a comparison with a hostile label."""
    write_comparison(data_dir / "comparisons" / COMPARISON, make_comparison(COMPARISON, 5.0, label=HOSTILE))


async def log_in(walker: Walker, backend: art.LocalBackend) -> None:
    if not walker.base:
        await walker.open(await backend.page_link())
        await walker.sees(NAME)
        assert "login=" not in walker.page.url, "the code of a login link stays in the address"


async def test_a_visit_costs_few_requests_and_bytes(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    for view in ("#/", RUN):
        page = await (await walker.browser.new_context()).new_page()
        await page.context.add_cookies(await walker.page.context.cookies())  # type: ignore[arg-type]
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("Network.enable")
        num_requests, num_bytes = 0, 0

        def count(_: object) -> None:
            nonlocal num_requests
            num_requests += 1

        def add(event: dict[str, float]) -> None:
            nonlocal num_bytes
            num_bytes += int(event["encodedDataLength"])

        devtools.on("Network.requestWillBeSent", count)
        devtools.on("Network.loadingFinished", add)
        await page.goto(f"{walker.base}{view}")
        await page.get_by_text(NAME).locator("visible=true").first.wait_for()
        await page.wait_for_timeout(1000)
        assert num_requests <= 12, f"{view}: {num_requests} requests at the first visit"
        num_bytes = 0
        await page.reload()
        await page.get_by_text(NAME).locator("visible=true").first.wait_for()
        await page.wait_for_timeout(1000)
        assert num_bytes <= 60_000, f"{view}: {num_bytes} bytes at a further visit"
        await page.context.close()


async def test_runs_and_one_run(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go("#/", NAME)
    await walker.shoot("runs")
    await walker.page.get_by_role("link", name=NAME).first.click()
    await walker.sees("Findings")
    await walker.check("overview")
    await walker.shoot("run")


async def test_any_curve_can_be_found(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(f"{RUN}/curves", "train/reward")
    await walker.page.get_by_placeholder("Search").fill("odd/")
    assert await walker.page.get_by_text(HOSTILE).count() > 0, "a metric's name is text"
    await walker.page.get_by_role("checkbox", name=re.compile("odd.<script>")).first.check()
    await walker.check("a curve with a hostile name")
    assert "odd" in walker.page.url, "the selection is in the address"
    await walker.shoot("curves")


async def test_curves_over_tokens_are_saved_and_arranged(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    page = walker.page
    metrics = "metric=train/reward&metric=data/reward_hist"
    await walker.go(f"{RUN}/curves?{metrics}", "data/reward_hist")
    await page.get_by_label("Horizontal axis").select_option("tokens")
    await walker.check("tokens across")
    assert "x=tokens" in page.url
    for chart in await page.locator("figure.chart").all():
        name = str(await chart.locator("h3").inner_text())
        for form, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg"), ("CSV", b"step," if "hist" in name else b"curve,")):
            await chart.get_by_text("Save", exact=True).click()
            async with page.expect_download() as download:
                await chart.get_by_role("button", name=form).click()
            file = await (await download.value).path()
            assert file.read_bytes().startswith(begins), (name, form)
            assert file.stat().st_size > 100
    await page.get_by_role("button", name="Move to the left: data/reward_hist").click()
    await page.get_by_role("button", name="Save layout").click()
    await page.get_by_label("Name of this layout").fill(f"mine {HOSTILE}"[:60])
    await page.get_by_role("button", name="Save layout").click()
    await walker.go(f"{RUN}/curves?metric=train/reward", "train/reward")
    await page.get_by_label("Layout", exact=True).select_option(index=1)
    await page.locator("figure.chart").nth(1).wait_for()
    assert await page.locator("figure.chart h3").all_inner_texts() == ["data/reward_hist", "train/reward"]
    assert await page.get_by_label("Horizontal axis").input_value() == "tokens"
    await walker.check("a saved layout")
    await page.get_by_role("button", name="Delete layout").click()
    assert await page.get_by_label("Layout", exact=True).is_hidden()


async def test_rollouts_are_filtered_searched_and_opened(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(f"{RUN}/rollouts", "rollouts")
    await walker.shoot("rollouts")
    search = walker.page.get_by_placeholder("search the texts")
    await search.fill('article 2 AND "')
    await search.press("Enter")
    await walker.check("a search with the syntax of queries")
    await search.fill("rice")
    await search.press("Enter")
    await walker.page.locator("mark").first.wait_for()
    await walker.page.keyboard.press("Escape")
    await walker.go(f"{RUN}/rollouts?outcome=infra_fault", "infra")
    await walker.go(f"{RUN}/rollouts?split=train&step={STEP}", "rollouts")
    await walker.page.locator("tbody tr a").first.click()
    await walker.sees("Conversation")
    await walker.check("a rollout from the table")


async def test_a_rollout_is_read_as_text(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(ROLLOUT, "look_up")
    assert await walker.page.get_by_text(HOSTILE).count() > 0
    assert await walker.page.locator("main script, main img[src='x']").count() == 0
    await walker.shoot("rollout")
    await walker.go(f"{ROLLOUT}?tab=judge", "characters.")
    await walker.shoot("judge")
    await walker.go(f"{ROLLOUT}?tab=branches", "Branches")
    await walker.go(f"{ROLLOUT}?tab=record", "served")


async def test_a_copied_request_gives_the_answer_again(
    walker: Walker, backend: art.LocalBackend, model: art.TrainableModel
) -> None:
    await log_in(walker, backend)
    path = f"view/api/runs/{PROJECT}/{NAME}/rollouts/train/3/1/1"
    fetch = "path => fetch(path).then(answer => answer.json())"
    detail = await walker.page.evaluate(fetch, path)
    sampled = [item for history in detail["histories"] for item in history["items"] if item["is_sampled"]]
    num_repeated = 0
    for item in sampled:
        request = await walker.page.evaluate(fetch, f"{path}/request?exchange={item['exchange_id']}")
        if request["notes"]:  # a grammar held it to a tool call
            assert item["tool_calls"]
            continue
        answer = await model.openai_client().chat.completions.create(**request["body"])
        assert (answer.choices[0].message.content or "") == item["text"]
        num_repeated += 1
    assert num_repeated


async def test_two_rollouts_of_different_steps_are_compared(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(f"{RUN}/rollout/train/1/1/1", "mark to compare")
    await walker.page.get_by_role("button", name="mark to compare").click()
    await walker.go(ROLLOUT, "difference from train/1/1/1")
    await walker.page.get_by_role("link", name="difference from").click()
    await walker.sees("second minus first")
    await walker.check("difference")
    await walker.shoot("difference")
    await walker.go(f"{RUN}/group/train/{STEP}/1?form=compact", "leaves the best")
    await walker.shoot("group-compact")


@pytest.mark.parametrize(
    "colour",
    ["sampling_logprob", "policy_logprob", "importance_ratio", "entropy", "advantage", "mask", "policy_version"],
)
async def test_exact_tokens_in_each_colour(walker: Walker, backend: art.LocalBackend, colour: str) -> None:
    await log_in(walker, backend)
    await walker.go(f"{ROLLOUT}?tab=tokens&color={colour}", "Exact tokens")
    await walker.page.get_by_text("<|im_start|>").first.wait_for()
    await walker.check(colour)
    await walker.shoot(f"tokens-{colour}")


async def test_groups_trees_ledgers_and_costs(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(f"{RUN}/group/train/{STEP}/1", "differs in message")
    await walker.shoot("group")
    await walker.go(f"{RUN}/tree/{STEP}", "learnt")
    await walker.shoot("tree")
    await walker.go(f"{RUN}/ledger/{STEP}", "trained")
    await walker.shoot("ledger")
    await walker.go(f"{RUN}/costs", "Costs")
    await walker.shoot("costs")


async def test_checkpoints_are_compared_promoted_and_deleted(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(f"{RUN}/checkpoints?a=0&b={shop_run.NUM_STEPS}", "paired difference")
    await walker.shoot("checkpoints")
    dialog, checkpoints = walker.page.get_by_role("dialog"), walker.page.get_by_role("region", name="Checkpoints")
    two, one = (
        checkpoints.get_by_role("row").filter(has=walker.page.get_by_role("cell", name=str(step), exact=True))
        for step in (2, 1)
    )
    for row, says in ((one, "So far no checkpoint is promoted"), (two, "So far step 1 answers them")):
        await row.get_by_role("button", name="Promote").click()
        await dialog.get_by_text(says).wait_for()
        await walker.shoot("promotion")
        await dialog.get_by_role("button", name="Promote").click()
        await row.get_by_text("promoted", exact=True).wait_for()
        assert await walker.page.get_by_text("promoted", exact=True).count() == 1
        assert await row.get_by_role("button", name="Delete").is_disabled()
    await walker.shoot("promoted")
    await one.get_by_text("Delete").click()
    await dialog.get_by_role("button", name=re.compile("Delete")).click()
    await one.wait_for(state="detached")
    await walker.check("a deleted checkpoint")


async def test_the_history_of_promotions(walker: Walker, backend: art.LocalBackend, model: art.TrainableModel) -> None:
    await log_in(walker, backend)
    better, equal = ([[float(i % 4 != 0)] for i in range(40)], [[float(i % 4 == 0)] for i in range(40)])
    await backend.checkpoints.promote(model, 2)
    worse = MeasuredScores(source=f"shop {HOSTILE}", reference_step=2, reference=better, candidate=equal)
    with pytest.raises(PromotionError):
        await backend.checkpoints.promote(model, 3, gate=Gate(require=0.02, measured=worse))
    await backend.checkpoints.promote(
        model, 3, gate=Gate(require=0.02, measured=worse), force=True, note=f"a leak in step 2 {HOSTILE}"
    )
    passes = MeasuredScores(source="shop, split test, seed 0", reference_step=3, reference=equal, candidate=better)
    await backend.checkpoints.promote(model, 2, gate=Gate(require=0.02, measured=passes))
    await walker.go(f"{RUN}/checkpoints?a=0&b=3", "in place of 3")
    history = walker.page.get_by_role("region", name="Promotions")
    rows = [" ".join(text.split()) for text in await history.get_by_role("row").all_inner_texts()]
    for row, says in zip(rows[1:], (
        ["2 passed in place of 3", "0.750 against 0.250 of step 3", "+0.500, above +0.", "+0.020 operator"],
        ["3 forced in place of 2", "0.250 against 0.750 of step 2", "−0.500, above −0.", f"a leak in step 2 {HOSTILE}"],
        ["3 refused", "0.250 against 0.750 of step 2", "operator", "40 scenarios"],
        ["2 no gate"],
    ), strict=False):  # fmt: skip
        for text in says:
            assert text in row, (text, row)
    await history.get_by_text("shop, split test, seed 0, 40 scenarios").click()
    await walker.sees("so it is above the required +0.02")
    await walker.check("the history of promotions")
    await walker.shoot("promotions")


async def test_runs_are_compared(walker: Walker, backend: art.LocalBackend, tiny_model: Path) -> None:
    other = art.TrainableModel(name="other", project=PROJECT, base_model=str(tiny_model))
    await other.register(backend)
    await shop_run.hold_out(other)
    await log_in(walker, backend)
    await walker.go(f"#/compare?run={PROJECT}/{NAME}&run={PROJECT}/other", "other")
    await walker.shoot("compare")


async def test_a_run_gets_labels_and_is_found_by_them(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    page, dialog = walker.page, walker.page.get_by_role("dialog")
    await walker.go(RUN, "Add tags or notes")
    await page.get_by_text("Add tags or notes").click()
    await dialog.get_by_label("Tags").fill("baseline, long run")
    await dialog.get_by_label("Notes").fill(f"before the new reward {HOSTILE}")
    await dialog.get_by_text("Save").click()
    await walker.sees("long run")
    await page.get_by_role("button", name=f"Star {PROJECT}/{NAME}").click()
    await page.locator(".star[aria-pressed='true']").wait_for()
    await walker.check("labels")
    await walker.shoot("labels")
    await walker.go("#/?text=new+reward", NAME)
    await page.get_by_role("button", name="Held-out").click()
    assert "sort=heldout" in page.url
    await walker.go(RUN, "long run")
    await page.get_by_text("Archive", exact=True).click()
    await walker.sees("Take out of the archive")
    await page.goto(f"{walker.base}#/")
    await page.get_by_text("Archived", exact=True).wait_for()
    assert await page.locator(".run-link", has_text=NAME).count() == 0
    await page.get_by_label("Archived").check()
    await page.locator(".run-link", has_text=NAME).wait_for()
    await walker.go(RUN, "Take out of the archive")
    await page.get_by_text("Take out of the archive").click()
    await page.get_by_text("Archive", exact=True).wait_for()


async def test_runs_that_differ_in_the_seed_are_one_line(
    walker: Walker, backend: art.LocalBackend, tiny_model: Path
) -> None:
    for seed in range(2):
        model = art.TrainableModel(name=f"agent-seed{seed}", project="seeds", base_model=str(tiny_model))
        await model.register(backend)
        await model.record_settings({"recipe": {"seed": seed}, "task": {"name": "shop", "headline_metric": "reward"}})
        await shop_run.hold_out(model)
    await log_in(walker, backend)
    await walker.go("#/?project=seeds", "agent-seed*")
    assert await walker.page.locator(".run-row").count() == 1
    await walker.page.get_by_role("button", name="agent-seed*").click()
    await walker.sees("agent-seed1")
    await walker.shoot("seeds")
    await walker.go("#/compare?run=seeds/agent-seed0,agent-seed1", "Settings that differ")
    await walker.sees("recipe.seed")
    await walker.shoot("seeds-as-one")
    await walker.go("#/run/seeds/agent-seed0/settings", "Command")
    await walker.sees("gpus")
    await walker.shoot("settings")


async def test_what_is_sampled_now_is_shown(
    walker: Walker, backend: art.LocalBackend, model: art.TrainableModel
) -> None:
    await log_in(walker, backend)
    await walker.page.goto(f"{walker.base}#/live")
    served = asyncio.gather(*(shop_run.serve_customer(model, "live \u202etea", 3 + place) for place in range(4)))
    await walker.sees("live ‹RLO›tea")
    await served
    await walker.sees("decode")
    await walker.check("live")
    await walker.shoot("live")
    await walker.go("#/system", "engine")
    await walker.shoot("system")


async def test_twelve_of_many_live_requests_are_seen_at_once(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    page = await walker.page.context.new_page()
    await page.set_viewport_size({"width": 1440, "height": 900})
    session = {
        "key_id": "k", "project": None, "scopes": ["infer"], "has_server": True, "base_url": "http://x/v1", "version": "1"
    }  # fmt: skip
    events: list[tuple[str, dict[str, object]]] = [("reset", {"kind": "reset"})]
    for number in range(49):
        request = {
            "id": f"ex{number}", "project": "shop", "name": "clerk", "policy_version": 3, "rollout_id": None,
            "scenario": f"tic_tac_toe/train/3/{number}", "turn": 1 + number % 4, "num_prompt_tokens": 47,
            "started_at": time.time(), "last_role": "user", "last_text": "1O3 X56 789 " * 9, "max_tokens": 200,
            "text": "The centre is free, and a corner too. " * (1 + number % 30), "num_tokens": 12, "is_text_known": True,
        }  # fmt: skip
        events.append(("request_started", request))
    body = "".join(
        f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n" for number, (kind, data) in enumerate(events)
    )
    await page.route("**/view/api/session", lambda route: route.fulfill(json=session))
    await page.route("**/view/api/live", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    await page.goto(f"{walker.base}#/live")
    await page.get_by_text("turn 1, step 3").first.wait_for()
    await page.wait_for_timeout(1500)
    num_seen = await page.evaluate(
        "[...document.querySelectorAll('.live-card')].map(card => card.getBoundingClientRect())"
        ".filter(box => box.top >= 0 && box.bottom <= innerHeight && box.height > 0).length"
    )
    assert await page.locator(".live-card").count() == 49
    assert num_seen >= 12
    if walker.shots is not None:
        await page.screenshot(path=walker.shots / "live-49.png")
        await page.set_viewport_size({"width": 400, "height": 900})
        await page.emulate_media(color_scheme="dark")
        await page.wait_for_timeout(500)
        await page.screenshot(path=walker.shots / "live-49-400-dark.png")
    await page.close()


async def test_a_copy_on_the_disk_shows_all_views(
    walker: Walker, backend: art.LocalBackend, data_dir: Path, tmp_path: Path
) -> None:
    await log_in(walker, backend)
    said: list[str] = []
    viewer = Viewer(data_dir=DataDir(data_dir), index_path=tmp_path / "index.db")
    try:
        await asyncio.to_thread(
            export_page, viewer, tmp_path / "copy", lambda done, total, _: said.append(f"{done}/{total}")
        )
    finally:
        viewer.close()
    assert said[0].startswith("0/")
    assert said[-1] == f"{len(said) - 1}/{len(said) - 1}"
    text = "".join(path.read_text() for path in (tmp_path / "copy" / "answers").rglob("*.js"))
    assert str(data_dir) not in text, "a copy says where files lie"
    copy = Walker(walker.browser, await walker.page.context.new_page(), None)
    copy.base = (tmp_path / "copy" / "index.html").as_uri()
    copy.watch(copy.page)
    copy.base, whole = copy.base.removesuffix("index.html"), copy.base
    for address, says in {
        "#/": NAME, RUN: "Findings", f"{RUN}/curves?metric=train/reward&x=tokens": "train/reward",
        f"{RUN}/rollouts?split=train&sort=reward": "rollouts", f"{RUN}/rollouts?outcome=infra_fault": "infra",
        ROLLOUT: "look_up", f"{ROLLOUT}?tab=tokens": "<|im_start|>", f"{ROLLOUT}?tab=branches": "Branches",
        f"{RUN}/group/train/{STEP}/1": "differs in message", f"{RUN}/tree/{STEP}": "learnt", f"{RUN}/ledger": "trained",
        f"{RUN}/ledger/{STEP}": "trained", f"{RUN}/checkpoints": "paired difference", f"{RUN}/costs": "Costs",
        "#/comparisons": "Models compared", f"#/comparisons/{COMPARISON}": "given up", f"#/compare?run={PROJECT}/{NAME}": "Choose 2",
        f"{RUN}/settings": "base model",
        f"#/difference?a={PROJECT}/{NAME}/train/1/1/1&b={PROJECT}/{NAME}/train/2/1/1": "second minus first",
    }.items():  # fmt: skip
        await copy.page.goto(f"{whole}{address}")
        await copy.sees(says)
        await copy.check(f"copy {address}")
        assert "This copy of the page has no" not in await copy.page.inner_text("main"), address
    await copy.page.close()


async def test_models_compared(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go("#/comparisons", "Models compared")
    await walker.page.get_by_role("link", name=COMPARISON).click()
    await walker.sees("given up")
    await walker.sees("no score")
    await walker.sees(HOSTILE)
    await walker.page.get_by_label("Horizontal axis").select_option("cost")
    await walker.sees("USD for 1,000 rollouts")
    assert "axis=cost" in walker.page.url
    await walker.check("a comparison with a hostile label")
    await walker.shoot("comparison")


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (1440, "light"), (2000, "dark")])
async def test_every_view_fits_the_window_and_is_accessible(
    walker: Walker, backend: art.LocalBackend, width: int, scheme: str
) -> None:
    await log_in(walker, backend)
    await walker.page.set_viewport_size({"width": width, "height": 900})
    await walker.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    barriers: dict[str, list[str]] = {}
    for name, address in {
        "runs": "#/", "run": RUN, "curves": f"{RUN}/curves", "rollouts": f"{RUN}/rollouts", "rollout": ROLLOUT,
        "tokens": f"{ROLLOUT}?tab=tokens", "compact": f"{RUN}/group/train/{STEP}/1?form=compact",
        "difference": f"#/difference?a={PROJECT}/{NAME}/train/1/1/1&b={PROJECT}/{NAME}/train/2/1/1", "group": f"{RUN}/group/train/{STEP}/1", "tree": f"{RUN}/tree/{STEP}",
        "ledger": f"{RUN}/ledger/{STEP}", "checkpoints": f"{RUN}/checkpoints?a=0&b=3", "costs": f"{RUN}/costs",
        "settings": f"{RUN}/settings", "compare": f"#/compare?run={PROJECT}/{NAME}&run=seeds/agent-seed0,agent-seed1",
        "comparisons": "#/comparisons", "comparison": f"#/comparisons/{COMPARISON}", "live": "#/live", "system": "#/system",
    }.items():  # fmt: skip
        await walker.page.goto(f"{walker.base}{address}")
        await walker.page.wait_for_timeout(700)
        await walker.check(f"{name} at {width}")
        barriers |= {f"{name}, {rule}": nodes for rule, nodes in (await walker.find_barriers()).items()}
        await walker.shoot(f"{name}-{width}-{scheme}")
    await walker.page.set_viewport_size({"width": 1280, "height": 860})
    await walker.page.emulate_media(color_scheme="light")
    assert barriers == {}


async def test_the_keyboard_reaches_a_rollout(walker: Walker, backend: art.LocalBackend) -> None:
    await log_in(walker, backend)
    await walker.go(f"{RUN}/rollouts?split=train&step={STEP}", "rollouts")
    await walker.page.locator("details.column-choice:visible").wait_for()  # the rows and the task's metrics are there
    for key in ("j", "j", "Enter"):
        await walker.page.keyboard.press(key)
    await walker.sees("Conversation")
    before = walker.page.url
    await walker.page.keyboard.press("j")
    await walker.page.wait_for_function("before => location.href !== before", arg=before)
    await walker.page.keyboard.press("?")
    await walker.sees("next")
    await walker.page.keyboard.press("Escape")
    await walker.check("keyboard")
