"""A further rank of a tensor-parallel engine: ``python -m minivllm_plugin.parallel.worker``, started by rank 0 and nobody else.

Its standard input is where rank 0 speaks: a plan, then one batch a step. Whatever ends rank 0 closes that pipe, and this process
ends at once, whatever it is doing. It loads its part of the model and computes; it neither samples nor schedules.

Threads: the main one does everything; another waits for the end of rank 0.
"""

import faulthandler
import logging
import os
import pickle
import select
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, BinaryIO

from minivllm_plugin.errors import MinivllmError
from minivllm_plugin.parallel.context import LostPeerError
from minivllm_plugin.parallel.messages import Answer, decode_layout, read_frame, write_frame

if TYPE_CHECKING:
    from minivllm_plugin.parallel.plan import RankPlan
    from minivllm_plugin.runner.model_runner import ModelRunner

__all__ = ["compute", "main"]

GLANCE_MILLISECONDS = 1000  # between looks at the parent: a fork of rank 0 may hold the pipe open after its death
GRACE_SECONDS = 5.0  # in which rank 0 is to hang up, when it has heard of a failure or noticed one


def main() -> None:
    """Serve until rank 0 hangs up."""
    requests, answers = _claim_pipes()
    faulthandler.enable()  # a crash in native code leaves last words, too
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    payload = read_frame(requests)
    if payload is None:
        return
    plan: RankPlan = pickle.loads(payload)  # from the process that started this one, through a pipe that nobody else holds
    threading.Thread(target=_end_with_rank_0, args=(plan, requests), name="minivllm-rank-end", daemon=True).start()
    try:
        runner = _start(plan, requests, answers)
    except MinivllmError as error:
        write_frame(answers, Answer(error=type(error).__name__, message=str(error)).to_bytes())
        time.sleep(GRACE_SECONDS)  # rank 0 hangs up, unless it is in a collective, where only a death is noticed
        sys.exit(str(error))
    _serve(runner, requests)


def compute(runner: "ModelRunner", payload: bytes) -> None:
    """One step: what :func:`minivllm_plugin.parallel.messages.encode_layout` made of it, on this rank's part of the model."""
    from minivllm_kernels.dispatch import using

    layout = decode_layout(payload)
    with using(runner.backends):
        hidden, inputs = runner.forward(layout)
        if layout.wanted.rows:
            runner.model.module.compute_logits(hidden.index_select(0, inputs.logit_rows))


def _start(plan: "RankPlan", requests: BinaryIO, answers: BinaryIO) -> "ModelRunner":
    """Join the others, load, and take a pool of the size that all of them have room for."""
    import torch

    from minivllm_plugin.parallel.groups import ProcessGroup

    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    write_frame(answers, Answer().to_bytes())  # rank 0 waits for these words, and then for nobody in vain in the group
    group = ProcessGroup(plan.backend, plan.rendezvous, plan.rank, plan.size, device)
    runner = plan.load(group)
    write_frame(answers, Answer(num_blocks=runner.plan_num_blocks(plan.engine)).to_bytes())
    agreed = read_frame(requests)
    if agreed is None:
        sys.exit(0)
    runner.allocate_kv_cache(int.from_bytes(agreed, "little"), plan.engine.block_size)
    runner.capture_graphs()
    write_frame(answers, Answer().to_bytes())
    return runner


def _serve(runner: "ModelRunner", requests: BinaryIO) -> None:
    import torch

    with torch.inference_mode():
        while (payload := read_frame(requests)) is not None:
            try:
                compute(runner, payload)
            except LostPeerError:
                # Rank 0 knows who was lost, and hangs up. One that ends before would be taken for the culprit.
                time.sleep(GRACE_SECONDS)
                raise


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers) as files of our own: what libraries print goes to standard error, and what they read is empty."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _end_with_rank_0(plan: "RankPlan", requests: BinaryIO) -> None:
    """Wait until nobody can write to the pipe any more, and end this process: the main thread may be in a collective."""
    poll = select.poll()
    poll.register(requests.fileno(), 0)  # no event is asked for; a hang-up is reported unasked
    while not poll.poll(GLANCE_MILLISECONDS) and os.getppid() == plan.parent:
        pass
    shutil.rmtree(plan.rendezvous.parent, ignore_errors=True)  # if it was killed, it cannot do this itself
    os._exit(0)


if __name__ == "__main__":
    main()
