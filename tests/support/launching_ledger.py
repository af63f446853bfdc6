"""A ledger that is launched and waited for, as a device is: it holds back each batch's tokens until they are asked for."""

from typing import Any

from minivllm_plugin.engine.runner import RunnerAnswers
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.testing import InvariantError, LedgerRunner


class LaunchedBatch:
    """Answers of one launch."""

    def __init__(self, runner: "LaunchingLedger", number: int, answers: RunnerAnswers) -> None:
        self._runner, self._number, self._answers = runner, number, answers

    def wait(self) -> RunnerAnswers:
        if self._runner.num_waited != self._number:
            raise InvariantError(f"launch {self._number} is waited for after {self._runner.num_waited} others")
        self._runner.num_waited += 1
        return self._answers


class LaunchingLedger(LedgerRunner):
    """As :class:`LedgerRunner`; knows the tokens that the host does not know yet.

    Requests whose id begins with ``host`` need the host's history: they must never be launched with a pending token.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_launched = self.num_waited = 0
        self.most_under_way = 0
        self.num_overlaps = 0
        self._latest: dict[int, tuple[Sequence, int]] = {}

    def can_launch(self, seqs: list[Sequence]) -> bool:
        return not any((seq.request_id or "").startswith("host") for seq in seqs)

    def launch(self, seqs: list[Sequence], is_prefill: bool) -> LaunchedBatch:
        pending = [seq for seq in seqs if seq.num_pending_tokens]
        if pending and not self.can_launch(seqs):
            raise InvariantError(f"{pending} are launched before the host knows what it needs")
        for seq in pending:
            owner, token = self._latest.get(id(seq), (None, 0))
            if owner is not seq or seq.num_pending_tokens != 1:
                raise InvariantError(f"{seq!r} goes on with a token that the launch before did not choose")
            seq.token_ids.append(token)
            seq.num_pending_tokens = 0
        try:
            answers = self.run(seqs, is_prefill)
        finally:
            for seq in pending:
                seq.token_ids.pop()
                seq.num_pending_tokens = 1
        self._latest = {id(seq): (seq, answer) for seq, answer in zip(seqs, answers, strict=True) if isinstance(answer, int)}
        self.num_launched += 1
        under_way = self.num_launched - self.num_waited
        self.most_under_way = max(self.most_under_way, under_way)
        self.num_overlaps += under_way == 2
        return LaunchedBatch(self, self.num_launched - 1, answers)
