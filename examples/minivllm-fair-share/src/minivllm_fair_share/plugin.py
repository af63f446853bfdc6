"""The plugin: everything that the engine calls. One object an engine, on that engine's thread."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm_fair_share.ban_tokens import BanTokens
from minivllm_fair_share.life_log import LifeLog
from minivllm_fair_share.settings import Settings
from minivllm_fair_share.shares import Shares
from minivllm_plugin.events import RequestOutcome, StepPlan
from minivllm_plugin.plugins import EngineState, RequestView, hookimpl

if TYPE_CHECKING:
    import typer

    from minivllm_plugin.extensions.logits import LogitsProcessorRegistry
    from minivllm_plugin.extensions.models import ModelRegistry
    from minivllm_plugin.models.config import ModelConfig

__all__ = ["FairShare"]

ARCEE = "ArceeForCausalLM"


class FairShare(LifeLog):
    """Weighted fair sharing between tenants, once it is named: ``LLM(policies=["fair-share"])``.

    Installed and not named, it logs, counts, and adds ``ban_tokens`` and the Arcee architecture, but steers nothing.

    Args:
        settings: None reads the file that ``MINIVLLM_FAIR_SHARE`` names.
    """

    minivllm_name = "fair-share"
    minivllm_api = ">=1.0,<2"

    def __init__(self, settings: Settings | None = None) -> None:
        self.shares = Shares(Settings.from_environment() if settings is None else settings)

    # --- observes: the accounts; the log is the base class's ------------------------------------------------------

    def on_queued(self, request: RequestView, state: EngineState) -> None:
        self.shares.join(request.request_id, request.tenant)
        super().on_queued(request, state)

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        for request_id, num_tokens in zip(plan.request_ids, plan.num_tokens, strict=True):
            self.shares.charge(request_id, num_tokens)
        super().minivllm_step_started(plan)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        self.shares.leave(request.request_id)
        super().minivllm_request_finished(request, outcome)

    # --- decides --------------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView]) -> list[str]:
        return self.shares.order(waiting)

    @hookimpl
    def minivllm_select_victims(self, running: Sequence[RequestView]) -> list[str]:
        return self.shares.victims(running)

    # --- contributes ----------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_register_logits_processors(self, registry: "LogitsProcessorRegistry") -> None:
        registry.add("ban_tokens", BanTokens())

    @hookimpl
    def minivllm_register_models(self, registry: "ModelRegistry") -> None:
        # By path: the class needs torch, and is imported when a checkpoint asks for it.
        registry.add(ARCEE, "minivllm_fair_share.arcee:ArceeForCausalLM", config_reader=read_arcee_config)

    @hookimpl
    def minivllm_register_commands(self, cli: "typer.Typer") -> None:
        settings = self.shares.settings

        @cli.command("fair-share")
        def fair_share() -> None:
            """Show the weights of the tenants."""
            for tenant, weight in settings.weights.items():
                print(f"{tenant}: {weight:g}")
            print(f"everybody else: {settings.default_weight:g}")


def read_arcee_config(config: Mapping[str, Any]) -> "ModelConfig":
    """``config.json`` of an Arcee checkpoint: a Llama's, except for the activation, which the engine's reader would refuse."""
    from minivllm_plugin.models.config import ModelConfig

    activation = config.get("hidden_act", "relu2")
    if activation != "relu2":
        raise ValueError(f"hidden_act must be 'relu2', got {activation!r}")
    return ModelConfig.from_hf({**config, "hidden_act": "silu"}, known=(ARCEE,))
