"""Thinking budgets on vLLM's V1 model runner, for requests that enter its batch with outputs.

vLLM counts the tokens of a section of thoughts step by step. The count is kept with a row of the
batch, and begins again when a request gets a new row: after a move, the death of an engine, a
preemption, or a step that it missed. vLLM then looks at all outputs at once, and takes the last
start and the last end among them for those of one section. Here they are counted one by one, as
they came without drafts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner


def count_earlier_outputs(model_runner: "V1Runner") -> None:
    """Make the runner count the outputs with which requests enter its batch; to be called once."""
    holder = model_runner.input_batch.thinking_budget_state_holder
    if holder is None:
        return
    sync_batch = holder.sync_batch

    def sync_and_count(batch_update: Any) -> None:
        earlier = list(holder._state.values())
        sync_batch(batch_update)
        known = set(map(id, earlier))
        for state in holder._state.values():
            if id(state) not in known:
                _count(holder, state)

    holder.sync_batch = sync_and_count


def _count(holder: "ThinkingBudgetStateHolder", state: dict[str, Any]) -> None:
    """Bring the new state of a request to where it was before the request's next step.

    Of the steps so far, those beside a start or an end are repeated: of an end that was forced all
    from the one in which the budget ran out. The last one may be cut off. The other steps change
    only counts, which vLLM takes from the number of outputs when they matter.
    """
    outputs: list[int] = state["output_tok_ids"]
    start, end = holder.think_start_token_ids, holder.think_end_token_ids

    def is_behind(marker: list[int], num_outputs: int) -> bool:
        return outputs[num_outputs - len(marker) : num_outputs] == marker

    for num_outputs in range(len(outputs)):
        if state["start_thinking"] != -1:
            next_outputs = outputs[num_outputs : num_outputs + len(end)]
            begins_end = next_outputs == end[: len(next_outputs)]
            matters = state["in_end"] or begins_end or is_behind(end, num_outputs)
        else:
            # A further end outside a section changes nothing, and would be searched for again.
            is_first_end = state["end_thinking"] == -1 and is_behind(end, num_outputs)
            matters = is_first_end or is_behind(start, num_outputs)
        if matters:
            state["output_tok_ids"] = outputs[:num_outputs]
            holder._update_think_state(state)
    state["output_tok_ids"] = outputs
