"""Each hook once, under its own name: that it is called, when, with what, and what its answer does."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import typer
from plugin_bench import Bench, make_plugin, prompts
from typer.testing import CliRunner

from minivllm_plugin import hookspecs
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import EngineDeadError, InvalidRequestError, RequestFailedError, RequestRejectedError
from minivllm_plugin.events import BlocksAllocated, BlocksFreed, BlocksHit, BlockStored
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import LogitsRunner, scripted_llm
from minivllm_plugin.views import Admit, Budget, CandidateBlock, EngineState, Reject, RequestView

Seen = list[Any]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def fill(**hooks: Callable[..., Any]) -> Extensions:
    """The registries after one plugin with these hooks was loaded."""
    extensions = Extensions.builtin()
    EnginePlugins(EngineConfig(plugins=(make_plugin(**hooks),)), extensions)
    return extensions


# --- lifecycle --------------------------------------------------------------------------------------------------------


def test_minivllm_configure() -> None:
    def configure(config: Any) -> None:
        assert config.max_num_sequences == 64
        config.max_num_sequences = 3

    llm, _ = scripted_llm(options={"plugins": [make_plugin(configure=configure)]})
    with llm:
        assert llm.config.max_num_sequences == 3
        assert llm.snapshot().max_num_sequences == 3


def test_minivllm_engine_started() -> None:
    seen: Seen = []
    llm, _ = scripted_llm(
        options={"plugins": [make_plugin(engine_started=lambda engine: seen.append((engine, threading.current_thread())))]}
    )
    with llm:
        handle, thread = seen[0]
        assert (len(seen), handle.name, thread.name) == (1, "scripted", "minivllm-engine-scripted")
        assert handle.snapshot().num_blocks == 64


def test_minivllm_engine_stopped() -> None:
    seen: Seen = []
    plugin = make_plugin(engine_stopped=lambda engine, error: seen.append((engine.name, error)))
    llm, _ = scripted_llm(options={"plugins": [plugin]})
    assert seen == []
    llm.close()
    llm.close()
    assert seen == [("scripted", None)]


# --- extension --------------------------------------------------------------------------------------------------------


def test_minivllm_register_models() -> None:
    extensions = fill(register_models=lambda registry: registry.add("AcmeForCausalLM", "acme.models:Acme"))
    assert extensions.models.owner("AcmeForCausalLM") == "acme"
    assert "LlamaForCausalLM" in extensions.models


def test_minivllm_register_attention_backends() -> None:
    seen: Seen = []
    fill(register_attention_backends=seen.append)
    assert [type(registry).__name__ for registry in seen] == ["AttentionBackendRegistry"]


def test_minivllm_register_weight_loaders() -> None:
    seen: Seen = []
    fill(register_weight_loaders=seen.append)
    assert [type(registry).__name__ for registry in seen] == ["WeightLoaderRegistry"]


class Only:
    """A logits processor: nothing but one token may be chosen."""

    argmax_invariant = False

    def validate(self, value: Any, params: SamplingParams) -> None:
        if not isinstance(value, int):
            raise ValueError("only= must be a token id")

    def new_state(self, request: Any) -> None:
        return None

    def apply(self, logits: Any, rows: Sequence[Any]) -> None:
        for number, row in enumerate(rows):
            kept = logits[number, row.value].clone()
            logits[number] = -float("inf")
            logits[number, row.value] = kept


def test_minivllm_register_logits_processors() -> None:
    plugin = make_plugin(register_logits_processors=lambda registry: registry.add("only", Only()))
    llm, _ = scripted_llm(options={"plugins": [plugin]}, runner=LogitsRunner)
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, extra_args={"only": 7})
    with llm:
        assert llm.submit([1, 2, 3], params).result().outputs[0].token_ids == [7, 7, 7]
        with pytest.raises(InvalidRequestError, match="only= must be a token id"):
            llm.submit([1, 2, 3], params.replace(extra_args={"only": "seven"}))


class AfterTokens:
    """A stop criterion: ends after so many tokens; below zero it breaks."""

    def validate(self, value: Any, params: SamplingParams) -> None: ...

    def new_state(self, request: Any) -> None:
        return None

    def check(self, context: Any) -> str | None:
        if context.value < 0:
            raise RuntimeError("below zero")
        return "enough" if len(context.output_token_ids) >= context.value else None


def test_minivllm_register_stop_criteria() -> None:
    plugin = make_plugin(register_stop_criteria=lambda registry: registry.add("after", AfterTokens()))
    llm, _ = scripted_llm(options={"plugins": [plugin]})
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with llm:
        broken = llm.submit([4, 5], params.replace(extra_args={"after": -1}))
        output = llm.submit([1, 2, 3], params.replace(extra_args={"after": 2})).result().outputs[0]
        assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (2, "stop", "enough")
        with pytest.raises(RequestFailedError, match=r"'after' of plugin 'acme'.*below zero"):
            broken.result()
        assert llm.is_healthy


def test_minivllm_register_parsers() -> None:
    extensions = fill(register_parsers=lambda registry: registry.chat_templates.add("acme", "{{ messages[0].content }}"))
    assert extensions.parsers.chat_template("acme") == "{{ messages[0].content }}"


def test_minivllm_register_metrics() -> None:
    seen: Seen = []
    plugin = make_plugin(
        register_metrics=lambda registry: registry.gauge("acme_blocks", "blocks", lambda state: state.num_blocks),
        engine_started=seen.append,
    )
    llm, _ = scripted_llm(options={"plugins": [plugin]})
    with llm:
        assert [(metric.name, metric.value) for metric in seen[0].metrics()] == [("acme_blocks", 64.0)]


def test_minivllm_register_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = typer.Typer()
    cli.command("other")(lambda: None)
    plugin = make_plugin(register_commands=lambda cli: cli.command("acme")(lambda: print("acme was here")))
    plugins = EnginePlugins(EngineConfig(plugins=(plugin,)), Extensions.builtin())
    plugin.minivllm_register_commands(cli)
    assert plugins.reports()[0].hooks == ("register_commands",)
    assert "acme was here" in CliRunner().invoke(cli, ["acme"]).output


def test_minivllm_register_adapters() -> None:
    def door() -> None: ...

    extensions = fill(register_adapters=lambda registry: registry.add("acme", door))
    assert "acme" in extensions.adapters
    assert extensions.adapters.owner("acme") == "acme"


# --- observation ------------------------------------------------------------------------------------------------------


def test_minivllm_request_queued() -> None:
    seen: Seen = []
    bench = Bench(plugins=[make_plugin(request_queued=lambda request, state: seen.append((request, state)))])
    bench.add([1, 2, 3], 5, request_id="a", priority=2, metadata={"tenant": "t"})
    request, state = seen[0]
    assert isinstance(request, RequestView)
    assert request[:2] == ("a", 0)
    assert (request.priority, request.num_prompt_tokens, request.max_tokens, request.tenant) == (2, 3, 5, "t")
    assert isinstance(state, EngineState)
    assert (state.num_waiting, state.num_running, state.num_free_blocks) == (1, 0, 32)


def test_minivllm_step_started() -> None:
    plans: Seen = []
    bench = Bench(plugins=[make_plugin(step_started=plans.append)], max_num_batched_tokens=4)
    bench.add([1, 2, 3, 4, 5, 6], 2, request_id="a")
    bench.finish()
    assert [(plan.request_ids, plan.num_tokens, plan.is_prompt, plan.admitted) for plan in plans] == [
        (("a",), (4,), (True,), ("a",)),
        (("a",), (2,), (True,), ()),
        (("a",), (1,), (False,), ()),
    ]
    assert {plan.budget for plan in plans} == {4}
    assert [plan.state.step for plan in plans] == [1, 2, 3]


def test_minivllm_step_finished() -> None:
    reports: Seen = []
    bench = Bench(plugins=[make_plugin(step_finished=reports.append)])
    seq = bench.add([1, 2, 3], 3, request_id="a")
    bench.finish()
    assert [report.token_ids for report in reports] == [(token,) for token in seq.completion_token_ids]
    assert [report.finished for report in reports] == [(), (), (("a", "length"),)]
    assert [report.num_batched_tokens for report in reports] == [3, 1, 1]
    assert all(report.run_seconds >= 0 <= report.hook_seconds for report in reports)


def test_minivllm_blocks_changed() -> None:
    events: Seen = []
    bench = Bench(plugins=[make_plugin(blocks_changed=events.extend)])
    first = bench.add([1, 2, 3, 4, 5], 1, request_id="a")
    bench.finish()
    second = bench.add([1, 2, 3, 4, 9], 1, request_id="b", cache_salt=None)
    bench.finish()
    key = first.block_keys[0]
    assert events == [
        BlocksAllocated("a", (0, 1)),
        BlockStored((key,), None, (1, 2, 3, 4), 4, (0,)),
        BlocksFreed("a", (1, 0)),
        BlocksHit("b", (0,), (key,)),
        BlocksAllocated("b", (2,)),
        BlocksFreed("b", (2, 0)),
    ]
    assert second.prompt_cached_tokens == 4


def test_minivllm_request_finished() -> None:
    seen: Seen = []
    now = [0.0]
    bench = Bench(
        plugins=[make_plugin(request_finished=lambda request, outcome: seen.append((request, outcome)))],
        policies=[make_plugin("picky", admit=lambda request: Reject("not you") if request.request_id == "c" else None)],
        clock=lambda: now[0],
    )
    bench.add([1, 2, 3], 2, request_id="a")
    bench.add([4, 5], 9, request_id="b")
    now[0] = 1.0
    bench.step()
    now[0] = 3.0
    bench.step()
    bench.engine.abort("b")
    with pytest.raises(RequestRejectedError):
        bench.add([7], request_id="c")
    found = {request.request_id: outcome for request, outcome in seen}
    assert [(name, outcome.reason) for name, outcome in found.items()] == [("a", "length"), ("b", "abort"), ("c", "rejected")]
    ended = found["a"]
    assert (ended.num_prompt_tokens, ended.num_completion_tokens, ended.finished_time) == (3, 2, 3.0)
    assert (ended.queue_seconds, ended.prefill_seconds, ended.decode_seconds) == (1.0, 0.0, 2.0)
    assert found["c"].queue_seconds is None


def test_minivllm_engine_error() -> None:
    seen: Seen = []
    plugin = make_plugin(engine_error=lambda error, plan: seen.append((error, plan)))
    llm, _ = scripted_llm(options={"plugins": [plugin]}, fail_on_call=2)
    with pytest.raises(EngineDeadError):
        llm.submit([1, 2, 3], PARAMS, request_id="a").result()
    llm.close()
    error, plan = seen[0]
    assert len(seen) == 1
    assert str(error) == "call 2 fails on purpose"
    assert plan.request_ids == ("a",)


# --- policies ---------------------------------------------------------------------------------------------------------


def test_minivllm_admit() -> None:
    def admit(request: RequestView, state: EngineState) -> Admit | Reject | None:
        assert state.num_blocks == 32
        return Reject("too long", 1.5) if request.num_prompt_tokens > 3 else Admit()

    bench = Bench(policies=[make_plugin(admit=admit)])
    bench.add([1, 2, 3])
    with pytest.raises(RequestRejectedError, match=r"'acme'.*too long") as caught:
        bench.add([1, 2, 3, 4])
    assert caught.value.retry_after == 1.5
    assert bench.scheduler.num_live_sequences == 1


def test_minivllm_order_waiting() -> None:
    def shortest_first(waiting: Sequence[RequestView]) -> list[str]:
        return [request.request_id for request in sorted(waiting, key=lambda request: request.num_prompt_tokens)]

    plans: Seen = []
    bench = Bench(
        plugins=[make_plugin("watch", step_started=plans.append)],
        policies=[make_plugin(order_waiting=shortest_first)],
        max_num_sequences=1,
    )
    for name, length in (("long", 9), ("short", 2), ("middle", 5)):
        bench.add(list(range(1, 1 + length)), 2, request_id=name)
    bench.finish()
    bench.check_tokens()
    assert [plan.admitted for plan in plans if plan.admitted] == [("short",), ("middle",), ("long",)]


def test_minivllm_step_budget() -> None:
    plans: Seen = []
    bench = Bench(
        plugins=[make_plugin("watch", step_started=plans.append)],
        policies=[make_plugin(step_budget=lambda state: Budget(num_tokens=5, num_prefill_tokens=3, num_sequences=2))],
    )
    for prompt in prompts(4):
        bench.add(prompt)
    bench.finish()
    bench.check_tokens()
    assert {plan.budget for plan in plans} == {5}
    assert max(sum(plan.num_tokens) for plan in plans) <= 5
    assert max(sum(n for n, new in zip(plan.num_tokens, plan.is_prompt, strict=True) if new) for plan in plans) == 3
    assert max(plan.state.num_running for plan in plans) == 2


def test_minivllm_select_victims() -> None:
    asked: Seen = []

    def oldest(running: Sequence[RequestView], blocks_needed: int, state: EngineState) -> list[str]:
        asked.append((running, blocks_needed, state.num_free_blocks))
        return [min(running, key=lambda request: request.arrival).request_id]

    plans: Seen = []
    bench = Bench(
        plugins=[make_plugin("watch", step_started=plans.append)],
        policies=[make_plugin(select_victims=oldest)],
        num_blocks=6,
        max_num_sequences=3,
    )
    for number, prompt in enumerate(prompts(3, 5)):
        bench.add(prompt, 12, request_id=str(number))
    bench.finish()
    bench.check_tokens()
    assert asked
    assert {needed for _, needed, _ in asked} == {1}
    assert {free for *_, free in asked} == {0}
    first = next(plan for plan in plans if plan.preempted)
    assert first.preempted == (min(asked[0][0], key=lambda request: request.arrival).request_id,)


def test_minivllm_order_eviction() -> None:
    asked: list[Sequence[CandidateBlock]] = []

    def newest(candidates: Sequence[CandidateBlock], num_needed: int) -> list[int]:
        asked.append(candidates)
        return [candidate.block_id for candidate in sorted(candidates, key=lambda candidate: candidate.age)]

    bench = Bench(policies=[make_plugin(order_eviction=newest)], num_blocks=4)
    for prompt in ([1, 2, 3, 4, 5], [21, 22, 23, 24, 25]):
        bench.add(prompt, 1)
        bench.finish()
    bench.add([31, 32, 33, 34, 35, 36, 37, 38, 39], 1)  # three blocks; two of the four are blank
    bench.finish()
    assert [[candidate.depth for candidate in candidates] for candidates in asked] == [[0, 0]]
    kept = bench.add([1, 2, 3, 4, 9], 1)
    bench.finish()
    assert kept.prompt_cached_tokens == 4  # the older one; without the policy it would have gone


def test_minivllm_cache_salt() -> None:
    bench = Bench(policies=[make_plugin(cache_salt=lambda request: request.tenant or None)])
    for tenant, cached in (("a", 0), ("b", 0), ("a", 4), ("", 0), ("", 4)):
        seq = bench.add([1, 2, 3, 4, 5], 1, metadata={"tenant": tenant} if tenant else None)
        bench.finish()
        assert (tenant, seq.prompt_cached_tokens) == (tenant, cached)


def test_the_api_is_versioned() -> None:
    assert hookspecs.version_text() == ".".join(map(str, hookspecs.API))


def test_a_module_may_ask_for_a_longer_window() -> None:
    shown: Seen = []
    plugin = make_plugin(order_waiting=lambda waiting: shown.append(len(waiting)))
    plugin.minivllm_waiting_window = 90  # type: ignore[attr-defined]
    bench = Bench(policies=[plugin], max_num_sequences=1)
    for _ in range(100):
        bench.add([1, 2], 1)
    bench.step()
    assert shown == [90]
